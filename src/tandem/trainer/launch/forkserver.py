"""The process that jobs are forked from: everything a rank needs is imported here once, and nothing is ever run here.

    python -m tandem.trainer.launch.forkserver --socket <fd> --entry <module>

What makes forking safe, and is kept true here:

- no CUDA: a context does not survive a fork. PYTORCH_NVML_BASED_CUDA_CHECK=1 (set by `launch.fork`) lets the imports
  ask for devices without the CUDA runtime;
- no OpenMP region, no thread: a forked child has only the thread that forked, and libgomp's pool would wait for the
  others for ever. The names of other threads are reported to the runner and logged. (With GPUs there is one that is
  NVML's, waits for the driver's events, and is not ended by nvmlShutdown);
- all ranks are forked before the store's threads start: torch's own agent has threads (store, rendezvous, log tails)
  when it forks, so the parent of the ranks is written here, with the agent's environment and semantics (first failure
  ends the others; no restarts). The ranks' connections wait in the listening socket's backlog until the store serves.

Protocol over the socket, one JSON object per line. Runner: {"launch": {...}, "number": n} and closing it. Server:
{"ready": ...}, {"started": pid, "number": n}, {"exited": status, "number": n}. The number keeps the late news of a
launch whose processes the runner killed apart from those of the next.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.system.processes import adopt_orphans, describe_exit, die_with_parent
from tandem.trainer.launch import SHUTDOWN_SECONDS, Launch
from tandem.trainer.launch.bootstrap import redirect, run

_POLL_SECONDS = 0.02


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--entry", required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    adopt_orphans()
    runner = socket.socket(fileno=arguments.socket)
    begin = time.monotonic()
    entry = importlib.import_module(arguments.entry)
    if hasattr(entry, "preload"):
        entry.preload()
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    threads = [(task / "comm").read_text().strip() for task in others]
    _send(runner, {"ready": os.getpid(), "seconds": time.monotonic() - begin, "threads": threads})
    return serve(runner)


def serve(runner: socket.socket) -> int:
    """Fork jobs, one at a time, until the runner closes its end."""
    received = b""
    leaders: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([runner], [], [], _POLL_SECONDS if leaders else None)
        if readable:
            chunk = runner.recv(1 << 16)
            if not chunk:
                return 0
            *lines, received = (received + chunk).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                leader = _fork_leader(runner, message["launch"])
                leaders[leader] = message["number"]
                _send(runner, {"started": leader, "number": message["number"]})
        while leaders:
            pid, status = os.waitpid(-1, os.WNOHANG)  # the leader, or what it left to this subreaper
            if pid == 0:
                break
            if pid in leaders:
                _send(runner, {"exited": os.waitstatus_to_exitcode(status), "number": leaders.pop(pid)})


def _fork_leader(runner: socket.socket, request: dict[str, Any]) -> int:
    server = os.getpid()

    def child() -> int:
        die_with_parent(server)
        os.setsid()
        runner.close()
        launch = Launch(**request | {"root": Path(request["root"]), "work": Path(request["work"])})
        redirect(launch.work / "launcher.log")
        return lead(launch)

    return _fork(child)


def lead(launch: Launch) -> int:
    """Be the parent of the ranks: fork them, serve their store, wait. 0 when all of them exited with 0."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.create_server(("localhost", 0), backlog=max(128, launch.ranks))
    ranks = {_fork_rank(launch, rank, listener): rank for rank in range(launch.ranks)}
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    store = TCPStore(
        "localhost", port, None, is_master=True, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    exits: dict[int, int] = {}
    asked = killed = failed = False
    kill_at = float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = ranks.pop(pid, None)
            if rank is None:
                continue
            code = os.waitstatus_to_exitcode(status)
            failed = failed or code != 0
            if code:
                if not asked:
                    exits[rank] = code
                print(f"rank {rank} (pid {pid}) ended with {describe_exit(code)}", flush=True)
            continue
        if not asked and (stopping or failed):
            asked, kill_at = True, time.monotonic() + SHUTDOWN_SECONDS["fork"]
            _signal_all(ranks, signal.SIGTERM)
        if not killed and time.monotonic() > kill_at:
            killed = True
            _signal_all(ranks, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    # Those that failed before the others were ended, in that order.
    (launch.work / "exits.json").write_text(json.dumps(exits))
    del store
    return 1 if stopping or failed else 0


def _fork_rank(launch: Launch, rank: int, listener: socket.socket) -> int:
    leader = os.getpid()
    port = listener.getsockname()[1]

    def child() -> int:
        die_with_parent(leader)
        # As under torchrun: each rank leads a session, and signals do what they do in a new Python process.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.close()
        redirect(launch.work / f"rank.{rank}.log")
        os.environ.update(_torchrun_environment(launch, rank, port))
        _fresh_randomness()
        return run(launch.entry, launch.root, launch.job, launch.attempt)

    return _fork(child)


def _fork(child: Callable[[], int]) -> int:
    """Fork; the child runs `child`, exits with its result whatever happens, and never returns into the server's stack
    or runs its exit handlers."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = child()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _torchrun_environment(launch: Launch, rank: int, port: int) -> dict[str, str]:
    """What torchrun's agent gives a rank on a single node."""
    world = str(launch.ranks)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0",
        "ROLE_NAME": "default", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{launch.job}-{launch.attempt}", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip


def _fresh_randomness() -> None:
    """Give the child the random state a new process has: its siblings and the next job must not draw the same."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # A new process starts torch's CPU generator from this constant, and so must this one.
        torch.default_generator.manual_seed(torch.default_generator.__class__().initial_seed())


def _signal_all(ranks: dict[int, int], sig: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def _send(runner: socket.socket, message: dict[str, object]) -> None:
    runner.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
