"""Releases device memory for a while: the tensor objects stay, but their storages are emptied and
later refilled."""

from collections.abc import Iterable, Iterator

import torch

from tandem.model import device
from tandem.model.device.memory import ALIGNMENT

CHUNK = 2**30
"""Bytes of one host buffer. Several buffers are used, because torch rounds pinned memory up to a
power of two. Rounding could double the size of a single large buffer."""


class Offload:
    """Tensors whose device memory is released and restored together: a model's parameters, its
    optimizer's state, or its gradients.

    With `contents=True`, the values are kept in host buffers (pinned if there is a GPU). The
    buffers are created at the first `park` and reused later, because pinning takes far longer than
    copying. With `contents=False`, the values are dropped, because the tensors are read from files
    again, or begin at zero.
    """

    def __init__(self, *, contents: bool) -> None:
        self._contents = contents
        self._host: list[torch.Tensor] = []  # Buffers of CHUNK bytes; the last may be smaller.
        # Each parked (released) storage, its size in bytes, and the offset of its copy in the host
        # buffers.
        self._parked: list[tuple[torch.UntypedStorage, int, int]] = []

    @property
    def parked(self) -> bool:
        return bool(self._parked)

    def park(self, tensors: Iterable[torch.Tensor]) -> int:
        """Free the tensors' device memory, and the memory of all views of them. Returns the number
        of bytes freed.

        The tensors must not be read until `restore` is called. Raises RuntimeError if the memory is
        released already.
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
            if sum(len(chunk) for chunk in self._host) < offset:
                self._host = []  # frees the old buffers before new ones are allocated
                sizes = [min(CHUNK, offset - begin) for begin in range(0, offset, CHUNK)]
                pinned = device.is_cuda()
                self._host = [
                    torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                    for n in sizes
                ]
            for device_bytes, copy in self._pieces():
                copy.copy_(device_bytes, non_blocking=True)
        device.synchronize()  # waits for the copies, and for kernels that still read the tensors
        for storage, _, _ in self._parked:
            storage.resize_(0)
        return sum(size for _, size, _ in self._parked)

    def restore(self) -> None:
        """Allocate the tensors' memory again, in the same sizes. With `contents=True`, the values
        are restored; with `contents=False`, they are uninitialised."""
        for storage, size, _ in self._parked:
            storage.resize_(size)
        if self._contents:
            for device_bytes, copy in self._pieces():
                device_bytes.copy_(copy, non_blocking=True)
        device.synchronize()  # waits, so that the host buffers may be reused
        self._parked = []

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of tensors: a piece of the parked tensors' bytes, and the piece's place in the host
        buffers."""
        for storage, size, begin in self._parked:
            device_bytes, end = (
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage),
                begin + size,
            )
            at = begin
            while at < end:
                until = min(end, (at // CHUNK + 1) * CHUNK)
                yield (
                    device_bytes[at - begin : until - begin],
                    self._host[at // CHUNK][at % CHUNK :][: until - at],
                )
                at = until
