"""Mistral: the standard decoder. Without `"sliding_window": null` in its config it has a window, which is refused."""

from tandem.families.decoder import Decoder

FAMILY = Decoder("mistral", num_kv_heads=8, max_positions=131072, sliding_window=4096)
