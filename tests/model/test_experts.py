"""The arithmetic of experts. If a GPU repeats a computation of experts, the results have the same
bits.

test_same_as_transformers.py would find a token that an expert drops, and test_same_gradients.py
would find an auxiliary loss.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.model.experts import grouped_outer, grouped_product

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("sizes", [(5, 0, 7, 1, 0), (0, 0, 13, 0, 0), (3, 3, 3, 2, 2)])
@pytest.mark.parametrize(
    ("where", "dtype", "features"),
    [
        ("cpu", torch.float64, 4),
        *(pytest.param("cuda", torch.bfloat16, n, marks=pytest.mark.gpu) for n in (256, 16)),
    ],
)
def test_grouped_products(sizes, where, dtype, features):
    """The products are exact on the CPU. On a GPU in bf16, torch's grouped product is compared with
    products in fp64. Some groups are empty, and some have an odd number of tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = sizes if where == "cpu" else tuple(77 * size for size in sizes)
    # The tensors are made on the CPU and then moved, because after some other tests `device="cuda"`
    # means the CPU.
    x, y = (
        torch.randn(sum(sizes), size, generator=generator).to(where, dtype)
        for size in (features, 2 * features)
    )
    matrices = torch.randn(5, features, 2 * features, generator=generator).to(where, dtype)
    ends = torch.tensor(sizes).cumsum(0).to(where, torch.int32)
    for actual, expected in (
        (grouped_product(x, matrices, ends), products(x, matrices, sizes)),
        (
            grouped_product(y, matrices.transpose(1, 2), ends),
            products(y, matrices.transpose(1, 2), sizes),
        ),
        (grouped_outer(x, y, ends), outers(x, y, sizes)),
    ):
        assert actual.dtype is dtype
        assert (actual.double() - expected).norm() <= (
            0.0 if where == "cpu" else 0.01 * expected.norm()
        )
    assert not grouped_outer(x, y, ends)[
        [group for group, size in enumerate(sizes) if size == 0]
    ].any()


def products(x, matrices, sizes):
    return torch.cat(
        [
            part @ matrix
            for part, matrix in zip(x.double().split(sizes), matrices.double(), strict=True)
        ]
    )


def outers(x, y, sizes):
    return torch.stack(
        [a.T @ b for a, b in zip(x.double().split(sizes), y.double().split(sizes), strict=True)]
    )


SAME_BITS = """
import sys, torch
from pathlib import Path
from policies import gradients, make_policy, write_random_adapter
from tandem.model import device, parallel
from tandem.model.rows import RowTensors
from tiny import write_random_model
directory, where = Path(sys.argv[1]), device.activate("cuda")
parallel.init_parallel()
model = write_random_model(directory / "model", family="qwen3_moe", hidden_size=256, num_experts=32,
    num_experts_per_tok=8, moe_intermediate_size=128, head_dim=64, max_position_embeddings=4096)
adapter = write_random_adapter(directory / "adapter", model)
policy = make_policy(model, adapter=adapter, recompute="full")
slots = torch.arange(2048, device=where)
row = RowTensors(slots * 7 % 260, slots, torch.full_like(slots, 2048), slots[:-1], slots[1:])
results = []
for _ in range(3):
    outputs = policy(row)
    (outputs.logprobs.mean() + outputs.entropy.mean()).backward()
    results.append([outputs.logprobs.detach(), *gradients(policy).values()])
assert all(tensor.isfinite().all() and tensor.any() for tensor in results[0])
for other in results[1:]:
    assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
parallel.destroy()
print("same bits", len(results[0]))
"""


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_twice(tmp_path):
    """Three passes of a mixture of experts give the same log-probs and gradients bit for bit, so no
    sum depends on the order of threads."""
    command = [sys.executable, "-c", SAME_BITS, str(tmp_path)]
    done = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False
    )
    assert "same bits" in done.stdout, done.stderr[-3000:]
