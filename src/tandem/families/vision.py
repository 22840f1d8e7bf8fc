"""Text models of checkpoints with a vision tower. The text model's config is `text_config`. The
vision tower is not read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tandem.families.arch import Arch
from tandem.families.decoder import Decoder
from tandem.families.model_config import ModelConfig
from tandem.families.weight_rules import WeightRule


@dataclass(frozen=True)
class TextOfVision(Decoder):
    texts: Mapping[str, Decoder] = field(default_factory=dict)
    """The text models by `model_type` of text_config. The first model is the default if text_config
    has no `model_type`."""
    prefix: str = "model.language_model."  # prefix of the text model's tensors
    tied: bool | None = False  # default of `tie_word_embeddings`; None: the value in text_config

    def arch(self, config: ModelConfig) -> Arch:
        first = next(iter(self.texts))
        text = text_of(config, self.tied, self.texts[first].defaults)
        kind = text.get("model_type", first)
        if kind not in self.texts:
            raise config.unsupported(f"the text model {kind!r} (not {' or '.join(self.texts)})")
        arch = self.texts[kind].arch(text)
        return replace(arch, model_type=self.model_type, weight_prefix=self.prefix)

    def weight_rules(self, arch: Arch) -> list[WeightRule]:
        return next(iter(self.texts.values())).weight_rules(arch)


def text_of(
    config: ModelConfig, tied: bool | None, defaults: Mapping[str, object] | None = None
) -> ModelConfig:
    """The text model's config.

    Args:
        tied: see `TextOfVision.tied`.
        defaults: default values of the text model's config.
    """
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise config.invalid("text_config is missing, or is not an object")
    # To decide whether embedding and output layer share a table, transformers reads
    # `tie_word_embeddings` in text_config. Unlike transformers, vLLM reads `tie_word_embeddings` at
    # the config's top level.
    of_text = bool(text.get("tie_word_embeddings", (defaults or {}).get("tie_word_embeddings")))
    of_all = bool(config.get("tie_word_embeddings", of_text if tied is None else tied))
    if of_all != of_text:
        raise config.unsupported(f"tie_word_embeddings={of_all} beside {of_text} in text_config")
    if config.get("quantization_config"):
        raise config.unsupported("quantised weights")
    return replace(config, values=text)
