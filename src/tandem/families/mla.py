"""The families with multi-head latent attention (MLA; DeepSeek-V2, 2024, arXiv:2405.04434):
GLM-4.7-Flash, DeepSeek-V3 and Kimi K2. In the families with MLA, mixtures of experts work as in
GLM-4.5.

The checkpoints' layers that predict further tokens (MTP) are not read.
"""

import math
from dataclasses import replace
from typing import Any

from tandem.families.arch import Arch, LatentAttention, MoE
from tandem.families.decoder import Decoder
from tandem.families.glm4_moe import Glm4Moe
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule

_MSCALES = ("mscale", "mscale_all_dim")


class LatentMoe(Glm4Moe):
    def arch(self, config: ModelConfig) -> Arch:
        arch = Decoder.arch(self, config)
        config = replace(config, defaults=self.defaults)
        heads, kv_heads = arch.num_heads, config.values.get("num_key_value_heads")
        if kv_heads not in (None, heads):
            raise config.invalid(f"{kv_heads} key/value heads for {heads} latent attention heads")
        q_rank = config.get("q_lora_rank")
        mla = LatentAttention(
            q_rank=None if q_rank is None else config.positive("q_lora_rank", int),
            kv_rank=config.positive("kv_lora_rank", int),
            nope_size=config.positive("qk_nope_head_dim", int),
            rope_size=config.positive("qk_rope_head_dim", int),
            value_size=config.positive("v_head_dim", int),
        )
        size, mscale = mla.nope_size + mla.rope_size, self._mscale(config)
        return replace(
            arch,
            num_kv_heads=heads,
            head_dim=size,
            rotary_size=mla.rope_size,
            mla=mla,
            attention_scale=None if mscale == 1 else size**-0.5 * mscale**2,
        )

    def moe(self, config: ModelConfig) -> MoE:
        moe = super().moe(config)
        layers = config.positive("num_hidden_layers", int)
        kinds = ["dense"] * moe.dense_layers + ["sparse"] * (layers - moe.dense_layers)
        if self.model_type == "glm4_moe_lite":
            read = config.given("mlp_layer_types", ["dense"] + ["sparse"] * (layers - 1))
            if read != kinds:
                # transformers reads `mlp_layer_types`, and vLLM reads `first_k_dense_replace`.
                raise config.unsupported(
                    f"mlp_layer_types {read} beside first_k_dense_replace={moe.dense_layers}"
                )
        return moe

    def rope_parameters(self, config: ModelConfig) -> dict[str, Any]:
        """RoPE's parameters. With YaRN, `Arch.attention_scale` multiplies the products of queries
        and keys by the square of the factor from `mscale_all_dim`. The rotated features need the
        factor from `mscale` instead, so the cosines and sines are multiplied by the quotient of the
        two factors."""
        rope = super().rope_parameters(config)
        one, all_dim = (rope.get(key) for key in _MSCALES)
        if not (one and all_dim):
            return rope
        factor = _magnitude(float(rope["factor"]), one) / _magnitude(float(rope["factor"]), all_dim)
        rest = {key: value for key, value in rope.items() if key not in _MSCALES}
        return {**rest, "attention_factor": factor}

    def layer_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        attention = parameter + "self_attention."
        others = [
            rule
            for rule in super().layer_rules(arch, layer, parameter, source)
            if not rule.parameter.startswith(attention)
        ]
        assert arch.mla is not None
        return others + self._attention_rules(arch, arch.mla, attention, source + "self_attn.")

    def _attention_rules(
        self, arch: Arch, mla: LatentAttention, parameter: str, source: str
    ) -> list[WeightRule]:
        """The rules of the attention. `linear_down` computes the two latent vectors, which all
        heads share. `linear_q_up` and `linear_kv_up` compute the heads from the latent vectors."""
        hidden, heads = arch.hidden_size, arch.num_heads
        down = {source + f"{name}.weight": (rows, hidden) for name, rows in mla.down.items()}
        q_name, q_in = ("q_proj", hidden) if mla.q_rank is None else ("q_b_proj", mla.q_rank)
        kv_up = {source + "kv_b_proj.weight": (heads * mla.key_value_size, mla.kv_rank)}
        norms = {"q_a": mla.q_rank, "kv_a": mla.kv_rank}
        return [
            WeightRule(parameter + "linear_down.weight", down),
            WeightRule(
                parameter + "linear_q_up.weight",
                {f"{source}{q_name}.weight": (heads * arch.head_dim, q_in)},
                "rows",
            ),
            WeightRule(parameter + "linear_kv_up.weight", kv_up, "rows"),
            WeightRule(
                parameter + "linear_proj.weight",
                {source + "o_proj.weight": (hidden, heads * mla.value_size)},
                "columns",
            ),
            *(
                WeightRule(
                    f"{parameter}{name}_layernorm.weight",
                    {f"{source}{name}_layernorm.weight": (size,)},
                )
                for name, size in norms.items()
                if size is not None
            ),
        ]

    def _mscale(self, config: ModelConfig) -> float:
        """The factor by which queries and keys are multiplied."""
        rope = Decoder.rope_parameters(self, config)
        if not rope.get("mscale_all_dim"):
            return 1.0
        return _magnitude(float(rope["factor"]), rope["mscale_all_dim"])

    def _refuse_variants(self, config: ModelConfig) -> None:
        """Refuse variants that Tandem does not build. Version 0.32 of vLLM silently computes some
        of the variants differently from transformers."""
        super()._refuse_variants(config)
        rope = Decoder.rope_parameters(self, config)
        kind = rope.get("rope_type", rope.get("type", "default"))
        config.refuse(
            {
                "RoPE whose pairs are not neighbours (rope_interleave=false)": (
                    not config.given("rope_interleave", True)
                ),
                f"RoPE scaling {kind!r} (not 'default' or 'yarn')": kind not in ("default", "yarn"),
                "YaRN with an attention_factor": rope.get("attention_factor") is not None,
                "YaRN without truncation": not rope.get("truncate", True),
                "YaRN with one of mscale and mscale_all_dim": (
                    bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim"))
                ),
                "another choice of experts than noaux_tc": (
                    config.given("topk_method", "noaux_tc") != "noaux_tc"
                ),
                "a router without a sigmoid": config.given("scoring_func", "sigmoid") != "sigmoid",
                "layers without experts among those with them (moe_layer_freq)": (
                    config.given("moe_layer_freq", 1) != 1
                ),
                "a sparse attention's indexer": config.get("index_topk"),
            }
        )


def _magnitude(factor: float, mscale: float) -> float:
    """The number with which YaRN corrects the attention's magnitude for a longer context.

    Args:
        factor: length of the context, divided by the length of the original context.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


GLM = LatentMoe(
    "glm4_moe_lite",
    {
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "routed_scaling_factor": 1.8,
    },
    shared_experts=True,
)
DEEPSEEK = LatentMoe(
    "deepseek_v3",
    {
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    shared_experts=True,
    yarn=True,
)
KIMI = replace(DEEPSEEK, model_type="kimi_k2")
