"""The Triton kernels of a gated delta net compute the same as torch's operations in float64. This
is true of the forward and of the backward pass. On the CPU, Triton's interpreter runs the kernels,
in a process of its own."""

import os
import random
import subprocess
import sys

import pytest
import torch

from conftest import SEED
from model.test_delta_rule import random_tree
from tandem.model.delta_rule import convolve, recurrence
from tandem.model.layer import gated_delta_net

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
kernel_test = (lambda test: test) if INTERPRETED else pytest.mark.gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SECTIONS = [10, 10, 12]
SMALL = [14] * 5 + [11] + [8] * 2 + [11] * 3 + [14] * 3 + [18] * 4 + [19, 20]
"""`subtree_end` of a tree with branches in branches, of a sequence, and of two slots of padding;
the interpreter is slow."""


def compare(found, expected, inputs, inputs64):
    """The largest relative difference of outputs and gradients, in norm."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]
    of_found = sum((x * w.to(x)).sum() for x, w in zip(found, weights, strict=True))
    of_expected = sum((x * w).sum() for x, w in zip(expected, weights, strict=True))
    pairs = [
        *zip(found, expected, strict=True),
        *zip(
            torch.autograd.grad(of_found, inputs),
            torch.autograd.grad(of_expected, inputs64),
            strict=True,
        ),
    ]
    return max(float((a.cpu().double() - b).detach().norm() / b.detach().norm()) for a, b in pairs)


def both(*shapes):
    """Random inputs in fp32 on DEVICE, and the same numbers in float64 on the CPU."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    return (
        [x.to(DEVICE).requires_grad_() for x in inputs],
        [x.double().requires_grad_() for x in inputs],
    )


def convolution(number, row_of=lambda row: row):
    """The result of `compare` for the convolution's kernels. The trees are random on a GPU, and
    SMALL in the interpreter."""
    from tandem.model.layer import triton_delta_net

    choose = random.Random(f"{SEED} delta net kernels {number}")
    ends = torch.tensor(SMALL) if INTERPRETED else random_tree(choose, 150)[0]
    features = sum(SECTIONS)
    inputs, inputs64 = both((len(ends), features + 3), (features, 4))
    row = row_of(recurrence(ends, len(ends), DEVICE))
    found = triton_delta_net.convolve_and_activate(
        inputs[0][:, :features], inputs[1], row, SECTIONS
    )
    assert all(part.is_contiguous() for part in found)
    row64 = recurrence(ends, len(ends), torch.device("cpu"))
    exact = convolve(inputs64[0][:, :features], inputs64[1], row64)
    expected = torch.nn.functional.silu(exact).split(SECTIONS, 1)
    return compare(found, expected, inputs, inputs64)


@kernel_test
@pytest.mark.parametrize("number", range(1 if INTERPRETED else 12))
def test_the_convolution_of_trees(number, monkeypatch):
    from tandem.model.layer import triton_delta_net

    monkeypatch.setattr(triton_delta_net, "_BLOCK", 8)  # several programs for each section
    assert convolution(number) < 1e-6


@kernel_test
@pytest.mark.parametrize(("heads", "size"), [(3, 12), (4, 16)])
def test_the_norm_and_the_gate(heads, size):
    from tandem.model.layer import triton_delta_net

    inputs, inputs64 = both((9, heads, size), (9, heads * size + 5), (size,))
    read, z, weight = inputs
    found = triton_delta_net.norm_and_gate(read, z[:, 2:-3], weight, 1e-6)
    read, z, weight = inputs64
    inverse = (read.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    gates = torch.nn.functional.silu(z[:, 2:-3]).reshape(read.shape)
    expected = (read * inverse * weight * gates).flatten(1)
    assert compare([found], [expected], inputs, inputs64) < 1e-6
    on_cpu = [x.detach().cpu() for x in inputs]
    torch_found = gated_delta_net._norm_and_gate(on_cpu[0], on_cpu[1][:, 2:-3], on_cpu[2], 1e-6)
    torch.testing.assert_close(torch_found.double(), expected.detach(), atol=1e-5, rtol=1e-5)


@kernel_test
def test_a_missing_reader_is_seen():
    """In the convolution, several later slots read a slot. If a backward pass leaves out one of
    these later slots, the comparison finds the mistake."""

    def broken(row):
        near = row.neighbours(4)
        near.begins[1:] -= 1
        return row

    assert convolution(0, broken) > 1e-3


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="is this process")
def test_the_kernels_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        command,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 1 skipped" in done.stdout
