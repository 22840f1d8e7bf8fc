"""Mistral: the standard decoder. A `sliding_window` in its config is in use by default, and is refused."""

from tandem.families.decoder import Decoder

FAMILY = Decoder("mistral", sliding_window=True)
