"""Runs torchrun, and records how its ranks failed.

    python -m tandem.trainer.launch.torchrun_agent <directory> <torchrun's arguments>

The exit status of torchrun is 1 after any failure of any rank. This program calls torchrun's own
`main` and writes the failures that `main` raises to `exits.json` in `directory`.

The stores of torchrun listen on all interfaces, without authentication, and the agent unpickles
values from one of these stores. So anybody who reaches the store's port could run code in the
agent. Therefore the stores of this program listen on loopback only.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import TCPStore
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

from tandem.trainer.launch import EXITS, SHUTDOWN_SECONDS, write_exits


class LoopbackStore(TCPStore):
    """A store whose server listens on loopback only."""

    def __init__(self, host_name: str, port: int, *, is_master: bool, **options: Any) -> None:
        if is_master:
            listener = socket.create_server(("localhost", port), backlog=128)
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, is_master=is_master, **options)


def own_failures(failures: dict[int, ProcessFailure]) -> dict[int, int]:
    """The exit statuses, by rank, of the ranks that failed by themselves, in the order of the
    failures.

    After the first failure, the agent sends SIGTERM to the other ranks, and SIGKILL when its
    timeout is over.
    """
    exits: dict[int, int] = {}
    # Timestamps are whole Unix seconds.
    ordered = sorted(failures.items(), key=lambda item: item[1].timestamp)
    kill_time = ordered[0][1].timestamp + SHUTDOWN_SECONDS["torchrun"]
    for rank, failure in ordered:
        terminated = bool(exits) and failure.exitcode == -signal.SIGTERM
        killed = failure.exitcode == -signal.SIGKILL and failure.timestamp >= kill_time
        if not terminated and not killed:
            exits[rank] = failure.exitcode
    return exits


def main(work: str, *arguments: str) -> None:
    os.environ["TANDEM_AGENT_PID"] = str(os.getpid())
    # `c10d_rendezvous_backend` makes the store of the rendezvous; `distributed` makes the store of
    # the ranks.
    for module in (c10d_rendezvous_backend, distributed):
        vars(module)["TCPStore"] = LoopbackStore
    try:
        run.main([*arguments])
    except ChildFailedError as error:
        write_exits(Path(work) / EXITS, own_failures(error.failures))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
