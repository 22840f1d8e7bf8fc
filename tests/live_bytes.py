"""Bytes of living tensors on the CPU, like `torch.cuda.memory_allocated` on a GPU."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the storages that operations in its context create, even if only autograd's graph or a
    reference cycle keeps them alive.

    A storage that an operation received (for a view or an in-place result) is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[int, int] = {}
        self.peak = 0

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._bytes:
                self._bytes[key] = storage.nbytes()
                weakref.finalize(storage, self._bytes.pop, key, None)
        self.peak = max(self.peak, self.bytes)
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def counted(device: torch.device) -> Iterator[Callable[[], int]]:
    """A function that returns the bytes of living tensors. On a GPU the function counts all
    tensors, and on the CPU only tensors that were made in the `with` block."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        yield torch.cuda.memory_allocated
        return
    with LiveStorages() as live:
        yield lambda: live.bytes
