"""Gives device memory back for a while: the tensors stay, their storages are emptied and later refilled."""

from collections.abc import Iterable

import torch

from tandem.model import device
from tandem.model.device.memory import ALIGNMENT


class Offload:
    """Tensors that are parked and restored together: a model's parameters, or its optimizer's state, or its gradients.

    `contents=True` keeps their values in one host buffer (pinned if there is a GPU), made at the first `park` and used
    again by later ones, because pinning costs far more than copying. `contents=False` drops the values, for tensors
    that are read from files again or begin at zero.
    """

    def __init__(self, *, contents: bool) -> None:
        self._contents = contents
        self._host: torch.Tensor | None = None
        self._parked: list[tuple[torch.UntypedStorage, int, int]] = []  # and its bytes, and its copy's offset in _host

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def park(self, tensors: Iterable[torch.Tensor]) -> int:
        """Free the tensors' device memory, and with it that of all views of them; returns the number of bytes freed.

        The tensors may not be read until `restore`. Raises RuntimeError if tensors are parked already.
        """
        if self._parked:
            raise RuntimeError("these tensors are offloaded already; restore them first")
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        offset = 0
        for storage in storages.values():
            if storage.nbytes():
                self._parked.append((storage, storage.nbytes(), offset))
                offset += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        if self._contents:
            if self._host is None or self._host.nbytes < offset:
                self._host = None  # frees it before the larger one is made
                self._host = torch.empty(offset, dtype=torch.uint8, device="cpu", pin_memory=device.is_cuda())
            for storage, size, begin in self._parked:
                self._host[begin : begin + size].copy_(_bytes(storage), non_blocking=True)
        device.synchronize()  # waits for the copies, and for kernels that still read the tensors
        for storage, _, _ in self._parked:
            storage.resize_(0)
        return sum(size for _, size, _ in self._parked)

    def restore(self) -> None:
        """Allocate the tensors' memory again, in the same sizes: with their contents, or uninitialised."""
        for storage, size, begin in self._parked:
            storage.resize_(size)
            if self._host is not None:
                _bytes(storage).copy_(self._host[begin : begin + size], non_blocking=True)
        device.synchronize()  # before the host buffer may be used again
        self._parked = []


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
