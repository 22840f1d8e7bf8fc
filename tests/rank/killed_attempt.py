"""One attempt at a job in which one rank kills itself at a given file operation or heartbeat."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from free_ports import free_ports
from rank import jobs
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job
from tandem.trainer.rank import entry
from tandem.trainer.rank.heartbeat import Heartbeat

FORK = multiprocessing.get_context("fork")


def attempt(spool: Spool, job: Job, ranks: int, killed: int, kill_at: int) -> list[int]:
    """Runs one attempt. The rank `killed` dies at its moment number `kill_at`; a moment is a file
    operation on the spool or a heartbeat. Every rank is dead afterwards. Returns each rank's number
    of moments."""
    # The array has no lock between processes, because a killed rank could leave the lock locked for
    # ever.
    [port], moments = free_ports(1), FORK.Array("i", ranks, lock=False)
    started = [
        FORK.Process(
            target=_rank,
            args=(
                rank,
                ranks,
                port,
                spool.root,
                job,
                kill_at if rank == killed else 0,
                moments,
            ),
        )
        for rank in range(ranks)
    ]
    for rank in started:
        rank.start()
    while any(rank.is_alive() for rank in started) and not any(rank.exitcode for rank in started):
        time.sleep(0.005)
    for rank in started:
        rank.kill()
        rank.join()
    return list(moments)


def _rank(
    rank: int, ranks: int, port: int, root: Path, job: Job, kill_at: int, moments: Any
) -> None:
    """Runs a rank. The rank counts its file operations on the spool and its heartbeats in
    `moments`, and dies when the count is `kill_at`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TANDEM_TRAINER_RANKS"] = str(ranks)
    torch.set_num_threads(1)
    one_thread = threading.RLock()

    def moment() -> None:
        with one_thread:
            moments[rank] += 1
            if moments[rank] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(root) in str(
            arguments[0]
        ):
            moment()

    beat = Heartbeat.__call__

    def call(self: Heartbeat, phase: str) -> None:
        moment()
        beat(self, phase)

    Heartbeat.__call__ = call  # type: ignore[method-assign]
    sys.addaudithook(audit)
    os._exit(entry.main(Attempt(Spool(root), job.spec.id, job.attempt), jobs.settings()))
