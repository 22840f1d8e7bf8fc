"""Gemma 4's text models. Most layers have a sliding window. The layers without a window have larger
heads, values that are computed from keys, and RoPE on a part of each head. Norms are applied before
and after each block, and to values. A scalar multiplies each layer's output, and logits are capped.
A layer of a mixture has both an MLP and experts."""

from dataclasses import replace
from typing import Any

from tandem.families.arch import Arch, GlobalHeads, MoE, ProportionalRope, Window
from tandem.families.decoder import Decoder
from tandem.families.gemma3 import with_post_norms
from tandem.families.model_config import ModelConfig
from tandem.families.vision import TextOfVision
from tandem.families.weight_rules import WeightRule

_KINDS = ("sliding_attention", "full_attention")
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


class Gemma4(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        arch = super().arch(config)
        config = replace(config, defaults=self.defaults)
        rope = self.rope_parameters(config)
        cap = config.get("final_logit_softcapping")
        return replace(
            arch,
            activation="gelu_tanh",
            attention_scale=1.0,
            embedding_scale=arch.hidden_size**0.5,
            post_norms=True,
            value_norm=True,
            layer_scalars=True,
            softcap=None if cap is None else config.positive("final_logit_softcapping", float),
            global_heads=self._global_heads(config, arch),
            rope_scaling=ProportionalRope(
                float(rope.get("partial_rotary_factor", 1.0)), float(rope.get("factor", 1.0))
            ),
        )

    def window(self, config: ModelConfig) -> Window | None:
        """The window. Without `layer_types`, every sixth layer has no window. The last layer never
        has a window."""
        layers, kinds = config.positive("num_hidden_layers", int), config.get("layer_types")
        if kinds is None:
            kinds = [_KINDS[(index + 1) % 6 == 0] for index in range(layers)]
        if len(kinds) != layers or set(kinds) - set(_KINDS):
            raise config.invalid(f"layer_types is {kinds!r} for {layers} layers")
        rope = _rope(config, _KINDS[0])
        if rope.get("rope_type", "default") != "default":
            raise config.unsupported("a scaled RoPE in the layers with a sliding window")
        chosen = (*(kind == _KINDS[0] for kind in kinds[:-1]), False)
        tokens = config.positive("sliding_window", int)
        return Window(tokens, chosen, float(rope["rope_theta"])) if any(chosen) else None

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters of the layers without a window. `rope_type` is replaced by "default",
        because `Decoder` does not know the type "proportional"."""
        return _rope(config, _KINDS[1]) | {"rope_type": "default"}

    def moe(self, config: ModelConfig) -> MoE | None:
        if not config.get("enable_moe_block", False):
            return None
        moe = MoE(
            num_experts=config.positive("num_experts", int),
            experts_per_token=config.positive("top_k_experts", int),
            ffn_hidden_size=config.positive("moe_intermediate_size", int),
            norm_topk_prob=True,
            shared_size=config.positive("intermediate_size", int),
            fused_adapters=True,
            beside_mlp=True,
        )
        if not 1 < moe.experts_per_token <= moe.num_experts:
            raise config.invalid(
                f"{moe.experts_per_token} experts per token of {moe.num_experts}; 2 is the least"
            )
        return moe

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        rules = super().layer_rules(arch, layer, parameter, source)
        rules = with_post_norms(rules, parameter, source)
        return [*rules, WeightRule(parameter + "scalar", {source + "layer_scalar": (1,)})]

    def mlp_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        if (moe := arch.moe) is None:
            return super().mlp_rules(arch, layer, parameter, source)
        layer_source, hidden = source.removesuffix("mlp."), (arch.hidden_size,)
        _router, *experts = super().mlp_rules(arch, layer, parameter, layer_source)
        dense = super().mlp_rules(
            replace(arch, moe=None), layer, parameter + "shared_experts.", source
        )
        vectors = {
            "router.scale": ("router.scale", hidden),
            "router.expert_scale": ("router.per_expert_scale", (moe.num_experts,)),
            "input_norm.weight": ("pre_feedforward_layernorm_2.weight", hidden),
            "mlp_norm.weight": ("post_feedforward_layernorm_1.weight", hidden),
            "experts_norm.weight": ("post_feedforward_layernorm_2.weight", hidden),
        }
        router = {layer_source + "router.proj.weight": (moe.num_experts, arch.hidden_size)}
        return [
            WeightRule(parameter + "router.weight", router),
            *experts,
            *dense,
            *(
                WeightRule(parameter + name, {layer_source + own: shape})
                for name, (own, shape) in vectors.items()
            ),
        ]

    def _global_heads(self, config: ModelConfig, arch: Arch) -> GlobalHeads:
        """The heads of layers without a window. Version 5 of transformers writes the heads' sizes
        to `per_layer_config`; published configs have the sizes under other keys."""
        keys_are_values = bool(config.get("attention_k_eq_v", False))
        own = {"head_dim": config.get("global_head_dim", 512)}
        if keys_are_values and config.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = config.get("num_global_key_value_heads")
        if (layers := config.get("per_layer_config")) is not None:
            windowed = arch.window.layers if arch.window else (False,) * arch.num_layers
            kinds = [layers.get(str(i), layers.get(i)) or {} for i in range(arch.num_layers)]
            own = kinds[-1]
            expected = [{} if each else own for each in windowed]
            if kinds != expected or own.keys() - {"head_dim", "num_key_value_heads"}:
                raise config.unsupported(f"per_layer_config={layers!r}")
        heads = GlobalHeads(
            int(own.get("head_dim", arch.head_dim)),
            int(own.get("num_key_value_heads", arch.num_kv_heads)),
            keys_are_values,
        )
        if arch.num_heads % heads.num_kv_heads:
            raise config.invalid(
                f"{arch.num_heads} attention heads don't divide into {heads.num_kv_heads} groups"
            )
        return heads

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        config.refuse(
            {
                "embeddings of each layer (hidden_size_per_layer_input, Gemma 4 E2B and E4B)": (
                    config.get("hidden_size_per_layer_input", 256)
                ),
                "layers that share keys and values (num_kv_shared_layers)": (
                    config.get("num_kv_shared_layers", 0)
                ),
                "attention in both directions": (
                    config.get("use_bidirectional_attention") == "all"
                ),
                # transformers reads `enable_moe_block`, and vLLM reads `num_experts`.
                "num_experts without enable_moe_block": (
                    config.get("num_experts") is not None
                    and not config.get("enable_moe_block", False)
                ),
                "capped attention": config.get("attn_logit_softcapping"),
            }
        )
        given = config.get("rope_parameters") or _ROPE
        if given.keys() != set(_KINDS):
            raise config.invalid(
                f"rope_parameters has {', '.join(sorted(given))}, not {' and '.join(_KINDS)}"
            )
        if (kind := given[_KINDS[1]].get("rope_type", "default")) != "proportional":
            raise config.unsupported(f"RoPE {kind!r} in layers without a window")


def _rope(config: ModelConfig, kind: str) -> dict[str, Any]:
    """RoPE's parameters in one kind of layers; `kind` is one of `_KINDS`."""
    found: dict[str, Any] = (config.get("rope_parameters") or _ROPE)[kind]
    return found


TEXT = Gemma4(
    "gemma4_text",
    {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    qk_norm=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    partial_rope=True,
)
FAMILY = TextOfVision("gemma4", texts={TEXT.model_type: TEXT}, tied=True)
