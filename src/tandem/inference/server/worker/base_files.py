"""The base model's safetensors files, by tensor."""

from collections.abc import Sequence

import torch
from safetensors import safe_open

from tandem.families.model_config import model_directory, weight_files


class BaseFiles:
    """Reads blocks of tensors. Files stay open, memory-mapped."""

    def __init__(self, model: str) -> None:
        """`model`: a directory, or the name of a hub repository that is in the cache."""
        files = weight_files(model_directory(model, cached=True))
        opened = [safe_open(path, framework="pt") for path in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file[name].get_slice(name).get_shape())

    def block(self, name: str, of: Sequence[slice]) -> torch.Tensor:
        """The block `of` of a tensor, in the file's dtype; KeyError for a name that the model does not have."""
        part: torch.Tensor = self._file[name].get_slice(name)[tuple(of)]
        return part
