"""Policies, rows and adapters for tests of the model."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, write_adapter_config
from tandem.families.registry import read_arch
from tandem.model.build import build_policy
from tandem.model.logprobs import _capped
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.model.weights.base_weights import load_weights
from tandem.spool.schema import LoraShape

LORA = LoraShape(rank=4, alpha=10.0)


def make_policy(
    model: Path, lora: LoraShape = LORA, adapter: Path | None = None, **options
) -> Policy:
    policy = build_policy(read_arch(str(model)), lora, **options)
    load_base(policy, model)
    if adapter is not None:
        policy.load_adapter(adapter)
    return policy


def load_base(policy: Policy, model: Path) -> None:
    load_weights(model, policy.arch, policy.base, policy.topology.sizes, policy.topology.place)


def write_random_adapter(
    directory: Path, model: Path, lora: LoraShape = LORA, seed: int = 0
) -> Path:
    """An adapter with random A and random B, which changes the logits a lot."""
    generator = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in sorted(adapter_shapes(read_arch(str(model)), lora).items())
    }
    save_file(tensors, directory / WEIGHTS_FILE)
    write_adapter_config(directory, lora, str(model))
    return directory


def linear_row(
    tokens: Sequence[int] | torch.Tensor, trained: Sequence[int] | None = None, padding: int = 0
) -> RowTensors:
    """One sequence in a row of its own; `trained`: the slots of the trained tokens, by default all
    but the first."""
    length = len(tokens)
    targets = torch.tensor(range(1, length) if trained is None else trained, dtype=torch.int64)
    slots = torch.arange(length + padding)
    return RowTensors(
        tokens=torch.cat([torch.as_tensor(tokens, dtype=torch.int64), torch.zeros(padding).long()]),
        positions=torch.where(slots < length, slots, 0),
        subtree_end=torch.where(slots < length, length, slots + 1),
        item_source=targets - 1,
        item_token=torch.as_tensor(tokens, dtype=torch.int64)[targets],
    )


def logits(policy: Policy, row: RowTensors) -> torch.Tensor:
    """All logits of a row, fp32 [S, vocabulary], on every tensor-parallel rank."""
    # Megatron is imported after tandem.
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    row = policy.lay_out(row)
    local = (
        policy.gpt.decoder(policy.first_hidden(row), **policy.decoder_inputs(row))[:, 0]
        @ policy.head.t()
    )
    local = _capped(local, policy.arch.softcap)
    return gather_from_tensor_model_parallel_region(local, group=policy.topology.tensor).float()


def all_logits(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    return logits(policy, linear_row(tokens))


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Returns the gradient of every LoRA parameter, and clears the gradients."""
    taken = {}
    for name, parameter in policy.lora_parameters().items():
        assert parameter.grad is not None, name
        taken[name], parameter.grad = parameter.grad, None
    return taken


def assert_close(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    relative: float,
    rounded: dict[str, torch.Tensor] | None = None,
) -> None:
    """Asserts that each tensor of `actual` is close to the tensor of `expected`. The norm of the
    difference may be at most `relative` times the norm of `expected`. `rounded` is an independent
    computation in the precision of `actual`. If `rounded` is given, the limit is at least twice the
    norm of the difference between `rounded` and `expected`."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.norm() > 0, f"{name} is zero: the comparison says nothing"
        allowed = relative
        if rounded is not None:
            allowed = max(relative, 2 * ((rounded[name] - value).norm() / value.norm()).item())
        error = ((actual[name] - value).norm() / value.norm()).item()
        assert error <= allowed, f"{name}: relative difference {error:.2e}, allowed {allowed:.2e}"


def merged(model, adapter: dict[str, torch.Tensor], lora: LoraShape) -> dict[str, torch.Tensor]:
    """The weights of a mixture of experts plus `alpha / rank * B A`, as functions of the adapter's
    tensors."""
    weights = dict(model.named_parameters())
    for key in (key for key in adapter if "lora_A" in key):
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = lora.alpha / lora.rank * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
        if ".experts." not in path:
            weights[path + ".weight"] = weights[path + ".weight"] + delta
            continue
        # transformers stacks the experts: gate_up_proj [experts, gate then up, hidden], down_proj
        # [experts, hidden, in]
        block, expert, projection = path.rsplit(".", 2)
        name = f"{block}.down_proj" if projection == "down_proj" else f"{block}.gate_up_proj"
        first = len(delta) if projection == "up_proj" else 0
        whole_delta = torch.zeros_like(weights[name])
        whole_delta[int(expert), first : first + len(delta)] = delta
        weights[name] = weights[name] + whole_delta
    return weights
