"""Qwen3: norms on queries and keys."""

from tandem.families.decoder import Decoder

FAMILY = Decoder("qwen3", qk_norm=True, head_dim=128)
