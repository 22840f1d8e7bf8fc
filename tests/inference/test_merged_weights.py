"""Where each weight lies in vLLM's workers, what a merge makes of it, and what the publisher's check of it finds."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inference.worker_models import Worker, merged, stage
from policies import write_random_adapter
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, peft_keys
from tandem.inference.publisher.spot_check import SpotCheck
from tandem.inference.server.worker import extension, merged_weights
from tandem.inference.server.worker.extension import MergedWorker
from tandem.inference.server.worker.merged_weights import BASE, MergedWeights
from tandem.inference.server.worker.weight_plan import CannotWrite, plan
from tandem.spool.schema import LoraShape
from tiny import MERGED_SIZES, write_random_model

LORA = LoraShape(rank=4, alpha=10.0)


class Model:
    """A model's directory, and its tensors in the dtype that vLLM serves."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.directory = directory
        self.config = json.loads((directory / "config.json").read_text())
        self.dtype = dtype
        self.tensors = {name: value.to(dtype) for name, value in load_file(directory / "model.safetensors").items()}

    def worker(self, tp: int = 1, rank: int = 0, tensors: Mapping[str, Tensor] | None = None) -> Worker:
        return Worker(tensors or self.tensors, self.config, tp, rank)

    def workers(self, tp: int) -> list[tuple[Worker, MergedWeights]]:
        return [((worker := self.worker(tp, rank)), worker.weights(self.directory)) for rank in range(tp)]

    def adapter(self, path: Path, seed: int, lora: LoraShape = LORA) -> Path:
        return write_random_adapter(path / f"adapter-{seed}", self.directory, lora, seed=seed)

    def check(self, workers: list[tuple[Worker, MergedWeights]], adapter: Path) -> None:
        """Every bit is that of a numpy merge of the whole model, cut for the worker."""
        expected = merged(self.tensors, adapter)
        for rank, (worker, _) in enumerate(workers):
            assert worker.bits() == self.worker(len(workers), rank, expected).bits()


@pytest.fixture
def model(directory: Path) -> Model:
    return Model(directory)


@pytest.fixture(scope="module")
def moe_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("moe"), family="qwen3_moe", **MERGED_SIZES["qwen3_moe"])


@pytest.fixture
def moe(moe_directory: Path) -> Model:
    return Model(moe_directory)


@pytest.fixture(scope="module")
def dense_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("dense"), family="qwen3")


@pytest.fixture
def dense(dense_directory: Path) -> Model:
    return Model(dense_directory)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_workers_blocks_are_the_whole_model(model: Model, tp: int) -> None:
    """With 2 heads of keys and values, 4 workers have each of them twice."""
    times = {name: np.zeros(value.shape, int) for name, value in model.tensors.items()}
    for rank in range(tp):
        worker = model.worker(tp, rank)
        parameters = dict(worker.model.named_parameters())
        places = {name: np.zeros(value.shape, int) for name, value in parameters.items()}
        for block in plan(worker.model):
            for index, (name, part) in enumerate(
                zip(block.names, block.view(parameters[block.parameter]), strict=True)
            ):
                assert torch.equal(part, model.tensors[name][block.of]), name
                times[name][block.of] += 1
                if block.stacked:
                    places[block.parameter][(index, *block.at)] += 1
                else:
                    places[block.parameter][block.at] += 1
        for name, place in places.items():
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                place = place[
                    : worker[name.removesuffix(".weight")].shard_indices.org_vocab_end_index - rank * len(place)
                ]
            assert (place == 1).all(), name
    for name, count in times.items():
        kind = name.split(".")[-2]
        copies = tp if "norm" in kind or kind == "gate" else max(1, tp // 2) if kind in ("k_proj", "v_proj") else 1
        assert (count == copies).all(), (name, Counter(count.ravel().tolist()))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_swaps_give_the_bits_of_one_merge(
    directory: Path, tmp_path: Path, tp: int, dtype: torch.dtype
) -> None:
    model = Model(directory, dtype)
    adapters = [model.adapter(tmp_path, seed) for seed in range(3)]
    workers = model.workers(tp)
    for _, weights in workers:
        for number in range(100):
            weights.swap(stage(weights, adapters[number % 3]))
    model.check(workers, adapters[99 % 3])
    for _, weights in workers:
        weights.swap(BASE)
    assert [worker.bits() for worker, _ in workers] == [model.worker(tp, rank).bits() for rank in range(tp)]


def test_tensors_that_an_adapter_leaves_out_are_the_base_models(model: Model, tmp_path: Path) -> None:
    everywhere = model.adapter(tmp_path, 1)
    some = model.adapter(tmp_path, 2, LoraShape(rank=2, alpha=5.0, targets=("q_proj", "o_proj")))
    workers = model.workers(2)
    for adapter in (everywhere, some, everywhere, some):
        for _, weights in workers:
            weights.swap(stage(weights, adapter))
        model.check(workers, adapter)


def refuse(model: Model, change: Callable[[Worker], None], match: str, **of: int) -> None:
    worker = model.worker(**of)
    change(worker)
    with pytest.raises(CannotWrite, match=match):
        worker.weights(model.directory)


class Fp8LinearMethod: ...


MLP = "model.layers.1.mlp"


def swap_gate_and_up(worker: Worker) -> None:
    weight = worker[f"{MLP}.gate_up_proj"].weight
    weight.copy_(torch.cat(weight.clone().chunk(2)[::-1]))


def quantise(worker: Worker) -> None:
    worker[f"{MLP}.down_proj"].quant_method = Fp8LinearMethod()


def pack(worker: Worker) -> None:
    worker[f"{MLP}.down_proj"].weight = nn.Parameter(torch.empty(0), requires_grad=False)


def add_a_layer(worker: Worker) -> None:
    worker[MLP].add_module("extra", nn.Linear(2, 2))


def rename_the_fused_layer(worker: Worker) -> None:
    mlp = worker[MLP]
    mlp.add_module("in_proj", mlp.gate_up_proj)
    del mlp.gate_up_proj


def change_one_bit(worker: Worker) -> None:
    norm = worker["model.norm"].weight
    norm.view(torch.int32)[3] ^= 1


def wrong_rank(worker: Worker) -> None:
    worker[f"{MLP}.down_proj"].tp_rank = 1


def transpose_a_square(worker: Worker) -> None:
    worker["model.layers.0.mlp.experts"].w2_weight[3] = worker["model.layers.0.mlp.experts"].w2_weight[3].T.clone()


def add_a_bias(worker: Worker) -> None:
    worker["model.layers.0.mlp.experts"].register_parameter("w13_bias", nn.Parameter(torch.zeros(2)))


def distribute(worker: Worker) -> None:
    worker["model.layers.0.mlp.experts"].moe_config.moe_parallel_config.use_ep = True


@pytest.mark.parametrize(
    ("change", "match", "tp"),
    [
        (swap_gate_and_up, r"gate_up_proj.weight of vLLM differs from \S+gate_proj.weight", 1),
        (quantise, r"layers.1.mlp.down_proj is quantised \(Fp8LinearMethod\)", 1),
        (pack, r"packed model.layers.1.mlp.down_proj.weight", 1),
        (add_a_layer, r"files have no model.layers.1.mlp.extra.weight", 1),
        (rename_the_fused_layer, r"in_proj is fused from layers", 1),
        (change_one_bit, r"model.norm.weight of vLLM differs", 1),
        (wrong_rank, r"down_proj.weight of vLLM differs", 2),
    ],
)
def test_a_model_that_is_not_the_files_is_refused(
    dense: Model, change: Callable[[Worker], None], match: str, tp: int
) -> None:
    refuse(dense, change, match, tp=tp)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (transpose_a_square, r"w2_weight of vLLM differs from model.layers.0.mlp.experts.3.down_proj.weight"),
        (add_a_bias, r"w13_bias has no known place"),
        (distribute, r"experts are distributed"),
    ],
)
def test_experts_that_are_not_the_files_are_refused(moe: Model, change: Callable[[Worker], None], match: str) -> None:
    refuse(moe, change, match)


def test_the_proof_compares_bytes(dense: Model, tmp_path: Path) -> None:
    """0.0 equals -0.0."""
    changed = dense.tensors | {
        "model.norm.weight": dense.tensors["model.norm.weight"].index_fill(0, torch.tensor(0), 0)
    }
    save_file(changed, tmp_path / "model.safetensors")
    worker = dense.worker(tensors=changed)
    worker.weights(tmp_path)
    worker["model.norm"].weight[0] = -0.0
    with pytest.raises(CannotWrite, match=r"model\.norm\.weight"):
        worker.weights(tmp_path)


def altered(adapter: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(adapter / WEIGHTS_FILE)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, adapter / WEIGHTS_FILE)
    return adapter


A, B = peft_keys("model.layers.1.self_attn.q_proj")
EXPERT_A, EXPERT_B = peft_keys("model.layers.1.mlp.experts.3.up_proj")


def rename(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (rename(A, A.replace("q_proj", "z_proj")), r"no place for"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}),
            r"no place for \S+lm_head",
        ),
        (lambda t: t.pop(B), r"lora_B"),
        (lambda t: t.pop(EXPERT_A), r"experts.3.up_proj.lora_A"),
        (lambda t: (t.pop(EXPERT_A), t.pop(EXPERT_B)), r"experts.3.up_proj"),
        (lambda t: t.update({A: t[A].half()}), r"is F16, not F32"),
        (lambda t: t.update({A: t[A][:, :-1]}), r"q_proj.lora_A.weight and its B don't fit a layer"),
        (lambda t: t.update({A: torch.cat([t[A], t[A]], 1)}), r"don't fit"),
        (lambda t: t.update({B: torch.cat([t[B], t[B]])}), r"don't fit"),
        (lambda t: t.update({A: t[A][:-1]}), r"don't fit"),
        (lambda t: t.update({EXPERT_B: t[EXPERT_B].T}), r"experts.3.up_proj.lora_A.weight and its B don't fit"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    moe: Model, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], match: str, tp: int
) -> None:
    right = moe.adapter(tmp_path, 1)
    wrong = altered(moe.adapter(tmp_path, 2), change)
    workers = moe.workers(tp)
    for _, weights in workers:
        weights.swap(stage(weights, right))
        with pytest.raises(RuntimeError, match=match):
            stage(weights, wrong)
        with pytest.raises(RuntimeError, match="can't be read"):
            weights.swap(str(wrong))
    moe.check(workers, right)


def test_an_adapter_is_read_again_after_it_was_refused(dense: Model, tmp_path: Path) -> None:
    [(worker, weights)] = dense.workers(1)
    with pytest.raises(RuntimeError, match="can't be read"):
        stage(weights, tmp_path / "adapter-1")
    adapter = dense.adapter(tmp_path, 1)
    weights.swap(stage(weights, adapter))
    dense.check([(worker, weights)], adapter)


def test_versions_that_were_not_in_use_last_are_forgotten(dense: Model, tmp_path: Path) -> None:
    [(_, weights)] = dense.workers(1)
    adapters = [dense.adapter(tmp_path, seed) for seed in range(4)]
    for adapter in adapters[:3]:
        weights.swap(stage(weights, adapter))
    stage(weights, adapters[3])
    with pytest.raises(KeyError):
        weights.swap(str(adapters[0]))
    for adapter in adapters[1:]:
        weights.swap(str(adapter))
    weights.swap(BASE)


class Core:
    """vLLM's engine, whose workers are called as its executor calls them."""

    def __init__(self, workers: list[MergedWeights]) -> None:
        self.workers = [MergedWorker() for _ in workers]
        for worker, weights in zip(self.workers, workers, strict=True):
            worker.tandem_weights = weights
        self.scheduler = SimpleNamespace(requests={"a": 1, "b": 2})
        self.aborted: list[str] = []

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[dict[str, Any]]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def abort_requests(self, requests: list[str]) -> None:
        self.aborted += requests

    def swap(self, version: str, deadline: float = float("inf")) -> dict[str, Any]:
        return extension.swap(self, Core.collective_rpc, version, "keep", "run@1", deadline)

    def stage_and_swap(self, adapter: Path) -> dict[str, Any]:
        for worker in self.workers:
            stage(worker.tandem_weights, adapter)  # type: ignore[arg-type]
        return self.swap(str(adapter))


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The merges that fail, counted from now."""
    fail, merge, count = list[int](), merged_weights.merge, 0

    def merge_or_fail(*args: Any) -> None:
        nonlocal count
        if fail:
            count += 1
        if count in fail:
            args[0].fill_(7.0)
            raise RuntimeError("out of memory")
        merge(*args)

    monkeypatch.setattr(merged_weights, "merge", merge_or_fail)
    monkeypatch.setattr(extension, "_tend", lambda *_: {"a": 5})  # it needs the real vLLM
    return fail


@pytest.mark.parametrize("where", ["first worker", "last worker"])
def test_a_merge_that_fails_restores_the_old_bits_on_all_workers(
    model: Model, tmp_path: Path, breakable: list[int], where: str
) -> None:
    """The old adapter leaves out what the failing merge writes."""
    old = model.adapter(tmp_path, 1, LoraShape(rank=2, alpha=5.0, targets=("q_proj", "o_proj")))
    new = model.adapter(tmp_path, 2)
    workers = model.workers(2)
    core = Core([weights for _, weights in workers])
    assert core.stage_and_swap(old).keys() == {"seconds", "tokens"}
    each = len(plan(workers[0][0].model)) // 2
    breakable.append(each // 2 if where == "first worker" else each + 5)
    assert core.stage_and_swap(new) == {"error": "RuntimeError: out of memory"}
    model.check(workers, old)
    assert core.aborted == []
    breakable.clear()
    assert "error" not in core.swap(str(new))
    model.check(workers, new)


def test_weights_that_cannot_be_restored_are_torn_until_the_next_swap(
    dense: Model, tmp_path: Path, breakable: list[int]
) -> None:
    old, new = (dense.adapter(tmp_path, seed) for seed in (1, 2))
    workers = dense.workers(2)
    core = Core([weights for _, weights in workers])
    core.stage_and_swap(old)
    breakable += range(20, 200)
    assert "out of memory" in core.stage_and_swap(new)["torn"]
    assert core.aborted == ["a", "b"], "nobody gets a token of torn weights"
    breakable.clear()
    core.swap(str(new))
    dense.check(workers, new)


def test_an_order_that_comes_too_late_is_not_carried_out(dense: Model, tmp_path: Path, breakable: list[int]) -> None:
    workers = dense.workers(1)
    before = workers[0][0].bits()
    stage(workers[0][1], adapter := dense.adapter(tmp_path, 1))
    assert Core([workers[0][1]]).swap(str(adapter), deadline=0.0) == {"late": True}
    assert workers[0][0].bits() == before


class Served:
    """Workers that serve an adapter, and what the publisher's check says of them."""

    def __init__(self, model: Model, adapter: Path, tp: int, scale: float = 2.5) -> None:
        self.model, self.adapter = model, adapter
        self.workers = model.workers(tp)
        for _, weights in self.workers:
            weights.swap(stage(weights, adapter, scale))

    def wrong(
        self, adapter: Path | None = None, change: Callable[[list[Any]], object] = lambda _: None, **of: int
    ) -> str:
        """`of`: the row to look at, of some tensors."""
        check = SpotCheck(str(self.model.directory), str(self.model.dtype).removeprefix("torch."))
        expected = check.adapter_rows(adapter or self.adapter, LORA)
        expected.rows |= of
        found = [row for _, weights in self.workers for row in weights.rows(expected.rows)]
        change(found)
        return expected.wrong(found)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_spot_check_passes_right_weights(directory: Path, tmp_path: Path, tp: int, dtype: torch.dtype) -> None:
    model = Model(directory, dtype)
    served = Served(model, model.adapter(tmp_path, 1), tp)
    for _ in range(20):
        assert served.wrong() == ""


@pytest.mark.parametrize("tp", [1, 2])
def test_the_spot_check_finds_a_wrong_scale(model: Model, tmp_path: Path, tp: int) -> None:
    served = Served(model, model.adapter(tmp_path, 1), tp, scale=2.5 * (1 + 1e-4))
    assert "is another one" in served.wrong()


def test_the_spot_check_finds_one_stale_tensor(model: Model, tmp_path: Path) -> None:
    served = Served(model, model.adapter(tmp_path, 1), 1)
    [(worker, _)] = served.workers
    base = model.worker()
    worker["model.layers.1.self_attn.o_proj"].weight.copy_(base["model.layers.1.self_attn.o_proj"].weight)
    for _ in range(5):
        assert "of model.layers.1.self_attn.o_proj.weight is another one" in served.wrong()


def test_the_spot_check_finds_a_transposed_expert(moe: Model, tmp_path: Path) -> None:
    served = Served(moe, moe.adapter(tmp_path, 1), 1)
    [(worker, _)] = served.workers
    transpose_a_square(worker)
    assert "model.layers.0.mlp.experts.3.down_proj.weight is another one" in served.wrong()


@pytest.mark.parametrize("layer", ["self_attn.o_proj", "self_attn.q_proj"])
def test_the_spot_check_finds_the_slice_of_another_worker(model: Model, tmp_path: Path, layer: str) -> None:
    served = Served(model, model.adapter(tmp_path, 1), 2)
    (first, _), (second, _) = served.workers
    module = f"model.layers.1.{layer.replace('q_proj', 'qkv_proj')}"
    second[module].weight.copy_(first[module].weight)
    last = {f"model.layers.1.{layer}.weight": model.tensors[f"model.layers.1.{layer}.weight"].shape[0] - 1}
    wrong = served.wrong(**last)
    # Rows of k and v, in the same parameter, may be the second worker's, too.
    parts = ("q_proj", "k_proj", "v_proj") if layer == "self_attn.q_proj" else ("o_proj",)
    assert any(f"model.layers.1.self_attn.{part}.weight is another one" in wrong for part in parts), wrong


def test_the_spot_check_finds_swapped_modules(model: Model, tmp_path: Path) -> None:
    right = model.adapter(tmp_path, 1)
    pairs = list(zip(*(peft_keys(f"model.layers.0.self_attn.{name}_proj") for name in "kv"), strict=True))

    def swap(tensors: dict[str, Tensor]) -> None:
        for k, v in pairs:
            tensors[k], tensors[v] = tensors[v], tensors[k]

    wrong = altered(model.adapter(tmp_path / "wrong", 1), swap)
    assert "model.layers.0.self_attn" in Served(model, wrong, 2).wrong(right)


def test_the_spot_check_refuses_what_is_no_adapter_of_the_run(model: Model, tmp_path: Path) -> None:
    """An exception of another kind would end the publisher, again and again."""
    check = SpotCheck(str(model.directory), "float32")
    adapter = model.adapter(tmp_path, 1)
    whole = (adapter / WEIGHTS_FILE).read_bytes()
    contents = [b"nothing", whole[:100], whole[:8] + b"[" + whole[9:], (2).to_bytes(8, "little") + b"{}"]
    for content in contents:
        (adapter / WEIGHTS_FILE).write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=WEIGHTS_FILE):
            check.adapter_rows(adapter, LORA)
    (adapter / WEIGHTS_FILE).write_bytes(whole)
    with pytest.raises(CheckpointDamaged, match="no adapter of rank 8"):
        check.adapter_rows(adapter, LORA.model_copy(update={"rank": 8}))
    check.adapter_rows(adapter, LORA)


def test_the_spot_check_finds_a_missing_part(model: Model, tmp_path: Path) -> None:
    served = Served(model, model.adapter(tmp_path, 1), 2)
    name = "model.layers.0.self_attn.o_proj.weight"

    def at(found: list[Any]) -> list[int]:
        return [i for i, part in enumerate(found) if part["name"] == name]

    assert f"of {name}" in served.wrong(change=lambda found: found.pop(at(found)[1]))
    # Both workers say that they have the left half.
    assert f"of {name}" in served.wrong(change=lambda found: found.__setitem__(at(found)[1], found[at(found)[0]]))
    assert f"of {name}" in served.wrong(change=lambda found: [found.pop(i) for i in reversed(at(found))])
