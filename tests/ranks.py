"""Ranks as processes of their own, as torchrun would start them."""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from free_ports import free_ports
from tandem.system import processes


def fork_ranks(count: int, run: Callable[..., None], *arguments: object) -> None:
    """Calls `run(rank, count, port, *arguments)` in each of `count` processes at once. All
    processes must succeed.

    The processes are forked from this process, so they have its imports.
    """
    fork, [port] = multiprocessing.get_context("fork"), free_ports(1)
    ranks = [
        fork.Process(target=run, args=(rank, count, port, *arguments)) for rank in range(count)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not any(rank.exitcode for rank in ranks), count


def start_rank(environment: dict[str, str], log: Path, script: str, *arguments: str) -> BaseProcess:
    """Starts `python <script> <arguments>` in this environment, forked from a server that has
    imported the modules that ranks import.

    The imports take a process 5 s of CPU time. The rank's output goes to `log`.
    """
    log.touch()
    rank = _server().Process(target=_run, args=(environment, log, script, arguments))
    rank.start()
    return rank


@cache
def _server() -> Any:
    """The fork server of this process. The fork server starts with the first rank and ends with
    this process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["policies", "tandem.trainer.rank.entry", "rank.jobs"])
    # This variable makes torch look for GPUs through NVML, so Megatron's import does not call CUDA.
    # A process that has called CUDA can't fork children that use CUDA.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
    variables = {"PYTHONPATH": path, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # A test's own temporary directory may have a name that is too long for the server's socket.
    with mock.patch.dict(os.environ, variables), mock.patch.object(tempfile, "tempdir", None):
        forkserver.ensure_running()
    return server


def _run(environment: dict[str, str], log: Path, script: str, arguments: tuple[str, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    # The fork server's libraries read OMP_NUM_THREADS only once, when the fork server loaded them.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def run_ranks(count: int, script: str, *arguments: str) -> None:
    """Run `python <script> <arguments>` as each of `count` ranks at once. All ranks must
    succeed."""
    [port] = free_ports(1)
    environment = os.environ | {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory) / str(rank) for rank in range(count)]
        ranks = [
            start_rank(
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, log, script, *arguments
            )
            for rank, log in enumerate(logs)
        ]
        try:
            wait_for(ranks, 400)
        finally:
            for rank in ranks:
                rank.kill()
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.exitcode == 0, log.read_text(errors="replace")[-6000:]


def run_program(script: str, *arguments: str, seconds: float) -> str:
    """Runs `python <script> <arguments>`, forked as by `start_rank`. The program must succeed
    within `seconds`. Returns its output."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        program = start_rank(os.environ | {"OMP_NUM_THREADS": "1"}, log, script, *arguments)
        try:
            wait_for([program], seconds)
        finally:
            program.kill()
        printed = log.read_text(errors="replace")
        assert program.exitcode == 0, f"{program.exitcode}: {printed[-20000:]}"
        return printed


def wait_for(ranks: Sequence[BaseProcess], seconds: float) -> None:
    """Wait at most `seconds` until all processes have ended. The remaining processes print their
    stacks and are killed."""
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    for rank in ranks:
        if rank.pid is not None and rank.is_alive():
            for process in [
                *processes.descendants(rank.pid),
                *filter(None, [processes.read_process(rank.pid)]),
            ]:
                processes.send(process, signal.SIGABRT)
    time.sleep(2 if any(rank.is_alive() for rank in ranks) else 0)
