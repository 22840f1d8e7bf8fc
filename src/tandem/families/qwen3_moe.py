"""Qwen3 MoE: Qwen3's attention; every layer's MLP is a mixture of experts."""

from tandem.families.arch import Arch, MoE
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule


class Qwen3Moe(Decoder):
    def moe(self, config: ModelConfig) -> MoE:
        # transformers 5 writes num_local_experts.
        total = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        moe = MoE(
            num_experts=config.positive(total, int),
            experts_per_token=config.positive("num_experts_per_tok", int),
            ffn_hidden_size=config.positive("moe_intermediate_size", int),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
        if moe.experts_per_token > moe.num_experts:
            raise config.invalid(f"{moe.experts_per_token} experts per token, but there are {moe.num_experts}")
        return moe

    def mlp_rules(self, arch: Arch, _layer: int, to: str, of: str) -> list[WeightRule]:
        return mixture_rules(arch, to, of)


def mixture_rules(arch: Arch, to: str, of: str) -> list[WeightRule]:
    """The router, and all experts stacked: `fc1` is gate above up of each expert."""
    assert arch.moe is not None
    experts, hidden, ffn = arch.moe.num_experts, arch.hidden_size, arch.moe.ffn_hidden_size
    each = [f"{of}experts.{expert}." for expert in range(experts)]
    gates_and_ups = {f"{expert}{name}_proj.weight": (ffn, hidden) for expert in each for name in ("gate", "up")}
    downs = {f"{expert}down_proj.weight": (hidden, ffn) for expert in each}
    return [
        WeightRule(to + "router.weight", {of + "gate.weight": (experts, hidden)}),
        WeightRule(to + "experts.fc1.weight", gates_and_ups, "rows", experts=experts),
        WeightRule(to + "experts.fc2.weight", downs, "columns", experts=experts),
    ]


FAMILY = Qwen3Moe(
    "qwen3_moe",
    {"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False},
    qk_norm=True,
)
