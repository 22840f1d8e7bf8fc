"""GPT-OSS: attention sinks, a window in every second layer, YaRN, biases in all linear layers, and
experts with a clamped SwiGLU."""

from dataclasses import replace

from tandem.families.arch import Arch, MoE, Window
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEQUANTISE = """python -c "from transformers import AutoModelForCausalLM as M, \
AutoTokenizer as T, Mxfp4Config as C; M.from_pretrained('MODEL', dtype='bfloat16', \
quantization_config=C(dequantize=True)).save_pretrained('COPY'); \
T.from_pretrained('MODEL').save_pretrained('COPY')" """


class GptOss(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        bias = bool(config.get("attention_bias", True))
        return replace(super().arch(config), qkv_bias=bias, output_bias=bias, sinks=True)

    def window(self, config: ModelConfig) -> Window | None:
        """The window. Without `layer_types`, every second layer has the window, beginning with the
        first layer."""
        layers = config.positive("num_hidden_layers", int)
        kinds = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
        layer_types = {"layer_types": config.get("layer_types") or kinds}
        return super().window(replace(config, values={**config.values, **layer_types}))

    def moe(self, config: ModelConfig) -> MoE:
        total = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
        moe = MoE(
            num_experts=config.positive(total, int),
            experts_per_token=config.positive("num_experts_per_tok", int),
            ffn_hidden_size=config.positive("intermediate_size", int),
            norm_topk_prob=True,
            biases=True,
            fused_adapters=True,
        )
        if not 1 < moe.experts_per_token <= moe.num_experts:
            raise config.invalid(
                f"{moe.experts_per_token} experts per token of {moe.num_experts}; 2 is the least"
            )
        return moe

    def mlp_rules(self, arch: Arch, _layer: int, parameter: str, source: str) -> list[WeightRule]:
        assert arch.moe is not None
        num_experts, hidden, ffn, prefix = (
            arch.moe.num_experts,
            arch.hidden_size,
            arch.moe.ffn_hidden_size,
            source + "experts.",
        )
        gate_up, down = prefix + "gate_up_proj", prefix + "down_proj"
        return [
            WeightRule(
                parameter + "router.weight", {source + "router.weight": (num_experts, hidden)}
            ),
            WeightRule(parameter + "router.bias", {source + "router.bias": (num_experts,)}),
            WeightRule(
                parameter + "experts.fc1.weight",
                {gate_up: (num_experts, hidden, 2 * ffn)},
                "rows",
                num_experts=num_experts,
                interleaved=2,
            ),
            WeightRule(
                parameter + "experts.fc1.bias",
                {gate_up + "_bias": (num_experts, 2 * ffn)},
                "rows",
                num_experts=num_experts,
                interleaved=2,
            ),
            WeightRule(
                parameter + "experts.fc2.weight",
                {down: (num_experts, ffn, hidden)},
                "columns",
                num_experts=num_experts,
                interleaved=1,
            ),
            WeightRule(
                parameter + "experts.fc2.bias",
                {down + "_bias": (num_experts, hidden)},
                num_experts=num_experts,
                interleaved=1,
            ),
        ]

    def _refuse_variants(self, config: ModelConfig) -> None:
        if config.get("quantization_config"):
            problem = (
                "quantised weights; write a copy in bfloat16 with transformers, and use its"
                " directory"
            )
            raise config.unsupported(f"{problem}: {_DEQUANTISE.strip()}")
        # vLLM always computes with alpha 1.702 and limit 7.0, even if the config has other values.
        for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if config.get(key, value) != value:
                raise config.unsupported(f"{key}={config.get(key)!r}, not {value}")
        rope, kinds = self.rope_parameters(config), config.get("layer_types") or []
        scaling = rope.get("rope_type", rope.get("type"))
        config.refuse(
            {
                "attention without biases": not config.get("attention_bias", True),
                f"the RoPE {scaling!r} instead of yarn": scaling != "yarn",
                "an attention_factor": rope.get("attention_factor") is not None,
                "layer_types that don't alternate, with a sliding window first,": any(
                    (kind == "sliding_attention") == bool(index % 2)
                    for index, kind in enumerate(kinds)
                ),
            }
        )
        super()._refuse_variants(config)


FAMILY = GptOss(
    "gpt_oss",
    {
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "max_window_layers": 0,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "rope_theta": 150000.0,
        "sliding_window": 128,
    },
    qkv_bias=True,
    yarn=True,
)
