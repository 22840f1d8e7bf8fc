"""Text models of Qwen3.5, 3.6 and 3.8. Of every four layers, three have a gated delta net.
The fourth layer has attention with an output gate, and RoPE on a quarter of each head. Mixtures
have a shared expert with a gate in every layer.

Checkpoints with a vision tower have the text model's config in `text_config` and its tensors under
`model.language_model.`. The vision tower and the layers that predict further tokens (MTP) are not
read.
"""

from dataclasses import dataclass, replace
from typing import Any

from tandem.families.arch import Arch, GatedDeltaNet, MoE, Window
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.vision import text_of
from tandem.families.weight_rules import WeightRule

_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Qwen35(Decoder):
    vision: bool = False  # whether the checkpoint has a vision tower beside the text model

    def arch(self, config: ModelConfig) -> Arch:
        config = self._text(config)
        arch = super().arch(config)
        config = replace(config, defaults=self.defaults)
        factor = self.rope_parameters(config)["partial_rotary_factor"]
        return replace(
            arch,
            gdn=self._gdn(config, arch.num_layers),
            offset_norms=True,
            output_gate=True,
            rotary_size=int(arch.head_dim * factor),
            weight_prefix="model.language_model." if self.vision else "model.",
        )

    def window(self, _config: ModelConfig) -> Window | None:
        return None

    def moe(self, config: ModelConfig) -> MoE | None:
        """The mixture. The router always normalises its probabilities."""
        moe = super().moe(config)
        if moe is None:
            return None
        if moe.experts_per_token == 1:
            raise config.unsupported("one normalised expert per token")
        return replace(
            moe,
            norm_topk_prob=True,
            shared_size=config.positive("shared_expert_intermediate_size", int, 512),
            shared_name="shared_expert",
            shared_gate=True,
            fused_adapters=self.vision,
        )

    def mlp_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        rules, moe = super().mlp_rules(arch, layer, parameter, source), arch.moe
        if moe is None:
            return rules
        shared = replace(arch, ffn_hidden_size=moe.shared_size, moe=None)
        gate = {source + "shared_expert_gate.weight": (1, arch.hidden_size)}
        parameter += "shared_experts."
        return [
            *rules,
            *super().mlp_rules(shared, layer, parameter, source + "shared_expert."),
            WeightRule(parameter + "gate_weight", gate),
        ]

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters. MRoPE has a position for each of its sections. A text token has the
        same position in all sections, so MRoPE equals RoPE."""
        factor = config.given("partial_rotary_factor", 0.25)
        return {"partial_rotary_factor": factor} | super().rope_parameters(config)

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        rules = super().layer_rules(arch, layer, parameter, source)
        assert arch.gdn is not None
        if not arch.gdn.layers[layer]:
            return rules
        attention = parameter + "self_attention."
        others = [rule for rule in rules if not rule.parameter.startswith(attention)]
        return others + self._gdn_rules(
            arch, arch.gdn, parameter + "linear_attention.", source + "linear_attn."
        )

    def _gdn_rules(
        self, arch: Arch, gdn: GatedDeltaNet, parameter: str, source: str
    ) -> list[WeightRule]:
        """The rules of a delta net. `in_proj` stacks the rows of all four projections. `A_log` and
        `dt_bias` have one value per value head. Each rank has all values of `A_log` and `dt_bias`,
        because these tensors are small."""
        hidden, features = arch.hidden_size, sum(gdn.sections)
        qkv, conv = source + "in_proj_qkv.weight", source + "conv1d.weight"
        rows = {
            qkv: (features, hidden),
            source + "in_proj_z.weight": (gdn.value_size, hidden),
            source + "in_proj_b.weight": (gdn.value_heads, hidden),
            source + "in_proj_a.weight": (gdn.value_heads, hidden),
        }
        vectors = [
            WeightRule(parameter + name, {source + name: (gdn.value_heads,)}, fp32=True)
            for name in ("A_log", "dt_bias")
        ]
        return [
            WeightRule(parameter + "in_proj.weight", rows, "rows", sections={qkv: gdn.sections}),
            WeightRule(
                parameter + "conv1d.weight",
                {conv: (features, 1, gdn.conv_tokens)},
                "rows",
                sections={conv: gdn.sections},
            ),
            *vectors,
            WeightRule(parameter + "norm.weight", {source + "norm.weight": (gdn.value_head_dim,)}),
            WeightRule(
                parameter + "out_proj.weight",
                {source + "out_proj.weight": (hidden, gdn.value_size)},
                "columns",
            ),
        ]

    def _gdn(self, config: ModelConfig, layers: int) -> GatedDeltaNet:
        kinds = config.get("layer_types")
        if kinds is None:
            every = config.positive("full_attention_interval", int, 4)
            kinds = [_KINDS[(index + 1) % every == 0] for index in range(layers)]
        if len(kinds) != layers or set(kinds) - set(_KINDS):
            raise config.invalid(f"layer_types is {kinds!r} for {layers} layers")
        gdn = GatedDeltaNet(
            layers=tuple(kind == "linear_attention" for kind in kinds),
            key_heads=config.positive("linear_num_key_heads", int, 16),
            value_heads=config.positive("linear_num_value_heads", int, 32),
            key_head_dim=config.positive("linear_key_head_dim", int, 128),
            value_head_dim=config.positive("linear_value_head_dim", int, 128),
            conv_tokens=config.positive("linear_conv_kernel_dim", int, 4),
        )
        if gdn.value_heads % gdn.key_heads:
            raise config.invalid(
                f"{gdn.value_heads} value heads don't divide into {gdn.key_heads} groups"
            )
        return gdn

    def _text(self, config: ModelConfig) -> ModelConfig:
        """The config of the text model."""
        if not self.vision:
            return config
        return text_of(config, tied=False)

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        config.refuse(
            {
                "attention without an output gate": not config.given("attn_output_gate", True),
                "another gate of the delta net than SiLU": (
                    config.given("output_gate_type", "silu") not in ("silu", "swish")
                ),
                # transformers ignores the option `norm_topk_prob`, and vLLM does not.
                "a router's probabilities as they are": (
                    self.mixture and not config.given("norm_topk_prob", True)
                ),
            }
        )


_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4}
FAMILY = Qwen35("qwen3_5", _DEFAULTS, qk_norm=True, partial_rope=True, vision=True)
TEXT = Qwen35("qwen3_5_text", _DEFAULTS, qk_norm=True, partial_rope=True)
_MIXTURE: dict[str, Any] = {
    # `intermediate_size` has no meaning: no layer has an MLP of this size.
    "defaults": {"head_dim": 256, "num_key_value_heads": 2, "intermediate_size": 1},
    "qk_norm": True,
    "partial_rope": True,
    "shared_experts": True,
    "mixture": True,
}
MIXTURE = Qwen35("qwen3_5_moe", **_MIXTURE, vision=True)
MIXTURE_TEXT = Qwen35("qwen3_5_moe_text", **_MIXTURE)
