"""Qwen2 and Qwen2.5: biases on q, k and v."""

from tandem.families.decoder import Decoder

FAMILY = Decoder(
    "qwen2",
    qkv_bias=True,
    num_kv_heads=32,
    windows=True,
    sliding_window=4096,
    window_is_optional=True,
    full_layers=28,
)
