"""The adapter's files, in PEFT's own format, names and shapes.

The files are `adapter_config.json` and `adapter_model.safetensors`. `adapter_model.safetensors` has
two fp32 tensors for each adapted linear layer: `lora_A.weight` [rank, in] and `lora_B.weight` [out,
rank]. An adapted layer computes `W x + alpha / rank * B (A x)`.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

from tandem.errors import InvalidInput
from tandem.families.arch import EXPERT_TARGETS, Arch
from tandem.families.registry import weight_rules
from tandem.spool.schema import (
    DELTA_NET_TARGETS,
    LATENT_TARGETS,
    LORA_TARGETS,
    LoraShape,
    LoraTarget,
)
from tandem.topology.sizes import Sizes

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

UNSERVED: tuple[LoraTarget, ...] = ("kv_b_proj",)
"""Targets whose adapters vLLM ignores. For generated tokens, vLLM multiplies queries and outputs by
the base weight of kv_b_proj, without the adapter."""

_OLD_PREFIX = "language_model.model."
_EXPERT = re.compile(r"(\.experts\.)\d+(\.)")


def default_targets(arch: Arch) -> tuple[str, ...]:
    """The targets of a run that specifies no targets: every linear layer. In a mixture of experts,
    only the linear layers of attention are default targets. In vLLM, adapters on experts need
    `TANDEM_EXPERT_LORA`. `kv_b_proj` is left out (see `UNSERVED`)."""
    return tuple(
        target
        for target in all_targets(arch)
        if target not in UNSERVED
        and (arch.moe is None or target not in EXPERT_TARGETS)
        and not (target == "k_proj" and _values_of_keys(arch))
    )


def _values_of_keys(arch: Arch) -> bool:
    """Whether some layers use their keys as values, and so have no v_proj."""
    return arch.global_heads is not None and arch.global_heads.keys_are_values


def all_targets(arch: Arch) -> tuple[LoraTarget, ...]:
    """The names of the model's linear layers."""
    if arch.mla is not None:
        queries = LORA_TARGETS[:1] if arch.mla.q_rank is None else LATENT_TARGETS[:2]
        return queries + LATENT_TARGETS[2:] + LORA_TARGETS[3:]
    return LORA_TARGETS if arch.gdn is None else LORA_TARGETS + DELTA_NET_TARGETS


def lora_modules(arch: Arch, lora: LoraShape) -> dict[str, tuple[int, int]]:
    """Each adapted linear layer's Hugging Face path -> (in_features, out_features), in layer order.
    Each expert has its own linear layers. Raises InvalidInput as `check_targets` does."""
    check_targets(arch, lora)
    sources = {name: shape for rule in weight_rules(arch) for name, shape in rule.sources.items()}
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in sources.items()
        if in_targets(name, lora.targets)
    }


def adapts_experts(lora: LoraShape) -> bool:
    """Whether linear layers of a mixture's experts have an adapter."""
    return not set(lora.targets).isdisjoint(EXPERT_TARGETS)


def sums_experts_apart(arch: Arch, lora: LoraShape | None, sizes: Sizes) -> bool:
    """Whether the gradients of experts and of other parameters are summed over different process
    groups.

    Args:
        lora: the adapter's shape; None: all weights are trained.
    """
    return arch.moe is not None and sizes.experts_apart and (lora is None or adapts_experts(lora))


def check_targets(arch: Arch, lora: LoraShape) -> None:
    """Raises InvalidInput for targets that the model does not have, and for targets that PEFT or
    vLLM would adapt differently from Tandem."""
    if wrong := [target for target in lora.targets if target not in all_targets(arch)]:
        problem = f"{arch.model_type} has no {', '.join(wrong)}"
        raise InvalidInput(
            f"{problem}; its targets are {', '.join(all_targets(arch))}", field="lora.targets"
        )
    if _values_of_keys(arch):
        problem = f"some layers of {arch.model_type} make values of k_proj's output too"
        if "k_proj" in lora.targets:
            problem += ", and vLLM would adapt the keys only; leave out k_proj"
            raise InvalidInput(problem, field="lora.targets")
        if lora.targets == ("v_proj",):
            raise InvalidInput(f"{problem}; name another target too", field="lora.targets")
    fused = arch.moe is not None and arch.moe.fused_adapters
    if fused and (wrong := [target for target in lora.targets if target in EXPERT_TARGETS]):
        problem = (
            "has one tensor for gate and up of all experts, and PEFT and vLLM adapt it as one layer"
        )
        remedy = (
            f"leave out {', '.join(wrong)}, which would be layers of their own here, and adapt the"
            " attention"
        )
        raise InvalidInput(f"{arch.model_type} {problem}; {remedy}", field="lora.targets")


def in_targets(name: str, targets: Collection[str] | None) -> bool:
    """Whether a tensor is the weight of a linear layer in `targets`; always true if `targets` is
    None."""
    path, _, kind = name.rpartition(".")
    return targets is None or (kind == "weight" and path.rpartition(".")[2] in targets)


def peft_keys(module: str) -> tuple[str, str]:
    """PEFT's names of the matrices A and B of the linear layer at Hugging Face path `module`."""
    # Checkpoints of Mistral 3 have the tensor names that transformers used before version 5. PEFT
    # uses the names of transformers' modules.
    if module.startswith(_OLD_PREFIX):
        module = "model.language_model." + module.removeprefix(_OLD_PREFIX)
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def misread_by_peft(keys: Collection[str]) -> bool:
    """Whether `PeftModel.from_pretrained` (0.21) would misread an adapter with these tensors.

    PEFT has one layer for the gate and up projections of all experts. If a target is also the name
    of an experts' layer, PEFT searches for this target only in experts. PEFT silently drops the
    adapters of dense layers and shared experts if experts have adapters of the same name. If
    experts have adapters on gate and up but not on down, PEFT leaves these adapters at their
    initial values.
    """
    modules = {key.rpartition(".lora_")[0] for key in keys}
    targets = {module.rpartition(".")[2] for module in modules if ".experts." in module}
    elsewhere = any(
        module.endswith(tuple(f".{target}" for target in EXPERT_TARGETS))
        for module in modules
        if ".experts." not in module
    )
    return bool(targets) and (elsewhere or targets not in ({"down_proj"}, set(EXPERT_TARGETS)))


def adapter_shapes(arch: Arch, lora: LoraShape) -> dict[str, tuple[int, int]]:
    """PEFT key -> shape of every tensor of an adapter, in the order of layers, A before B."""
    shapes: dict[str, tuple[int, int]] = {}
    for module, (in_features, out_features) in lora_modules(arch, lora).items():
        a, b = peft_keys(module)
        shapes[a], shapes[b] = (lora.rank, in_features), (out_features, lora.rank)
    return shapes


def layer_of(name: str) -> int:
    """The number of the decoder layer, from 0, that a PEFT key or a Hugging Face path names."""
    return int(name.partition(".layers.")[2].partition(".")[0])


def stacked_name(key: str) -> str:
    """The name of the policy's parameter that holds the tensor with PEFT key `key`. In the key of
    an expert, the expert's number becomes `*`, because one parameter stacks the tensors of all
    experts in order. Keys without an expert's number stay the same.
    """
    return _EXPERT.sub(r"\1*\2", key)


def write_adapter_config(directory: Path, lora: LoraShape, base_model: str) -> None:
    """Write `adapter_config.json` in the form that PEFT and vLLM read.

    Args:
        directory: the adapter's directory, which exists.
        base_model: the base model's directory or hub name, written as `base_model_name_or_path`.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
