"""Gemma 3's text models. Most layers have a sliding window. RoPE in the layers with a window
differs from RoPE in the layers without a window. Each block has a norm before and after it, and
norms multiply by 1 + weight. The activation is GELU, and embeddings are scaled."""

from dataclasses import replace
from typing import Any

from tandem.families.arch import Arch, Window
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule


class Gemma3(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        arch = super().arch(config)
        return replace(
            arch,
            activation="gelu_tanh",
            attention_scale=config.positive("query_pre_attn_scalar", float, 256) ** -0.5,
            embedding_scale=arch.hidden_size**0.5,
            offset_norms=True,
            post_norms=True,
        )

    def window(self, config: ModelConfig) -> Window | None:
        """The window. Without `layer_types`, every sixth layer has no window."""
        layers, kinds = config.positive("num_hidden_layers", int), config.get("layer_types")
        if kinds is None:
            every = config.positive("sliding_window_pattern", int, 6)
            kinds = [
                "sliding_attention" if (index + 1) % every else "full_attention"
                for index in range(layers)
            ]
        if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
            raise config.invalid(f"layer_types is {kinds!r} for {layers} layers")
        rope = self._rope(config, "sliding_attention", "rope_local_base_freq", 1e4)
        if rope.get("rope_type", "default") != "default":
            raise config.unsupported("a scaled RoPE in the layers with a sliding window")
        chosen = tuple(kind == "sliding_attention" for kind in kinds)
        tokens = config.positive("sliding_window", int)
        return Window(tokens, chosen, float(rope["rope_theta"])) if any(chosen) else None

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters of the layers without a window."""
        return self._rope(config, "full_attention", "rope_theta", 1e6) | (
            config.get("rope_scaling") or {}
        )

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        return with_post_norms(
            super().layer_rules(arch, layer, parameter, source), parameter, source
        )

    def _rope(self, config: ModelConfig, kind: str, key: str, theta: float) -> dict[str, Any]:
        """RoPE's parameters in one kind of layers; `kind` is "full_attention" or
        "sliding_attention". Version 5 of transformers writes `rope_parameters` for each kind of
        layer; older versions write theta under `key`."""
        given = config.get("rope_parameters") or {}
        if given.keys() - {"full_attention", "sliding_attention"}:
            raise config.invalid(
                f"rope_parameters has {', '.join(sorted(given))}, not entries by kind of layer"
            )
        return {"rope_theta": config.get(key, theta)} | (given.get(kind) or {})

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        for key in (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "use_bidirectional_attention",
        ):
            if config.get(key):
                raise config.unsupported(f"{key}={config.get(key)!r}")
        if config.get("sliding_window") is None:
            raise config.unsupported("layers with a sliding window of no size")


def with_post_norms(rules: list[WeightRule], parameter: str, source: str) -> list[WeightRule]:
    """A layer's rules, extended by Gemma's norms. In Gemma's checkpoints, the norm
    `post_attention_layernorm` comes after the attention, not before the MLP.

    Args:
        rules: the layer's rules without Gemma's norms. One of `rules` is the rule of
            `pre_mlp_layernorm`.
        parameter, source: the prefixes of names, as in `Decoder.layer_rules`.
    """
    norms = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    [replaced] = (one for one in rules if one.parameter == parameter + "pre_mlp_layernorm.weight")
    [shape] = replaced.sources.values()
    return [rule for rule in rules if rule is not replaced] + [
        WeightRule(f"{parameter}{norm}.weight", {f"{source}{name}.weight": shape})
        for norm, name in norms.items()
    ]


FAMILY = Gemma3(
    "gemma3_text",
    {
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    qk_norm=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
)
