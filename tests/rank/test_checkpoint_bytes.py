"""A checkpoint's file has the bytes that safetensors' own writer gives."""

import torch
from safetensors.torch import save

from tandem.trainer.rank.checkpoint import _parts


def test_the_same_bytes_as_safetensors():
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 3, 40):
        tensors = {f"layers.{i}.b": torch.randn(3, 5 + i, generator=generator) for i in range(count)}
        tensors |= {"step": torch.tensor(7), "a": torch.randn(2, generator=generator), "none": torch.empty(0, 4)}
        assert b"".join(_parts(tensors)) == save(tensors, metadata={"format": "pt"})
