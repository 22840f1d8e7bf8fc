"""Transfers bytes from ranks of the trainer to vLLM's workers. The channel uses its own process
group in addition to each process's default group: NCCL between GPUs, Gloo between CPUs.

The senders are the first ranks of the group, and send one after another. All senders use one group,
because NCCL takes 0.8 s to connect a group. The members of the group find one another through a
file on the volume. No function of this module waits longer than STALL_SECONDS for another process,
except while NCCL connects. Another thread of the caller must limit the time that a `Channel` takes
to connect.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from tandem.system.plain_files import descriptor

STALL_SECONDS = 10.0
"""Seconds that a process waits for the next sign of life of another process."""
BUFFER_BYTES = 256 * 2**20
BUFFERS = 2  # While one buffer is transferred, the other buffer is filled or emptied.


class Pending(Protocol):
    """A buffer that is being transferred."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


def make_meeting(path: Path) -> FileStore:
    """The store of a new rendezvous (meeting), by which the members of a group find one another.
    The store is a file on the volume, so no port has to be open. Only the file's owner and Unix
    group have access to the file. NCCL's sockets admit only processes that know the id in the file.
    Raises OSError if the file exists or can't be made."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_RDWR, 0o660))
    return join_meeting(path)


def join_meeting(path: Path) -> FileStore:
    """The store of an existing rendezvous (meeting). Raises OSError if the meeting does not
    exist."""
    os.close(descriptor(path, os.O_RDWR))
    # The argument -1 means that the number of processes is unknown. If the number were known, the
    # last process would remove the file.
    store = FileStore(str(path), -1)
    store.set_timeout(timedelta(seconds=STALL_SECONDS))
    return store


def finish(pending: Pending) -> None:
    """Wait until a buffer is transferred. Raises an error if the transfer takes longer than
    STALL_SECONDS, or if the group has failed."""
    deadline = time.monotonic() + STALL_SECONDS
    while not pending.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a buffer did not arrive within {STALL_SECONDS:.0f} s")
        time.sleep(0.0002)
    pending.wait()


class Channel:
    def __init__(
        self, store: Store, rank: int, size: int, where: torch.device, address: str
    ) -> None:
        """Connect to the other members of the group.

        Args:
            store: the store that `make_meeting` or `join_meeting` returned.
            rank: this process's number in the group, from 0.
            size: the number of ranks of the group.
            where: the device of the buffers.
            address: the name or IP address of this process's host, for Gloo. Members on different
                hosts need different addresses.
        """
        store = PrefixStore("group", store)
        self._group: Any
        if where.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            # NCCL's timeout is long, because NCCL ends the process at its timeout. `finish` has a
            # timeout of its own.
            options._timeout = timedelta(days=1)
            with _environment(
                TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_ENABLE_MONITORING="0"
            ):
                self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            # The first broadcast connects the group; creating the group does not.
            finish(self.broadcast(torch.zeros(1, device=where), 0))
        else:
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timedelta(seconds=STALL_SECONDS)
            options._devices = [gloo.create_device(hostname=address)]
            self._group = gloo(store, rank, size, options)

    def broadcast(self, buffer: torch.Tensor, sender: int) -> Pending:
        """On the rank `sender`, send the flat tensor `buffer`; on all other ranks, receive the
        sender's buffer into `buffer`. All ranks of the group call `broadcast` in the same order,
        with buffers of the same size."""
        options = dist.BroadcastOptions()
        options.rootRank = sender
        work: Pending = self._group.broadcast([buffer], options)
        return work

    def close(self) -> None:
        self._group.abort()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Sets environment variables within the `with` block. NCCL's process group reads the variables
    when the group is created. After the block, the variables have their old values, so other
    process groups of vLLM and the trainer are not affected."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
