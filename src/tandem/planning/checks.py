"""Checks the sizes of the parallel dimensions (`Sizes`) against a model. The module says whether
the trainer can cut a model into given sizes, and which sizes are nearest. The module imports no
torch."""

import math
from dataclasses import asdict

from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.topology.sizes import Sizes, all_sizes


def check_sizes(arch: Arch, sizes: Sizes) -> None:
    """Raise InvalidInput if the trainer can't cut the model into these sizes. The error contains
    the reason and the nearest sizes that work."""
    if found := refusal(arch, sizes):
        field, reason = found
        # Pure data parallelism always works.
        works = [other for other in all_sizes(sizes.world) if refusal(arch, other) is None]
        nearest = min(works, key=lambda other: _distance(sizes, other)).settings()
        raise InvalidInput(
            f"{reason}. The nearest that works on {sizes.world} ranks: {nearest}", field=field
        )


def refusal(arch: Arch, sizes: Sizes) -> tuple[str, str] | None:
    """A tuple: the setting to change, and the reason why the trainer can't cut the model into these
    sizes. Returns None if the trainer can cut the model into these sizes."""
    ranks, moe = f"{sizes.tensor} tensor-parallel ranks", arch.moe
    for parts, size in (
        ("key/value heads", arch.num_kv_heads),
        (
            "key/value heads of layers without a window",
            arch.global_heads.num_kv_heads if arch.global_heads else 0,
        ),
        ("MLP features", arch.ffn_hidden_size if moe is None or moe.dense_layers else 0),
        ("features of the shared expert", moe.shared_size if moe else 0),
        ("key heads of the delta nets", arch.gdn.key_heads if arch.gdn else 0),
        ("vocabulary entries", arch.vocab_size),
    ):
        if size % sizes.tensor:
            return "tensor_parallel", f"{size} {parts} don't divide over {ranks}"
    if sizes.pipeline > arch.num_layers:
        return (
            "pipeline_parallel",
            f"{arch.num_layers} layers don't divide over {sizes.pipeline} pipeline stages",
        )
    if sizes.context > 1 and arch.gdn is not None:
        return (
            "context_parallel",
            f"{arch.model_type} has gated delta nets, whose states don't travel between"
            f" {sizes.context} context-parallel ranks",
        )
    if sizes.context > 1 and arch.mla is not None:
        return (
            "context_parallel",
            f"{arch.model_type} has latent attention, whose keys and values differ in width, and"
            f" {sizes.context} context-parallel ranks exchange equal ones",
        )
    if sizes.sequence and sizes.tensor == 1:
        return (
            "sequence_parallel",
            "sequence parallelism divides tokens over tensor-parallel ranks, and there is 1",
        )
    if moe is None:
        dense = f"{arch.model_type} has no experts that {sizes.expert_ranks} ranks could divide"
        return ("expert_parallel", dense) if sizes.expert_ranks > 1 else None
    if sizes.stage % sizes.expert_ranks:
        return (
            "expert_parallel",
            f"{sizes.stage} ranks don't divide into groups of {sizes.expert_ranks} for the experts",
        )
    if moe.num_experts % sizes.expert:
        return (
            "expert_parallel",
            f"{moe.num_experts} experts don't divide over {sizes.expert} expert-parallel ranks",
        )
    if moe.ffn_hidden_size % sizes.expert_tensor:
        reason = (
            f"{moe.ffn_hidden_size} features of an expert don't divide over {sizes.expert_tensor}"
            " ranks"
        )
        return "expert_tensor_parallel", reason
    if sizes.tensor > 1 and not sizes.sequence:
        return (
            "sequence_parallel",
            f"a mixture of experts on {ranks} needs TANDEM_SEQUENCE_PARALLEL=1",
        )
    return None


def _distance(one: Sizes, other: Sizes) -> float:
    """The distance between two `Sizes`, counted in halvings and doublings. A change of the number
    of model copies counts less than other changes. A change of sequence parallelism counts the
    least."""
    ratios = {
        name: abs(math.log2(size / getattr(other, name)))
        for name, size in asdict(one).items()
        if name != "sequence"
    }
    return sum(ratios.values()) - 0.5 * ratios["data"] + 0.1 * (one.sequence != other.sequence)
