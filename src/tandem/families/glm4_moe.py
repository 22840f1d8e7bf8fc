"""GLM-4.5. The first layers are dense; the other layers are mixtures with a shared expert and a
sigmoid router. RoPE rotates a part of each head. The checkpoints' layers that predict further
tokens (MTP) are not read."""

from dataclasses import replace

from tandem.families.arch import Arch, MoE
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule


class Glm4Moe(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        arch, rope = super().arch(config), self.rope_parameters(config)
        factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.5))
        return replace(
            arch,
            qk_norm=bool(config.get("use_qk_norm", False)),
            qkv_bias=bool(config.get("attention_bias", False)),
            rotary_size=int(arch.head_dim * factor),
        )

    def moe(self, config: ModelConfig) -> MoE:
        size = config.positive("moe_intermediate_size", int)
        dense = config.get("first_k_dense_replace", 1)
        moe = MoE(
            num_experts=config.positive("n_routed_experts", int),
            experts_per_token=config.positive("num_experts_per_tok", int),
            ffn_hidden_size=size,
            norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            router="sigmoid",
            groups=config.positive("n_group", int, 1),
            groups_per_token=config.positive("topk_group", int, 1),
            scale=config.positive("routed_scaling_factor", float, 1.0),
            dense_layers=dense,
            shared_size=size * config.positive("n_shared_experts", int, 1),
        )
        layers, group_size = (
            config.positive("num_hidden_layers", int),
            moe.num_experts // moe.groups,
        )
        if not isinstance(dense, int) or not 0 <= dense < layers:
            raise config.invalid(
                f"first_k_dense_replace is {dense!r} of {layers} layers; one must be a mixture"
            )
        if moe.num_experts % moe.groups or not group_size > 1 or moe.groups_per_token > moe.groups:
            problem = (
                f"{moe.groups_per_token} of {moe.groups} groups for each token of {moe.num_experts}"
                " experts"
            )
            raise config.invalid(f"n_group, topk_group and n_routed_experts ask for {problem}")
        if moe.experts_per_token > group_size * moe.groups_per_token:
            raise config.invalid(
                f"{moe.experts_per_token} experts per token, of {group_size * moe.groups_per_token}"
            )
        return moe

    def mlp_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        assert arch.moe is not None
        if layer < arch.moe.dense_layers:
            return super().mlp_rules(replace(arch, moe=None), layer, parameter, source)
        bias = {source + "gate.e_score_correction_bias": (arch.moe.num_experts,)}
        shared = replace(arch, ffn_hidden_size=arch.moe.shared_size, moe=None)
        return [
            *super().mlp_rules(arch, layer, parameter, source),
            WeightRule(parameter + "router.correction_bias", bias, fp32=True),
            *super().mlp_rules(
                shared, layer, parameter + "shared_experts.", source + "shared_experts."
            ),
        ]


FAMILY = Glm4Moe(
    "glm4_moe",
    {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    qkv_bias=True,
    partial_rope=True,
    shared_experts=True,
)
