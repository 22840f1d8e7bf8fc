"""The tests check the place of each weight in vLLM's workers, and each weight's value after a swap.
The tests also check how the publisher checks a swap."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inference.worker_models import LORA, Core, Model, Worker, Workers
from tandem.errors import CheckpointDamaged
from tandem.families.adapter import WEIGHTS_FILE, peft_keys
from tandem.inference.server.worker import extension, model_weights
from tandem.inference.server.worker.landing import LandingWeights, Source
from tandem.inference.server.worker.model_weights import BASE
from tandem.inference.server.worker.weight_layout import CannotWrite, weight_layout
from tandem.inference.spot_check import SpotCheck
from tandem.spool.schema import LoraShape
from tiny import write_random_model
from waiting import until

SOME = LoraShape(rank=2, alpha=5.0, targets=("q_proj", "o_proj"))
KINDS = pytest.mark.parametrize("whole", [False, True], ids=["merged", "whole"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_workers_blocks_are_the_whole_model(model: Model, tp: int) -> None:
    """The model has 2 heads of keys and values. If there are 4 workers, each head is on two
    workers."""
    times = {name: np.zeros(value.shape, int) for name, value in model.tensors.items()}
    for rank in range(tp):
        worker = model.worker(tp, rank)
        parameters = dict(worker.model.named_parameters())
        places = {name: np.zeros(value.shape, int) for name, value in parameters.items()}
        for rectangle in weight_layout(worker.model):
            parts = zip(
                rectangle.names, rectangle.view(parameters[rectangle.parameter]), strict=True
            )
            for index, (name, part) in enumerate(parts):
                assert torch.equal(part, model.tensors[name][rectangle.in_tensor]), name
                times[name][rectangle.in_tensor] += 1
                places[rectangle.parameter][
                    (index, *rectangle.in_parameter)
                    if rectangle.stacked
                    else rectangle.in_parameter
                ] += 1
        for name, place in places.items():
            # vLLM pads the vocabulary of these two tensors.
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                shard = worker[name.removesuffix(".weight")].shard_indices
                place = place[: shard.org_vocab_end_index - rank * len(place)]
            assert (place == 1).all(), name
    for name, count in times.items():
        kind = name.split(".")[-2]
        copies = (
            tp
            if "norm" in kind or kind == "gate"
            else max(1, tp // 2)
            if kind in ("k_proj", "v_proj")
            else 1
        )
        assert (count == copies).all(), (name, Counter(count.ravel().tolist()))


@pytest.mark.sample(6)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("whole", "way", "dtype"),
    [
        (False, "merge", torch.float32),
        (False, "merge", torch.bfloat16),
        (True, "merge", torch.float32),
        (True, "volume", torch.float32),
    ],
)
def test_many_versions_leave_no_trace(
    directory: Path, tmp_path: Path, whole: bool, way: str, dtype: torch.dtype, tp: int
) -> None:
    """The versions are, in turn, two adapters of all layers and an adapter of some layers."""
    model = Model(directory, dtype)
    adapters = [model.adapter(tmp_path, seed, lora) for seed, lora in enumerate((LORA, SOME, LORA))]
    sources = [
        whole_model(model, a, tmp_path / f"{i}") if way == "volume" else None
        for i, a in enumerate(adapters)
    ]
    workers = Workers(model, tp, whole=whole)
    last = 99 if tp == 2 else 5
    for number in range(last + 1):
        adapter = adapters[number % 3]
        assert workers.serve(adapter, sources[number % 3]) == way
        if number in (0, 1, last):
            workers.check(adapter)
    workers.serve(BASE)
    workers.check(None)


def whole_model(model: Model, adapter: Path, directory: Path) -> Source:
    """The merged model as files."""
    directory.mkdir()
    save_file(model.merged(adapter), directory / "model.safetensors")
    return {"way": "volume", "directory": str(directory)}


DOWN, EXPERTS = "model.layers.1.mlp.down_proj", "model.layers.0.mlp.experts"


class Fp8LinearMethod: ...


def swap_gate_and_up(worker: Worker) -> None:
    weight = worker["model.layers.1.mlp.gate_up_proj"].weight
    weight.copy_(torch.cat(weight.clone().chunk(2)[::-1]))


def rename_the_fused_layer(worker: Worker) -> None:
    mlp = worker["model.layers.1.mlp"]
    mlp.add_module("in_proj", mlp.gate_up_proj)
    del mlp.gate_up_proj


def transpose_a_square(worker: Worker) -> None:
    square = worker[EXPERTS].w2_weight[3]
    square.copy_(square.T.clone())


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        (
            "qwen3",
            swap_gate_and_up,
            r"gate_up_proj.weight of vLLM differs from \S+gate_proj.weight",
        ),
        (
            "qwen3",
            lambda w: setattr(w[DOWN], "quant_method", Fp8LinearMethod()),
            r"layers.1.mlp.down_proj is quantised \(Fp8LinearMethod\)",
        ),
        (
            "qwen3",
            lambda w: setattr(w[DOWN], "weight", nn.Parameter(torch.empty(0), requires_grad=False)),
            r"packed model.layers.1.mlp.down_proj.weight",
        ),
        (
            "qwen3",
            lambda w: w["model.layers.1.mlp"].add_module("extra", nn.Linear(2, 2)),
            r"files have no model.layers.1.mlp.extra.weight",
        ),
        ("qwen3", rename_the_fused_layer, r"in_proj is fused from layers"),
        (
            "qwen3",
            lambda w: w["model.norm"].weight.view(torch.int32)[3].bitwise_xor_(1),
            r"model.norm.weight of vLLM",
        ),
        ("qwen3", lambda w: setattr(w[DOWN], "tp_rank", 1), r"down_proj.weight of vLLM differs"),
        (
            "qwen3_moe",
            transpose_a_square,
            r"w2_weight of vLLM differs from \S+0.mlp.experts.3.down_proj.weight",
        ),
        (
            "qwen3_moe",
            lambda w: w[EXPERTS].register_parameter("w13_bias", nn.Parameter(torch.zeros(2))),
            r"w13_bias has no known place",
        ),
        (
            "qwen3_moe",
            lambda w: setattr(w[EXPERTS].moe_config.moe_parallel_config, "use_ep", True),
            r"experts are distributed",
        ),
    ],
)
def test_a_model_that_is_not_the_files_is_refused(
    dense: Model, moe: Model, family: str, change: Callable[[Worker], None], match: str
) -> None:
    model = dense if family == "qwen3" else moe
    worker = model.worker(tp=2 if family == "qwen3" else 1)
    change(worker)
    with pytest.raises(CannotWrite, match=match):
        worker.weights(model.directory)


def test_the_proof_compares_bytes(dense: Model, tmp_path: Path) -> None:
    """A comparison of numbers would find no difference, because 0.0 equals -0.0."""
    norm = dense.tensors["model.norm.weight"].index_fill(0, torch.tensor(0), 0)
    changed = dense.tensors | {"model.norm.weight": norm}
    save_file(changed, tmp_path / "model.safetensors")
    worker = dense.worker(tensors=changed)
    worker.weights(tmp_path)
    worker["model.norm"].weight[0] = -0.0
    with pytest.raises(CannotWrite, match=r"model\.norm\.weight"):
        worker.weights(tmp_path)


def altered(adapter: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(adapter / WEIGHTS_FILE)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, adapter / WEIGHTS_FILE)
    return adapter


A, B = peft_keys("model.layers.1.self_attn.q_proj")
EXPERT_A, EXPERT_B = peft_keys("model.layers.1.mlp.experts.3.up_proj")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update({A.replace("q_proj", "z_proj"): t.pop(A)}), r"no place for"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}),
            r"place for \S+lm_head",
        ),
        (lambda t: t.pop(B), r"lora_B"),
        (lambda t: t.pop(EXPERT_A), r"experts.3.up_proj.lora_A"),
        (lambda t: (t.pop(EXPERT_A), t.pop(EXPERT_B)), r"experts.3.up_proj"),
        (lambda t: t.update({A: t[A].half()}), r"is F16, not F32"),
        (
            lambda t: t.update({A: t[A][:, :-1]}),
            r"q_proj.lora_A.weight and its B don't fit a layer",
        ),
        (lambda t: t.update({A: torch.cat([t[A], t[A]], 1)}), r"don't fit"),
        (lambda t: t.update({B: torch.cat([t[B], t[B]])}), r"don't fit"),
        (lambda t: t.update({A: t[A][:-1]}), r"don't fit"),
        (
            lambda t: t.update({EXPERT_B: t[EXPERT_B].T}),
            r"experts.3.up_proj.lora_A.weight and its B don't fit",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    moe: Model, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], match: str
) -> None:
    right = moe.adapter(tmp_path, 1)
    wrong = altered(moe.adapter(tmp_path, 2), change)
    workers = Workers(moe, 2)
    workers.serve(right)
    workers.order(wrong)
    for weights in workers.weights:
        with pytest.raises(RuntimeError, match=match):
            until("it is refused", lambda of=weights: of.staged(str(wrong)), poll=0.001)
        with pytest.raises(RuntimeError, match="can't be read"):
            weights.swap(str(wrong))
    workers.check(right)


def test_an_adapter_is_read_again_after_it_was_refused(dense: Model, tmp_path: Path) -> None:
    workers = Workers(dense)
    with pytest.raises(RuntimeError, match="can't be read"):
        workers.stage(tmp_path / "adapter-1")
    adapter = dense.adapter(tmp_path, 1)
    workers.serve(adapter)
    workers.check(adapter)


def test_versions_that_were_not_in_use_last_are_forgotten(dense: Model, tmp_path: Path) -> None:
    workers = Workers(dense)
    [weights] = workers.weights
    adapters = [dense.adapter(tmp_path, seed) for seed in range(4)]
    for adapter in adapters[:3]:
        workers.serve(adapter)
    workers.stage(adapters[3])
    with pytest.raises(KeyError):
        weights.swap(str(adapters[0]))
    for version in (*adapters[1:], BASE):
        weights.swap(str(version))


@pytest.fixture
def breakable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the merges and exchanges that fail. When a test has added a number to the
    list, the next merge or exchange gets the number 1."""
    fail, merge, exchange, count = list[int](), model_weights.merge, LandingWeights._exchange, 0

    def fails() -> bool:
        nonlocal count
        count += bool(fail)
        return count in fail

    def merge_or_fail(*args: Any) -> None:
        if fails():
            args[0].fill_(7.0)
            raise RuntimeError("out of memory")
        merge(*args)

    def exchange_or_fail(weights: LandingWeights, name: str) -> None:
        if fails():
            raise RuntimeError("out of memory")
        exchange(weights, name)

    monkeypatch.setattr(model_weights, "merge", merge_or_fail)
    monkeypatch.setattr(LandingWeights, "_exchange", exchange_or_fail)
    monkeypatch.setattr(extension, "_tend", lambda *_: {"a": 5})  # `_tend` needs the real vLLM.
    return fail


@KINDS
@pytest.mark.parametrize("where", ["first worker", "last worker"])
def test_a_swap_that_fails_restores_the_old_bits_on_all_workers(
    model: Model, tmp_path: Path, breakable: list[int], whole: bool, where: str
) -> None:
    """The old adapter has no tensors for the layers that the failing swap writes."""
    old, new = model.adapter(tmp_path, 1, SOME), model.adapter(tmp_path, 2)
    workers = Workers(model, 2, whole=whole)
    core = Core(workers)
    workers.stage(old)
    assert core.swap(old).keys() == {"seconds", "tokens"}
    workers.stage(new)
    each = len(workers.weights[0]._copy if whole else workers.weights[0]._adapted)
    breakable.append(2 if where == "first worker" else each + 3)
    assert core.swap(new) == {"error": "RuntimeError: out of memory"}
    workers.check(old)
    assert core.aborted == []
    breakable.clear()
    assert "error" not in core.swap(new)
    workers.check(new)


def test_weights_that_cannot_be_restored_are_torn_until_the_next_swap(
    dense: Model, tmp_path: Path, breakable: list[int]
) -> None:
    old, new = (dense.adapter(tmp_path, seed) for seed in (1, 2))
    workers = Workers(dense, 2)
    core = Core(workers)
    for adapter in (old, new):
        workers.stage(adapter)
        breakable += range(20, 200) if adapter == new else ()
        answer = core.swap(adapter)
    assert "out of memory" in answer["torn"]
    assert core.aborted == ["a", "b"], "nobody gets a token of torn weights"
    breakable.clear()
    core.swap(new)
    workers.check(new)


def test_an_order_that_comes_too_late_is_not_carried_out(dense: Model, tmp_path: Path) -> None:
    workers = Workers(dense)
    workers.stage(adapter := dense.adapter(tmp_path, 1))
    assert Core(workers).swap(adapter, deadline=0.0) == {"late": True}
    workers.check(None)


def test_an_order_that_reaches_a_sleeping_vllm_is_not_carried_out(
    dense: Model, tmp_path: Path
) -> None:
    """The weights of a sleeping vLLM are not in memory. An order can reach a sleeping vLLM if the
    process that gave the order has died."""
    workers = Workers(dense)
    core = Core(workers)
    workers.stage(adapter := dense.adapter(tmp_path, 1))
    core.sleeps = True
    assert core.swap(adapter) == {"late": True}
    workers.check(None)


class Served(Workers):
    """Workers that serve an adapter. `wrong` is the result of the publisher's check of these
    workers."""

    def __init__(self, model: Model, adapter: Path, tp: int, scale: float = 2.5) -> None:
        super().__init__(model, tp)
        self.adapter = adapter
        self.serve(adapter, scale=scale)

    def wrong(
        self,
        adapter: Path | None = None,
        change: Callable[[list[Any]], object] = lambda _: None,
        **of: int,
    ) -> str:
        """The problem that the publisher's check finds. The text is empty if the check finds no
        problem. `of` maps the names of some tensors to the row that the check compares. The check
        chooses the other tensors' rows at random."""
        check = SpotCheck(str(self.model.directory), str(self.model.dtype).removeprefix("torch."))
        expected = check.adapter_rows(adapter or self.adapter, LORA)
        expected.rows |= of
        found = [row for weights in self.weights for row in weights.rows(expected.rows)]
        change(found)
        return expected.wrong(found)


@pytest.mark.sample(6)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_spot_check_passes_right_weights(
    directory: Path, tmp_path: Path, tp: int, dtype: torch.dtype
) -> None:
    model = Model(directory, dtype)
    served = Served(model, model.adapter(tmp_path, 1), tp)
    for _ in range(20):
        assert served.wrong() == ""


def test_the_spot_check_finds_a_wrong_scale(model: Model, tmp_path: Path) -> None:
    assert (
        "is another one"
        in Served(model, model.adapter(tmp_path, 1), 2, scale=2.5 * (1 + 1e-4)).wrong()
    )


@pytest.mark.parametrize("stale", ["base model", "another worker"])
def test_the_spot_check_finds_one_stale_tensor(model: Model, tmp_path: Path, stale: str) -> None:
    served = Served(model, model.adapter(tmp_path, 1), 2)
    first, second = served.each
    other = first if stale == "another worker" else model.worker(2, 1)
    second["model.layers.1.self_attn.o_proj"].weight.copy_(
        other["model.layers.1.self_attn.o_proj"].weight
    )
    for _ in range(5):
        assert "of model.layers.1.self_attn.o_proj.weight is another one" in served.wrong()


def test_the_spot_check_finds_swapped_modules(model: Model, tmp_path: Path) -> None:
    right = model.adapter(tmp_path, 1)
    pairs = list(
        zip(*(peft_keys(f"model.layers.0.self_attn.{name}_proj") for name in "kv"), strict=True)
    )

    def swap(tensors: dict[str, Tensor]) -> None:
        for k, v in pairs:
            tensors[k], tensors[v] = tensors[v], tensors[k]

    wrong = altered(model.adapter(tmp_path / "wrong", 1), swap)
    assert "model.layers.0.self_attn" in Served(model, wrong, 2).wrong(right)


def test_the_spot_check_refuses_what_is_no_adapter_of_the_run(model: Model, tmp_path: Path) -> None:
    """An exception of another type than CheckpointDamaged would end the publisher at every try."""
    check = SpotCheck(str(model.directory), "float32")
    adapter = model.adapter(tmp_path, 1)
    whole = (adapter / WEIGHTS_FILE).read_bytes()
    for content in [
        b"nothing",
        whole[:100],
        whole[:8] + b"[" + whole[9:],
        (2).to_bytes(8, "little") + b"{}",
    ]:
        (adapter / WEIGHTS_FILE).write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=WEIGHTS_FILE):
            check.adapter_rows(adapter, LORA)
    (adapter / WEIGHTS_FILE).write_bytes(whole)
    with pytest.raises(CheckpointDamaged, match="not an adapter of rank 8"):
        check.adapter_rows(adapter, LORA.model_copy(update={"rank": 8}))


def test_a_tied_models_files_may_have_an_output_layer_which_vllm_does_not_load(
    tmp_path: Path,
) -> None:
    directory = write_random_model(tmp_path / "tied", family="qwen2", tie_word_embeddings=True)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    workers = Workers(Model(directory), whole=True)
    expected = SpotCheck(str(directory), "float32").model_rows(directory)
    assert expected.wrong(workers.weights[0].rows(expected.rows)) == ""


def test_the_spot_check_finds_a_missing_part(model: Model, tmp_path: Path) -> None:
    served = Served(model, model.adapter(tmp_path, 1), 2)
    name = "model.layers.0.self_attn.o_proj.weight"

    def at(found: list[Any]) -> list[int]:
        return [i for i, part in enumerate(found) if part["name"] == name]

    assert f"of {name}" in served.wrong(change=lambda found: found.pop(at(found)[1]))
    # Both workers answer with the left half of the row.
    assert f"of {name}" in served.wrong(
        change=lambda found: found.__setitem__(at(found)[1], found[at(found)[0]])
    )
    assert f"of {name}" in served.wrong(
        change=lambda found: [found.pop(i) for i in reversed(at(found))]
    )


def test_a_copy_in_host_memory_is_one_block_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would round up the pinned memory of each single tensor to a power of
    two."""
    sizes: list[int] = []

    def pinned(size: int) -> torch.Tensor:
        sizes.append(size)
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(model_weights, "pinned_memory", pinned)
    tensors = {
        "matrix": torch.randn(300, 70, dtype=torch.bfloat16),
        "bias": torch.randn(3),
        "experts": torch.randn(4, 50, 9, dtype=torch.bfloat16),
    }
    copies = model_weights.pinned_copies(tensors)
    assert list(copies) == list(tensors)
    for name, copy in copies.items():
        assert (copy.dtype, copy.is_contiguous(), copy.data_ptr() % 4) == (
            tensors[name].dtype,
            True,
            0,
        )
        assert torch.equal(copy, tensors[name])
    needed = sum(tensor.nbytes for tensor in tensors.values())
    assert needed <= sizes[0] < needed + 512 * len(tensors)
    assert len(sizes) == 1
