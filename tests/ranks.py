"""Ranks as processes of their own, as torchrun would start them, for what a test has one rank do."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable

from free_ports import free_ports


def fork_ranks(count: int, run: Callable[..., None], *arguments: object) -> None:
    """`run(rank, count, port, *arguments)` in each of `count` processes at once, all of which succeed.

    They are forked from this process, which has imported everything.
    """
    fork, [port] = multiprocessing.get_context("fork"), free_ports(1)
    ranks = [fork.Process(target=run, args=(rank, count, port, *arguments)) for rank in range(count)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not any(rank.exitcode for rank in ranks), count


def run_ranks(count: int, *arguments: str) -> list[str]:
    """Run `python <arguments>` as each of `count` ranks at once; what each wrote to stdout. All of them succeed."""
    [port] = free_ports(1)
    environment = os.environ | {
        "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        told = [rank.communicate(timeout=400) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, out[-3000:] + errors[-3000:]
    return [out for out, _ in told]
