"""Mistral: the standard decoder. Unless its config says `"sliding_window": null`, all layers have a sliding window."""

from tandem.families.decoder import Decoder

FAMILY = Decoder("mistral", num_kv_heads=8, max_positions=131072, sliding_window=4096, windows=True)
