"""Llama: the standard decoder; from Llama 3.1 on with its own RoPE scaling, which every family's config may ask for."""

from tandem.families.decoder import Decoder

FAMILY = Decoder("llama", max_positions=2048)
