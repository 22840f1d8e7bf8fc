"""A compiled function is written to a file. Later processes load this file. A file that can't be
used is made again."""

import errno
import importlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.errors import SpoolUnusable
from tandem.model import compiled
from tandem.model.compiled import Compiled

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)
of_files = pytest.mark.sample(1, of="compiled code on the disk")


def function(x, weight, scale):
    return torch.softmax(x @ weight * scale, -1).sin()


@pytest.fixture(autouse=True)
def files(tmp_path_factory, monkeypatch):
    """The directory of compiled functions. It is empty at the start of each test. The cache of
    torch is beside it. The cache is kept, because the compiler takes seconds to fill it."""
    directory = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    shutil.rmtree(directory / "tandem", ignore_errors=True)
    return directory / "tandem"


@pytest.fixture
def compiles(monkeypatch):
    """The arguments of each call of torch.compile."""
    calls, compile_function = [], torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda *args, **options: calls.append(args) or compile_function(*args, **options),
    )
    return calls


def arguments(rows=8):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randn(size, 16, generator=generator, requires_grad=True) for size in (rows, 16)
    )
    return x, weight, 0.3


def output_and_gradients(called, x, weight, scale):
    output = called(x, weight, scale)
    return [output, *torch.autograd.grad(output.square().sum(), (x, weight))]


@pytest.mark.slow
@of_files
def test_a_later_process_loads_the_function_and_its_gradients(compiles, files):
    made = output_and_gradients(Compiled(function), *arguments())
    assert len(compiles) == len(list(files.iterdir())) == 1
    torch.testing.assert_close(made, output_and_gradients(function, *arguments()))
    loaded = output_and_gradients(Compiled(function), *arguments())
    assert len(compiles) == 1
    assert all(torch.equal(one, other) for one, other in zip(loaded, made, strict=True))


@pytest.mark.slow
@of_files
def test_each_kind_of_arguments_is_compiled_once(compiles, files):
    both = Compiled(function)
    for _ in range(2):
        for kind in (arguments(8), arguments(4)):
            torch.testing.assert_close(both(*kind), function(*kind))
        with torch.no_grad():
            assert not both(*arguments()).requires_grad
    assert len(compiles) == len(list(files.iterdir())) == 3


def test_every_thread_compiles_as_deterministically_as_the_process_computes(monkeypatch):
    inductor, seen = importlib.import_module("torch._inductor.config"), []

    def compile_nothing(*_, **__):
        seen.append(inductor.deterministic)
        raise NotImplementedError

    monkeypatch.setattr(torch, "compile", compile_nothing)
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            with ThreadPoolExecutor(1) as thread, pytest.raises(NotImplementedError):
                thread.submit(Compiled(function), *arguments()).result()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    assert seen == [True, False]


def test_what_makes_another_kind():
    x, weight, scale = arguments()
    calls = [
        (x, weight, scale),
        arguments(4),
        (x, weight.t(), scale),
        (x.detach(), weight, scale),
        (x, weight, 0.5),
        (x.double(), weight.double(), scale),
    ]
    kinds = {compiled._kind(call) for call in calls}
    with torch.no_grad():
        kinds.add(compiled._kind((x, weight, scale)))
    assert len(kinds) == 7


# A program that calls FlexAttention as a rank does, for a whole row and for the row's first 200
# slots. The program computes no gradients, because FlexAttention has none on the CPU. The program
# prints the number of calls of torch.compile, and whether the result is that of the dense mask.
# Tandem's import of Megatron must not call torch.compile.
ATTENTION = """
import sys, torch
from torch.nn.functional import pad
calls, compile_function = [], torch.compile
torch.compile = lambda *args, **options: calls.append(args) or compile_function(*args, **options)
from tandem.model.attention import attend, rotation, tree_params
generator = torch.Generator().manual_seed(0)
query = torch.randn(300, 4, 16, generator=generator).to(sys.argv[1])
key, value = torch.randn(300, 2, 32, generator=generator).to(sys.argv[1]).chunk(2, -1)
ends = torch.arange(300) // 100 * 100 + 100
furthest = 0.0
with torch.no_grad():
    for slots in (300, 300, 200):
        positions, frequencies = torch.arange(slots) % 100, torch.rand(8, generator=generator)
        at, by = positions.to(query.device), frequencies.to(query.device)
        rotations = rotation(at, by, torch.float32)
        first = [tensor[:slots] for tensor in (query, key, value)]
        flex, dense = (
            attend(*(pad(t, (0, 0, 0, 0, 0, row.length - slots)) for t in first), row, 0.25)[:slots]
            for row in (tree_params(ends, kernel, rotations) for kernel in ("flex", "sdpa"))
        )
        assert flex.shape == dense.shape == (slots, 4, 16)
        furthest = max(furthest, float((flex - dense).abs().max()))
print(len(calls), furthest < (1e-5 if sys.argv[1] == "cpu" else 1e-2))
"""


@pytest.mark.slow
@of_files
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_the_first_process_compiles_the_attention(where):
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", ATTENTION, where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        outputs.append(done.stdout.split())
    assert outputs == [["1", "True"], ["0", "True"]]


@pytest.mark.slow
@of_files
def test_a_damaged_file_is_written_again(compiles, files):
    made = Compiled(function)(*arguments())
    (file,) = files.iterdir()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(UserWarning, match="can't be used, compiling again"):
        assert torch.equal(Compiled(function)(*arguments()), made)
    assert torch.equal(Compiled(function)(*arguments()), made)
    assert len(compiles) == 2


@pytest.mark.slow
@of_files
def test_a_directory_that_cannot_be_written_is_no_error(files, monkeypatch):
    def fail(path, _content):
        raise PermissionError(errno.EACCES, "read-only", str(path))

    monkeypatch.setattr(compiled.fs, "write_atomic", fail)
    with pytest.warns(UserWarning, match="can't be written"):
        made = Compiled(function)(*arguments())
    torch.testing.assert_close(made, function(*arguments()))


@pytest.mark.slow
@of_files
@pytest.mark.parametrize("which", ["cache", "tandem"])
@pytest.mark.parametrize("change", ["writable", "foreign", "link"])
def test_nothing_is_loaded_from_a_directory_of_others(
    compiles, files, monkeypatch, tmp_path, which, change
):
    """Compiled functions are pickles. A pickle that another user has written could run that user's
    code."""
    Compiled(function)(*arguments())
    directory = files if which == "tandem" else files.parent
    loads = []
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *_, **__: loads.append(1))
    if change == "writable":
        directory.chmod(0o777)
    elif change == "foreign":
        real = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: real + 1)
    elif which == "cache":
        (tmp_path / "link").symlink_to(directory)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "link"))
    else:
        directory.rename(tmp_path / "moved")
        directory.symlink_to(tmp_path / "moved")
    try:
        with pytest.raises(SpoolUnusable, match="remove it"):
            Compiled(function)(*arguments())
    finally:
        if directory.is_symlink():
            directory.unlink()
        else:
            directory.chmod(0o755)
    assert loads == []


def test_everything_that_changes_the_compilers_output_changes_the_file(monkeypatch):
    compiled_function, digests = Compiled(function), set()

    def digest(kind=()):
        digests.add(compiled_function._digest(kind, arguments()))
        return len(digests)

    assert digest() == 1
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert digest() == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    assert digest() == 2
    monkeypatch.setattr(torch, "__version__", "9")
    assert digest() == 3
    assert digest(kind=(1,)) == 4
