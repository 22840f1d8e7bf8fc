"""OLMo 3. Attention and MLP have a norm after them and no norm before them. One norm is over the
queries of all heads, and another norm is over the keys of all heads. Of every four layers, three
have a sliding window and one has YaRN."""

from dataclasses import replace
from typing import Any

from tandem.families.arch import Arch, Window
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule

_THETA = 500000.0
_KINDS = ("sliding_attention", "full_attention")


class Olmo3(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        return replace(super().arch(config), post_norms=True, pre_norms=False, wide_qk_norm=True)

    def window(self, config: ModelConfig) -> Window | None:
        """The window. Without `layer_types`, every fourth layer has no window."""
        layers, kinds = config.positive("num_hidden_layers", int), config.get("layer_types")
        if kinds is None:
            kinds = [_KINDS[(index + 1) % 4 == 0] for index in range(layers)]
        if len(kinds) != layers or set(kinds) - set(_KINDS):
            raise config.invalid(f"layer_types is {kinds!r} for {layers} layers")
        rope = {"rope_theta": _THETA} | self._rope(config, _KINDS[0])
        if rope.get("rope_type", "default") != "default":
            raise config.unsupported("a scaled RoPE in the layers with a sliding window")
        chosen = tuple(kind == "sliding_attention" for kind in kinds)
        tokens = config.positive("sliding_window", int)
        return Window(tokens, chosen, float(rope["rope_theta"])) if any(chosen) else None

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters of the layers without a window. Published configs have `rope_scaling`,
        which applies only to the layers without a window."""
        scaling = config.get("rope_scaling") or {}
        return {"rope_theta": _THETA} | self._rope(config, _KINDS[1]) | scaling

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        attention, size = parameter + "self_attention.", (arch.hidden_size,)
        replaced = {
            parameter + "input_layernorm.weight",
            parameter + "pre_mlp_layernorm.weight",
            *(f"{attention}{letter}_layernorm.weight" for letter in "qk"),
        }
        rules = super().layer_rules(arch, layer, parameter, source)
        norms = {
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        }
        widths = {"q": arch.query_size, "k": arch.kv_size}
        return [
            *(rule for rule in rules if rule.parameter not in replaced),
            *(
                WeightRule(f"{parameter}{norm}.weight", {f"{source}{name}.weight": size})
                for norm, name in norms.items()
            ),
            *(
                WeightRule(
                    f"{attention}{letter}_layernorm.weight",
                    {f"{source}self_attn.{letter}_norm.weight": (width,)},
                    "rows",
                )
                for letter, width in widths.items()
            ),
        ]

    def _rope(self, config: ModelConfig, kind: str) -> dict[str, Any]:
        """RoPE's parameters in one kind of layers; `kind` is one of `_KINDS`. Version 5 of
        transformers writes `rope_parameters` for each kind of layer."""
        given = config.get("rope_parameters") or {}
        if given.keys() - set(_KINDS):
            raise config.invalid(
                f"rope_parameters has {', '.join(sorted(given))}, not entries by kind of layer"
            )
        found: dict[str, Any] = given.get(kind) or {}
        return found

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        config.refuse(
            {
                "layers with a sliding window of no size": config.get("sliding_window") is None,
                # In transformers, a rope_theta at the top level applies only to layers without a
                # window.
                "a rope_theta outside of rope_parameters": (
                    config.get("rope_theta", _THETA) != _THETA
                ),
            }
        )


FAMILY = Olmo3(
    "olmo3",
    {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    qk_norm=True,
    yarn=True,
)
