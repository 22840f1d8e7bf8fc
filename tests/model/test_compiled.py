"""What torch.compile made is read back by whoever needs it next, and is made again where it can't be."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.model.compiled import Compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")


def function(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.softmax(x @ weight * scale, -1).sin()


@pytest.fixture(autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.getbasetemp() / "inductor"  # one for all, since torch tries the machine's compiler out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    shutil.rmtree(directory / "tandem", ignore_errors=True)
    return directory / "tandem"


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each time torch.compile was asked."""
    asked: list[object] = []
    inner = torch.compile

    def spy(*args: object, **options: object) -> object:
        asked.append(args)
        return inner(*args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "compile", spy)
    return asked


# FlexAttention as a rank calls it, but for the CPU's missing gradients, for a whole row and for the first 200 slots of
# it; how far it is from the dense mask's result, and how often torch.compile was asked for it.
ATTENTION = """
import sys, torch
from types import SimpleNamespace
from tandem.model.attention import TreeAttention, rotation, tree_params
asked, inner = [], torch.compile
torch.compile = lambda *args, **options: asked.append(args) or inner(*args, **options)
generator = torch.Generator().manual_seed(0)
query = torch.randn(300, 1, 4, 16, generator=generator).to(sys.argv[1])
key, value = torch.randn(300, 1, 2, 32, generator=generator).to(sys.argv[1]).chunk(2, -1)
ends = torch.arange(300) // 100 * 100 + 100
attention = TreeAttention(SimpleNamespace(kv_channels=16))
furthest = 0.0
with torch.no_grad():
    for slots in (300, 300, 200):
        positions, frequencies = torch.arange(slots) % 100, torch.rand(8, generator=generator)
        turns = rotation(positions.to(query.device), frequencies.to(query.device), torch.float32)
        first = [tensor[:slots] for tensor in (query, key, value)]
        flex, dense = (
            attention(*first, None, packed_seq_params=tree_params(ends, kernel, turns)) for kernel in ("flex", "sdpa")
        )
        assert flex.shape == dense.shape == (slots, 1, 64)
        furthest = max(furthest, float((flex - dense).abs().max()))
print(len(asked), furthest < (1e-5 if sys.argv[1] == "cpu" else 1e-2))
"""


def arguments(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(rows)
    return (
        torch.randn(rows, 16, generator=generator, requires_grad=True),
        torch.randn(16, 16, generator=generator, requires_grad=True),
        0.3,
    )


def results(called: object, x: torch.Tensor, weight: torch.Tensor, scale: float) -> list[torch.Tensor]:
    output = called(x, weight, scale)  # type: ignore[operator]
    return [output, *torch.autograd.grad(output.square().sum(), (x, weight))]


def test_another_process_reads_what_was_compiled_and_its_gradients(compiles: list[object], files: Path) -> None:
    expected = results(function, *arguments())
    made = results(Compiled(function), *arguments())
    assert len(compiles) == len(list(files.iterdir())) == 1
    torch.testing.assert_close(made, expected)
    read = results(Compiled(function), *arguments())
    assert len(compiles) == 1
    assert all(torch.equal(mine, other) for mine, other in zip(read, made, strict=True))


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_attention_is_compiled_by_the_first_process_alone(where: str) -> None:
    told = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", ATTENTION, where]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        told.append(ran.stdout.split())
    assert told == [["1", "True"], ["0", "True"]]


def test_each_kind_of_arguments_is_compiled_once(compiles: list[object], files: Path) -> None:
    compiled = Compiled(function)
    x, weight, scale = arguments()
    for _ in range(2):
        for kind in ((x, weight, scale), arguments(4), (x, weight.t(), scale), (x.detach(), weight, scale),
                     (x, weight, 0.5), (x.double(), weight.double(), scale)):  # fmt: skip
            torch.testing.assert_close(compiled(*kind), function(*kind))
        with torch.no_grad():
            assert not compiled(x, weight, scale).requires_grad
    assert len(compiles) == len(list(files.iterdir())) == 7


@pytest.mark.parametrize("damage", [b"", b"not a pickle", None])
def test_a_file_that_is_damaged_is_written_again(compiles: list[object], files: Path, damage: bytes | None) -> None:
    made = Compiled(function)(*arguments())
    (file,) = files.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.warns(UserWarning, match="can't be used, compiling again"):
        again = Compiled(function)(*arguments())
    assert torch.equal(made, again)
    assert len(compiles) == 2
    assert torch.equal(Compiled(function)(*arguments()), made)
    assert len(compiles) == 2


def test_where_nothing_can_be_written_it_is_compiled_all_the_same(compiles: list[object], files: Path) -> None:
    files.parent.mkdir(exist_ok=True)
    files.write_text("in the way")
    with pytest.warns(UserWarning, match="can't be written"):
        made = Compiled(function)(*arguments())
    files.unlink()
    torch.testing.assert_close(made, function(*arguments()))


def test_what_decides_about_the_code_decides_about_the_file(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(function)
    x, weight, scale = arguments()
    seen = {compiled._digest((), (x, weight, scale))}
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    seen.add(compiled._digest((), (x, weight, scale)))
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    seen.add(compiled._digest((), (x, weight, scale)))
    monkeypatch.setattr(torch, "__version__", "9")
    seen.add(compiled._digest((), (x, weight, scale)))
    seen.add(compiled._digest((1,), (x, weight, scale)))
    assert len(seen) == 4
