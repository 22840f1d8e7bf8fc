"""Seed-OSS: Llama, with biases on q, k and v. A config may say that there are no biases."""

from dataclasses import replace

from tandem.families.arch import Arch
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig


class SeedOss(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        return replace(super().arch(config), qkv_bias=bool(config.get("attention_bias", True)))

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        config.refuse({"a bias on attention's output": config.get("attention_out_bias")})


FAMILY = SeedOss(
    "seed_oss",
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "tie_word_embeddings": False,
    },
    qkv_bias=True,
)
