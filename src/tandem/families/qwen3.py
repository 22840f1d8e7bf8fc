"""Qwen3: norms on queries and keys."""

from tandem.families.decoder import Decoder

FAMILY = Decoder(
    "qwen3",
    qk_norm=True,
    head_dim=128,
    num_kv_heads=32,
    windows=True,
    sliding_window=4096,
    window_is_optional=True,
    full_layers=28,
)
