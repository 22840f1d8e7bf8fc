"""The base model's safetensors files, by tensor."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open


class BaseFiles:
    """Reads blocks of tensors. Files stay open, memory-mapped."""

    def __init__(self, model: str) -> None:
        """`model`: a directory, or the name of a hub repository that is in the local cache."""
        directory = Path(model)
        if not directory.is_dir():
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(model, local_files_only=True))
        index = directory / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = [path.name for path in sorted(directory.glob("*.safetensors"))]
        opened = [safe_open(directory / name, framework="pt") for name in files]
        self._file = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dict

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file[name].get_slice(name).get_shape())

    def block(self, name: str, of: Sequence[slice]) -> torch.Tensor:
        """The block `of` of a tensor, in the file's dtype; KeyError for a name that the model does not have."""
        part: torch.Tensor = self._file[name].get_slice(name)[tuple(of)]
        return part
