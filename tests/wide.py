"""Some parts of transformers always compute in float32. This module makes these parts compute in
another dtype."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe


class _Torch:
    """A substitute for the module torch. The attribute float32 of the substitute is another
    dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.float32 = self.float = dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def computed_in(dtype: torch.dtype) -> Iterator[None]:
    """Within this context Qwen3.5's delta rule and norms compute in `dtype`."""
    with (
        mock.patch.object(torch.Tensor, "float", lambda tensor: tensor.to(dtype)),
        mock.patch.object(modeling_qwen3_5, "torch", _Torch(dtype)),
        mock.patch.object(modeling_qwen3_5_moe, "torch", _Torch(dtype)),
    ):
        yield
