"""Device memory given back for a while, tensor by tensor: the tensors stay, their storages go and come again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tandem.model.device import device
from tandem.model.device.allocation import ALIGNMENT


@dataclass(frozen=True)
class _Parked:
    storage: torch.UntypedStorage
    size: int  # bytes
    offset: int  # of its copy in the host buffer


class Offload:
    """A set of tensors that share their fate: their parameters, or their optimizer's state, or its gradients.

    `contents=True` keeps what they hold in one host buffer, pinned where there is a GPU, which is made at the first
    `park` and used again by later ones (pinning costs far more than copying). `contents=False` drops it: for what is
    read from files again, or begins at zero.
    """

    def __init__(self, *, contents: bool) -> None:
        self._contents = contents
        self._host: torch.Tensor | None = None
        self._parked: list[_Parked] = []

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    @property
    def host_bytes(self) -> int:
        """Size of the host buffer."""
        return 0 if self._host is None else self._host.nbytes

    def park(self, tensors: Iterable[torch.Tensor]) -> int:
        """Give back the tensors' device memory, exactly; the bytes given back. The tensors may not be read until
        `restore`. Views of them are parked with them.

        Raises RuntimeError where some are parked already.
        """
        if self._parked:
            raise RuntimeError("these tensors are offloaded already; restore them first")
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        offset = 0
        for storage in storages.values():
            if storage.nbytes():
                self._parked.append(_Parked(storage, storage.nbytes(), offset))
                offset += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if self._contents:
            if self._host is None or self._host.nbytes < offset:
                self._host = None  # before the larger one is made
                self._host = torch.empty(offset, dtype=torch.uint8, device="cpu", pin_memory=device.is_cuda())
            for part in self._parked:
                self._copy(part).copy_(_bytes(part.storage), non_blocking=True)
        device.synchronize()  # the copies, and whatever still reads the tensors
        for part in self._parked:
            part.storage.resize_(0)
        return sum(part.size for part in self._parked)

    def restore(self) -> None:
        """Give the tensors their memory again, in the exact sizes it had: with their contents, or uninitialised."""
        for part in self._parked:
            part.storage.resize_(part.size)
            if self._contents:
                _bytes(part.storage).copy_(self._copy(part), non_blocking=True)
        device.synchronize()  # before the buffer is used again
        self._parked = []

    def _copy(self, part: _Parked) -> torch.Tensor:
        assert self._host is not None
        return self._host[part.offset : part.offset + part.size]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
