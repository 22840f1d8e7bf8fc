"""Whole weights arrive in a worker's second copy of the weights, and a swap exchanges the second
copy with the live weights. Tests that apply to merged adapters too are in
`test_merged_weights.py`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference.test_merged_weights import SOME, whole_model
from inference.worker_models import Core, Model, Workers
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.server.worker import extension, landing
from tandem.inference.server.worker.model_weights import BASE
from tandem.model.transfer.parts import Part


def test_the_version_before_comes_back_without_its_files(dense: Model, tmp_path: Path) -> None:
    first, second = (dense.adapter(tmp_path, seed) for seed in (1, 2))
    workers = Workers(dense, 2, whole=True)
    workers.serve(first)
    workers.stage(second)
    workers.check(first)  # the live weights do not change while new weights arrive
    workers.serve(second)
    (first / WEIGHTS_FILE).rename(tmp_path / "kept")
    workers.serve(first)
    (tmp_path / "kept").rename(first / WEIGHTS_FILE)
    workers.check(first)
    workers.serve(second)
    workers.check(second)


def test_a_version_is_lost_from_the_moment_that_another_one_is_ordered(
    dense: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap to the first version could exchange pieces that the second version's thread has begun
    to write."""
    first, second = (dense.adapter(tmp_path, seed) for seed in (1, 2))
    workers = Workers(dense, whole=True)
    workers.serve(first)
    # The thread that writes the second version never begins.
    monkeypatch.setattr(landing.threading.Thread, "start", lambda _: None)
    workers.order(second)
    with pytest.raises(RuntimeError, match="not staged"):
        workers.weights[0].swap(BASE)
    workers.check(first)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.o_proj.weight"), "did not arrive: .*o_proj"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}),
            "q_proj",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_and_the_next_version_is_whole(
    dense: Model, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], match: str
) -> None:
    """A refusal leaves a part of the refused weights in the second copy."""
    wrong, right = dense.adapter(tmp_path, 1), dense.adapter(tmp_path, 2, SOME)
    source = whole_model(dense, wrong, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole/model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "whole/model.safetensors")
    workers = Workers(dense, 2, whole=True)
    with pytest.raises(RuntimeError, match=match):
        workers.stage(wrong, source)
    with pytest.raises(RuntimeError, match="not staged"):
        workers.weights[0].swap(str(wrong))
    workers.check(None)
    workers.serve(right, scale=16.0)
    workers.check(right, scale=16.0)


@pytest.mark.parametrize(
    ("rows", "match"), [(slice(0, 5), "only a part of"), (slice(0, 0), "did not arrive")]
)
def test_a_tensor_that_comes_in_part_is_refused(
    dense: Model, monkeypatch: pytest.MonkeyPatch, rows: slice, match: str
) -> None:
    """Ranks and vLLM's workers agree on the tensors before a transfer, so a tensor that comes in
    part would be a bug."""

    def receive(*_: Any) -> Iterator[tuple[Part, Tensor]]:
        name = (
            "model.layers.0.self_attn.o_proj.weight"
            if rows.stop
            else "model.layers.9.self_attn.o_proj.weight"
        )
        width = dense.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1]
        part = Part(name, (slice(0, 5), slice(0, width)), "", 1, (slice(0, 1), slice(0, 5)), 0)
        yield part, torch.zeros(part.shape)

    monkeypatch.setattr(landing, "receive", receive)
    workers = Workers(dense, 2, whole=True)
    with pytest.raises(RuntimeError, match=match):
        workers.stage("whole", {"way": "nccl", "meeting": ""})
    workers.check(None)


class BrokenCopy:
    """The second copy of a parameter; writing the parameter's second piece fails."""

    def __init__(self, copy: Tensor) -> None:
        self.copy = copy

    def split(self, rows: int) -> list[Any]:
        first, *rest = self.copy.split(rows)
        return [first, *(piece[:0] for piece in rest)]


def test_torn_weights_are_whole_after_the_next_swap(
    dense: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy fails within a parameter, so the parameter's content is unknown."""
    monkeypatch.setattr(extension, "_tend", lambda *_: {})
    monkeypatch.setattr(landing, "SPARE_BYTES", 1000)
    old, new = (dense.adapter(tmp_path, seed) for seed in (1, 2))
    workers = Workers(dense, 2, whole=True)
    core = Core(workers)
    workers.stage(old)
    core.swap(old)
    workers.stage(new)
    copies, name = workers.weights[1]._copy, "model.layers.1.self_attn.qkv_proj.weight"
    whole = copies[name]
    copies[name] = BrokenCopy(whole)
    assert "torn" in core.swap(new)
    assert core.aborted == ["a", "b"]
    copies[name] = whole
    workers.serve(new)
    workers.check(new)
