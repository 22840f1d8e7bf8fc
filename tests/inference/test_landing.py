"""Whole weights that arrive in a worker's second copy and are exchanged with the live ones."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.test_merged_weights import LORA, Core, Model
from inference.worker_models import Worker, merged
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.parts import Part
from tandem.inference.server.worker import extension, landing
from tandem.inference.server.worker.landing import LandingWeights, Source
from tandem.inference.server.worker.model_weights import BASE
from tandem.spool.schema import LoraShape
from tiny import write_random_model

Workers = list[tuple[Worker, LandingWeights]]


@pytest.fixture
def each_model(directory: Path) -> Model:
    return Model(directory)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("dense"), family="qwen3")


@pytest.fixture
def model(dense: Path) -> Model:
    return Model(dense)


def landing_workers(model: Model, tp: int) -> Workers:
    workers = [model.worker(tp, rank) for rank in range(tp)]
    return [(w, LandingWeights(w.model, str(model.directory), lambda _: "device")) for w in workers]


def land(workers: Workers, version: str, source: Source | None = None, scale: float = 2.5) -> None:
    """Stage on all workers, and wait."""
    for _, weights in workers:
        weights.stage(version, scale, source)
    deadline = time.monotonic() + 20
    for _, weights in workers:
        while not weights.staged(version):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def serve(workers: Workers, version: str, source: Source | None = None) -> None:
    land(workers, version, source)
    for _, weights in workers:
        weights.swap(version)


def whole(model: Model, adapter: Path, directory: Path) -> Source:
    """The merged model as files."""
    directory.mkdir()
    save_file(merged(model.tensors, adapter), directory / "model.safetensors")
    return {"way": "volume", "directory": str(directory)}


def check(model: Model, workers: Workers, adapter: Path | None) -> None:
    tensors = model.tensors if adapter is None else merged(model.tensors, adapter)
    for rank, (worker, _) in enumerate(workers):
        assert worker.bits() == model.worker(len(workers), rank, tensors).bits()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("way", ["merge", "volume"])
def test_twenty_versions_leave_no_trace(each_model: Model, tmp_path: Path, tp: int, way: str) -> None:
    """Adapters of all layers and of some, in turn."""
    model = each_model
    shapes = (LORA, LoraShape(rank=2, alpha=5.0, targets=("q_proj", "down_proj")), LORA)
    adapters = [model.adapter(tmp_path, seed, lora) for seed, lora in enumerate(shapes)]
    sources = [whole(model, a, tmp_path / f"whole-{i}") if way == "volume" else None for i, a in enumerate(adapters)]
    workers = landing_workers(model, tp)
    for number in range(20):
        adapter, source = adapters[number % 3], sources[number % 3]
        serve(workers, str(adapter), source)
        assert {weights.staged(str(adapter)) for _, weights in workers} == {way}
        if number in (0, 1, 2, 19):
            check(model, workers, adapter)
    serve(workers, BASE)
    check(model, workers, None)


def test_the_version_before_comes_back_without_its_files(model: Model, tmp_path: Path) -> None:
    first, second = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = landing_workers(model, 2)
    serve(workers, str(first))
    serve(workers, str(second))
    (first / WEIGHTS_FILE).rename(tmp_path / "kept")
    serve(workers, str(first))
    (tmp_path / "kept").rename(first / WEIGHTS_FILE)
    check(model, workers, first)
    serve(workers, str(second))
    check(model, workers, second)


def test_live_weights_do_not_change_while_others_arrive(model: Model, tmp_path: Path) -> None:
    first, second = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = landing_workers(model, 2)
    serve(workers, str(first))
    land(workers, str(second))
    check(model, workers, first)


def test_a_version_is_lost_from_the_moment_that_another_one_is_ordered(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a swap to it could exchange what the thread of the other one has begun to write."""
    first, second = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = landing_workers(model, 1)
    serve(workers, str(first))
    [(_, weights)] = workers
    monkeypatch.setattr(landing.threading.Thread, "start", lambda _: None)  # it has not begun
    weights.stage(str(second), 2.5)
    with pytest.raises(RuntimeError, match="not staged"):
        weights.swap(BASE)
    check(model, workers, first)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.o_proj.weight"), "o_proj"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}), "q_proj"),
    ],
)
def test_files_that_do_not_fit_are_refused_and_the_adapter_serves(
    model: Model, tmp_path: Path, change: Any, match: str
) -> None:
    adapter = model.adapter(tmp_path, 1)
    source = whole(model, adapter, tmp_path / "whole")
    tensors: Mapping[str, Tensor] = load_file(tmp_path / "whole/model.safetensors")
    change(tensors)
    save_file(dict(tensors), tmp_path / "whole/model.safetensors")
    workers = landing_workers(model, 1)
    with pytest.raises(RuntimeError, match=match):
        land(workers, str(adapter), source)
    with pytest.raises(RuntimeError, match="not staged"):
        workers[0][1].swap(str(adapter))
    check(model, workers, None)
    serve(workers, str(adapter))
    check(model, workers, adapter)


def test_a_version_that_did_not_arrive_leaves_the_next_whole(model: Model, tmp_path: Path) -> None:
    """Half of the second copy has other weights then."""
    wrong, right = model.adapter(tmp_path, 1), model.adapter(tmp_path, 2, LoraShape(rank=2, targets=("q_proj",)))
    source = whole(model, wrong, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole/model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, tmp_path / "whole/model.safetensors")
    workers = landing_workers(model, 2)
    with pytest.raises(RuntimeError, match="did not arrive"):
        land(workers, str(wrong), source)
    land(workers, str(right), scale=16.0)
    for _, weights in workers:
        weights.swap(str(right))
    tensors = merged(model.tensors, right, 16.0)
    for rank, (worker, _) in enumerate(workers):
        assert worker.bits() == model.worker(2, rank, tensors).bits()


@pytest.mark.parametrize(("rows", "match"), [(slice(0, 5), "only a part of"), (slice(0, 0), "did not arrive")])
def test_a_tensor_that_comes_in_part_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: slice, match: str
) -> None:
    """The ranks and vLLM's workers agree on what is sent, so this would be a fault of theirs."""

    def receive(*_: Any) -> Iterator[tuple[Part, Tensor]]:
        name = "model.layers.0.self_attn.o_proj.weight" if rows.stop else "model.layers.9.self_attn.o_proj.weight"
        width = model.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1]
        part = Part(name, (slice(0, 5), slice(0, width)), "", 1, (slice(0, 1), slice(0, 5)), 0)
        yield part, torch.zeros(part.shape)

    monkeypatch.setattr(landing, "receive", receive)
    workers = landing_workers(model, 2)
    with pytest.raises(RuntimeError, match=match):
        land(workers, "whole", {"way": "nccl"})
    check(model, workers, None)


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exchanges of parameters that fail half-way, counted from now."""
    fail, exchange, count = list[int](), LandingWeights._exchange, 0

    def exchange_or_fail(weights: LandingWeights, name: str) -> None:
        nonlocal count
        count += bool(fail)
        if count in fail:
            raise RuntimeError("out of memory")
        exchange(weights, name)

    monkeypatch.setattr(LandingWeights, "_exchange", exchange_or_fail)
    monkeypatch.setattr(extension, "_tend", lambda *_: {"a": 5})  # it needs the real vLLM
    return fail


@pytest.mark.parametrize("where", ["first worker", "second worker"])
def test_an_exchange_that_fails_is_undone_on_all_workers(
    model: Model, tmp_path: Path, breakable: list[int], where: str
) -> None:
    old, new = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = landing_workers(model, 2)
    core = Core([weights for _, weights in workers])  # type: ignore[misc]
    for adapter in (old, new):
        land(workers, str(adapter))
        if adapter == old:
            assert core.swap(str(old)).keys() == {"seconds", "tokens"}
    breakable.append(2 if where == "first worker" else len(workers[0][1]._copy) + 3)
    assert core.swap(str(new)) == {"error": "RuntimeError: out of memory"}
    check(model, workers, old)
    assert core.aborted == []
    breakable.clear()
    assert "error" not in core.swap(str(new))
    check(model, workers, new)


def test_torn_weights_are_whole_after_the_next_swap(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy fails within a parameter, so nobody knows what it has."""
    monkeypatch.setattr(extension, "_tend", lambda *_: {})
    monkeypatch.setattr(landing, "SPARE_BYTES", 1000)
    old, new = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = landing_workers(model, 2)
    core = Core([weights for _, weights in workers])  # type: ignore[misc]
    serve(workers, str(old))
    core.tandem_version = str(old)  # type: ignore[attr-defined]
    land(workers, str(new))
    weights = workers[1][1]
    name = "model.layers.1.self_attn.qkv_proj.weight"

    class Broken:
        """The copy of a parameter, whose second piece can't be written."""

        def __init__(self, copy: Tensor) -> None:
            self.copy = copy

        def split(self, rows: int) -> list[Any]:
            first, *rest = self.copy.split(rows)
            return [first, *(piece[:0] for piece in rest)]

    whole_copy = weights._copy[name]
    weights._copy[name] = Broken(whole_copy)  # type: ignore[assignment]
    assert "torn" in core.swap(str(new))
    assert core.aborted == ["a", "b"]
    weights._copy[name] = whole_copy
    serve(workers, str(new))
    check(model, workers, new)
