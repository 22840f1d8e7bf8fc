"""SmolLM3: Llama, but some layers have no RoPE."""

from dataclasses import replace

from tandem.families.arch import Arch
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig


class SmolLM3(Decoder):
    def arch(self, config: ModelConfig) -> Arch:
        """The model's shape. In spite of its name, the list `no_rope_layers` has a 1 for each layer
        with RoPE, and a 0 for each other layer. Without the key `no_rope_layers`, layers at a fixed
        interval have no RoPE."""
        arch = super().arch(config)
        layers, turned = arch.num_layers, config.get("no_rope_layers")
        if turned is None:
            every = config.positive("no_rope_layer_interval", int, 4)
            turned = [int((index + 1) % every != 0) for index in range(layers)]
        if len(turned) < layers or set(turned) - {0, 1}:
            raise config.invalid(f"no_rope_layers is {turned!r} for {layers} layers")
        return replace(arch, rope_layers=tuple(bool(one) for one in turned[:layers]))

    def _refuse_variants(self, config: ModelConfig) -> None:
        super()._refuse_variants(config)
        config.refuse({"windows in layers without RoPE": config.get("use_sliding_window")})


FAMILY = SmolLM3(
    "smollm3",
    {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
    },
)
