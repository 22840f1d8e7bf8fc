"""The text models of Qwen3-VL: Qwen3's text models with a vision tower beside them. A text token
has the same position in all sections of MRoPE, so MRoPE equals RoPE."""

from dataclasses import replace

from tandem.families.arch import Arch, MoE
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.vision import TextOfVision
from tandem.families.weight_rules import WeightRule


class Qwen3VLMoe(Decoder):
    def moe(self, config: ModelConfig) -> MoE:
        """The mixture. The router always normalises its probabilities."""
        moe = super().moe(config)
        assert moe is not None
        if moe.experts_per_token == 1:
            raise config.unsupported("one normalised expert per token")
        return replace(moe, norm_topk_prob=True, fused_adapters=True)

    def mlp_rules(self, arch: Arch, layer: int, parameter: str, source: str) -> list[WeightRule]:
        """The rules of the MLP. One source tensor, [experts, in, out], has the gate and up
        projections of all experts, gate first. Another source tensor, [experts, in, out], has the
        down projections of all experts."""
        router, *_experts = super().mlp_rules(arch, layer, parameter, source)
        assert arch.moe is not None
        count, ffn, hidden = arch.moe.num_experts, arch.moe.ffn_hidden_size, arch.hidden_size
        gate_up = source + "experts.gate_up_proj"
        return [
            router,
            WeightRule(
                parameter + "experts.fc1.weight",
                {gate_up: (count, hidden, 2 * ffn)},
                "rows",
                num_experts=count,
                interleaved=1,
                sections={gate_up: (ffn, ffn)},
            ),
            WeightRule(
                parameter + "experts.fc2.weight",
                {source + "experts.down_proj": (count, ffn, hidden)},
                "columns",
                num_experts=count,
                interleaved=1,
            ),
        ]


_ROPE = {"rope_theta": 500000.0, "max_position_embeddings": 128000}
_TEXT = Decoder(
    "qwen3_vl_text", {**_ROPE, "head_dim": 128, "num_key_value_heads": 32}, qk_norm=True
)
_MIXTURE = Qwen3VLMoe(
    "qwen3_vl_moe_text",
    # `intermediate_size` has no meaning: no layer has an MLP of this size.
    {**_ROPE, "num_key_value_heads": 16, "tie_word_embeddings": True, "intermediate_size": 1},
    qk_norm=True,
    mixture=True,
)
FAMILY = TextOfVision("qwen3_vl", texts={_TEXT.model_type: _TEXT})
MIXTURE = TextOfVision("qwen3_vl_moe", texts={_MIXTURE.model_type: _MIXTURE})
