"""Ministral 3: YaRN, and queries that grow with the position. The checkpoints of Ministral 3 and of
Mistral Small 3 have a vision tower. Their tensors have the names that transformers used before
version 5."""

from dataclasses import replace

from tandem.families.arch import Arch, QueryGrowth
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.vision import TextOfVision

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Ministral3(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        arch, rope = super().arch(config), self.rope_parameters(config)
        rate, positions = (
            rope.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings")
        )
        if rate is None or positions is None:
            raise config.unsupported(
                "queries that don't grow: rope_parameters lacks llama_4_scaling_beta or"
                " original_max_position_embeddings"
            )
        return replace(arch, query_growth=QueryGrowth(float(rate), int(positions)))


MISTRAL = Decoder(
    "mistral",
    {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
TEXT = Ministral3(
    "ministral3",
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "sliding_window": None,
    },
    yarn=True,
)
FAMILY = TextOfVision(
    "mistral3",
    texts={MISTRAL.model_type: MISTRAL, TEXT.model_type: TEXT},
    prefix="language_model.model.",
    tied=None,
)
