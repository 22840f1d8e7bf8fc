"""The standard decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU. All families build on the
standard decoder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.families.arch import Arch, LinearScaling, MoE, RopeScaling, Window, YarnScaling
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule


@dataclass(frozen=True)
class Decoder:
    """A family of models. The fields of `Decoder` are the family's differences from the standard
    decoder. If no field can express a difference, the family's subclass overrides methods of
    `Decoder`."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for keys that config.json leaves out: the defaults of the family's class in
    transformers. vLLM uses the same defaults. A family whose defaults have `sliding_window` has
    windows: in the layers from `max_window_layers` on if that key exists, else in all layers. If
    the key `use_sliding_window` exists, it must be true."""
    qk_norm: bool = False  # Each query head and key head has an RMSNorm before RoPE.
    # The key of the config that names the activation, and the key's only supported value.
    activation: tuple[str, str] = ("hidden_act", "silu")
    qkv_bias: bool = False  # only q_proj, k_proj and v_proj have biases
    partial_rope: bool = False  # RoPE on a part of each head is supported
    shared_experts: bool = False  # shared experts are supported
    yarn: bool = False  # YaRN's scaling of RoPE is supported
    mixture: bool = False  # every layer's MLP is a mixture of experts like Qwen3's

    def arch(self, config: ModelConfig) -> Arch:
        """The model's shape. Raises InvalidInput for a wrong value, and UnknownArchitecture for a
        variant that Tandem doesn't build."""
        config = replace(config, defaults=self.defaults)
        self._refuse_variants(config)
        hidden, heads = (
            config.positive("hidden_size", int),
            config.positive("num_attention_heads", int),
        )
        kv_heads = (
            heads
            if config.get("num_key_value_heads") is None
            else config.positive("num_key_value_heads", int)
        )
        if heads % kv_heads:
            raise config.invalid(f"{heads} attention heads don't divide into {kv_heads} groups")
        rope = self.rope_parameters(config)
        return Arch(
            model_type=self.model_type,
            num_layers=config.positive("num_hidden_layers", int),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.positive("head_dim", int, hidden // heads),
            ffn_hidden_size=config.positive("intermediate_size", int),
            vocab_size=config.positive("vocab_size", int),
            max_positions=config.positive("max_position_embeddings", int, 32768),
            tie_embeddings=bool(config.get("tie_word_embeddings")),
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=config.positive("rms_norm_eps", float, 1e-6),
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            rope_scaling=_rope_scaling(rope, config, yarn=self.yarn),
            window=self.window(config),
            moe=self.moe(config),
        )

    def window(self, config: ModelConfig) -> Window | None:
        """The sliding window and its layers; None if no layer has a window."""
        layers, kinds = config.positive("num_hidden_layers", int), config.get("layer_types")
        in_use = config.get("use_sliding_window") or "use_sliding_window" not in self.defaults
        if config.get("sliding_window") is None or not in_use:
            if set(kinds or ()) - {"full_attention"}:
                raise config.unsupported(
                    "layers of other kinds than full_attention, without a sliding window in use"
                )
            return None
        if "sliding_window" not in self.defaults:
            raise config.unsupported("sliding-window attention")
        if "max_window_layers" not in self.defaults:
            chosen = [True] * layers
        elif kinds is None:
            chosen = [index >= config.get("max_window_layers") for index in range(layers)]
        else:
            chosen = [kind == "sliding_attention" for kind in kinds]
        if kinds is not None and kinds != [
            "sliding_attention" if windowed else "full_attention" for windowed in chosen
        ]:
            raise config.unsupported(f"layer_types {kinds!r}")
        if len(chosen) != layers:
            raise config.invalid(f"layer_types has {len(chosen)} entries for {layers} layers")
        tokens = config.positive("sliding_window", int)
        return Window(tokens, tuple(chosen)) if any(chosen) else None

    def moe(self, config: ModelConfig) -> MoE | None:
        """The mixture of experts; None if all layers have MLPs and no experts."""
        if not self.mixture:
            return None
        # transformers 5 writes the number of experts as num_local_experts.
        total = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        moe = MoE(
            num_experts=config.positive(total, int),
            experts_per_token=config.positive("num_experts_per_tok", int),
            ffn_hidden_size=config.positive("moe_intermediate_size", int),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        )
        if moe.experts_per_token > moe.num_experts:
            raise config.invalid(
                f"{moe.experts_per_token} experts per token, but there are {moe.num_experts}"
            )
        return moe

    def weight_rules(self, arch: Arch) -> list[WeightRule]:
        """A rule for every parameter of the model, embedding first."""
        embedding, prefix = (arch.vocab_size, arch.hidden_size), arch.weight_prefix
        rules = [
            WeightRule(
                "embedding.word_embeddings.weight",
                {f"{prefix}embed_tokens.weight": embedding},
                "rows",
            ),
            WeightRule(
                "decoder.final_layernorm.weight", {f"{prefix}norm.weight": (arch.hidden_size,)}
            ),
        ]
        if not arch.tie_embeddings:
            head = "language_model." if prefix.startswith("language_model.") else ""
            rules.append(
                WeightRule("output_layer.weight", {f"{head}lm_head.weight": embedding}, "rows")
            )
        for layer in range(arch.num_layers):
            rules += self.layer_rules(
                arch.of_layer(layer),
                layer,
                f"decoder.layers.{layer}.",
                f"{prefix}layers.{layer}.",
            )
        return rules

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        """The rules of one layer. Megatron's `linear_qkv` has one block of rows for each key head.
        A block has the rows of its query heads, then of the key head, then of the value head.

        Args:
            arch: the shape of this layer, from `Arch.of_layer`.
            layer: the layer's number, from 0.
            parameter: the prefix of Megatron's names, `decoder.layers.<layer>.`.
            source: the prefix of Hugging Face's names, such as `model.layers.<layer>.`.
        """
        hidden, groups, attention = arch.hidden_size, arch.num_kv_heads, source + "self_attn."
        qkv = attention_features(arch)
        qkv_weights = {f"{attention}{name}.weight": (rows, hidden) for name, rows in qkv.items()}
        o_proj = {attention + "o_proj.weight": (hidden, arch.query_size)}
        rules = [
            WeightRule(
                parameter + "input_layernorm.weight", {source + "input_layernorm.weight": (hidden,)}
            ),
            WeightRule(
                parameter + "self_attention.linear_qkv.weight", qkv_weights, "rows", groups=groups
            ),
            WeightRule(parameter + "self_attention.linear_proj.weight", o_proj, "columns"),
            WeightRule(
                parameter + "pre_mlp_layernorm.weight",
                {source + "post_attention_layernorm.weight": (hidden,)},
            ),
            *self.mlp_rules(arch, layer, parameter + "mlp.", source + "mlp."),
        ]
        if arch.output_bias:
            rules.append(
                WeightRule(
                    parameter + "self_attention.linear_proj.bias",
                    {attention + "o_proj.bias": (hidden,)},
                )
            )
        if arch.sinks:
            rules.append(
                WeightRule(
                    parameter + "self_attention.sinks",
                    {attention + "sinks": (arch.num_heads,)},
                    "rows",
                )
            )
        if arch.qkv_bias:
            biases = {f"{attention}{name}.bias": (rows,) for name, rows in qkv.items()}
            rules.append(
                WeightRule(
                    parameter + "self_attention.linear_qkv.bias", biases, "rows", groups=groups
                )
            )
        if arch.qk_norm:
            for letter in "qk":
                norm = {f"{attention}{letter}_norm.weight": (arch.head_dim,)}
                rules.append(
                    WeightRule(f"{parameter}self_attention.{letter}_layernorm.weight", norm)
                )
        return rules

    def mlp_rules(self, arch: Arch, _layer: int, parameter: str, source: str) -> list[WeightRule]:
        """The rules of one layer's MLP or, if the layer has experts, of its router and its stacked
        experts. `linear_fc1` stacks the rows of gate above the rows of up.

        Args:
            arch: the shape of this layer.
            _layer: the layer's number, from 0.
            parameter: the prefix of Megatron's names, such as `decoder.layers.<layer>.mlp.`.
            source: the prefix of Hugging Face's names, such as `model.layers.<layer>.mlp.`.
        """
        hidden, moe = arch.hidden_size, arch.moe
        ffn = arch.ffn_hidden_size if moe is None else moe.ffn_hidden_size
        each = (
            [source]
            if moe is None
            else [f"{source}experts.{expert}." for expert in range(moe.num_experts)]
        )
        gates_and_ups = {
            f"{one}{name}_proj.weight": (ffn, hidden) for one in each for name in ("gate", "up")
        }
        downs = {f"{one}down_proj.weight": (hidden, ffn) for one in each}
        if moe is None:
            return [
                WeightRule(parameter + "linear_fc1.weight", gates_and_ups, "rows"),
                WeightRule(parameter + "linear_fc2.weight", downs, "columns"),
            ]
        return [
            WeightRule(
                parameter + "router.weight", {source + "gate.weight": (moe.num_experts, hidden)}
            ),
            WeightRule(
                parameter + "experts.fc1.weight", gates_and_ups, "rows", num_experts=moe.num_experts
            ),
            WeightRule(
                parameter + "experts.fc2.weight", downs, "columns", num_experts=moe.num_experts
            ),
        ]

    def _refuse_variants(self, config: ModelConfig) -> None:
        """Refuse options that Tandem does not build. If Tandem ignored an option that it does not
        build, the logits would silently be wrong."""
        activation, rope = config.get(*self.activation), self.rope_parameters(config)
        shared = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")
        variants = {
            "biases on attention's projections": not self.qkv_bias and config.get("attention_bias"),
            "biases in the MLP": config.get("mlp_bias"),
            "RoPE on a part of each head": (
                not self.partial_rope
                and (
                    rope.get("partial_rotary_factor", 1) != 1
                    or config.get("partial_rotary_factor", 1) != 1
                )
            ),
            f"the activation {activation!r}": activation != self.activation[1],
            "quantised weights": config.get("quantization_config"),
            "attention in both directions": not config.get("is_causal", True),
            "layers without experts among those with them": (
                config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
            ),
            "shared experts": not self.shared_experts and any(map(config.get, shared)),
            # The normalised probability of a single expert is always 1.
            "one normalised expert per token": (
                config.get("norm_topk_prob") and config.get("num_experts_per_tok") == 1
            ),
        }
        config.refuse(variants)

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters. Version 5 of transformers writes `rope_parameters`; older versions
        write `rope_theta` and `rope_scaling`. If a config has both `rope_scaling` and
        `rope_parameters`, `rope_scaling` is used, as in transformers. Values in `rope_scaling` or
        `rope_parameters` override values at the config's top level."""
        default = self.defaults.get("rope_parameters", {})
        given: dict[str, Any] = (
            config.get("rope_scaling") or config.get("rope_parameters") or default
        )
        return {"rope_theta": config.given("rope_theta", 10000.0)} | given


def attention_features(arch: Arch) -> dict[str, int]:
    """Projection -> number of output features, for q_proj, k_proj and, if the layer has it,
    v_proj."""
    query = arch.query_size * (2 if arch.output_gate else 1)
    features = {"q_proj": query, "k_proj": arch.kv_size}
    return features if arch.keys_are_values else features | {"v_proj": arch.kv_size}


def _rope_scaling(
    rope: dict[str, Any], config: ModelConfig, *, yarn: bool
) -> RopeScaling | LinearScaling | YarnScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    known = ("default", "linear", "llama3", *["yarn"] * yarn)
    if kind not in known:
        raise config.unsupported(f"RoPE scaling {kind!r} (not {' or '.join(map(repr, known))})")
    try:
        factor = float(rope["factor"])
        if kind == "linear":
            return LinearScaling(factor)
        if kind == "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return RopeScaling(factor, low, high, int(rope["original_max_position_embeddings"]))
        given = rope.get("attention_factor")
        own, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
        own, of_all = (float(own), float(of_all)) if own and of_all else (1.0, 0.0)
        log = 0.1 * math.log(max(factor, 1))
        # Equation 22 of the YaRN paper, extended by `mscale_all_dim` (`of_all`).
        factors = (own * log + 1) / (of_all * log + 1)
        return YarnScaling(
            factor=factor,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            original_max_positions=int(rope["original_max_position_embeddings"]),
            attention_factor=factors if given is None else float(given),
            truncate=bool(rope.get("truncate", True)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise config.invalid(
            f"the parameters of RoPE scaling {kind} are incomplete or wrong: {error}"
        ) from error
