"""The process that ranks are forked from. It imports everything a rank needs, once, and runs no job itself.

    python -m tandem.trainer.launch.forkserver <socket's descriptor> <entry module>

Forking is safe because of three rules:

- No CUDA, whose context does not survive a fork. With PYTORCH_NVML_BASED_CUDA_CHECK=1 (set by `launch.fork`) the
  imports look for devices without the CUDA runtime.
- No OpenMP region and no second thread: a forked child has only the thread that forked, and libgomp would wait for its
  other threads forever. The runner logs a warning with their names. (With GPUs there is one of NVML's: it waits for
  the driver's events, and nvmlShutdown does not end it. CUDA's threads have such names too, but a server that touched
  CUDA would not go unnoticed: its children can't use a device.)
- All ranks are forked before the store's threads start. torch's elastic agent has threads (store, rendezvous, logs)
  when it forks. So the ranks' parent, the leader, is our own. It sets the agent's environment and acts like the agent:
  after the first failure it ends the other ranks, and it restarts none. The ranks' connections wait in the listening
  socket's backlog until the store runs.

Protocol over the socket, one JSON object per packet. Runner: a `Launch`. Server: {"ready": {...}} after the imports,
and {"exited": status, "work": <the launch's work directory>}, which may come late about a launch that was killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tandem.system.processes import adopt_orphans, describe_exit, die_with_parent
from tandem.trainer.launch import SHUTDOWN_SECONDS, Launch, write_exits
from tandem.trainer.launch.bootstrap import redirect, run

_POLL_SECONDS = 0.02


def main() -> None:
    descriptor, entry_name = sys.argv[1:]
    adopt_orphans()
    runner = socket.socket(fileno=int(descriptor))
    begin = time.monotonic()
    entry = importlib.import_module(entry_name)
    if hasattr(entry, "preload"):
        entry.preload()
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in others]
    threads = [name for name in names if not name.startswith("cuda")]  # NVML's
    ready = {"seconds": time.monotonic() - begin, "threads": ",".join(threads) or None}
    runner.send(json.dumps({"ready": ready}).encode())
    while request := runner.recv(1 << 16):
        launch = Launch.from_json(request)
        leader = _fork_leader(runner, launch)
        pid = status = 0
        while pid != leader:
            pid, status = os.wait()  # also returns orphans that this process adopted
        report = {"exited": os.waitstatus_to_exitcode(status), "work": str(launch.work)}
        runner.send(json.dumps(report).encode())


def _fork_leader(runner: socket.socket, launch: Launch) -> int:
    server = os.getpid()

    def child() -> int:
        die_with_parent(server)
        os.setsid()
        runner.close()
        redirect(launch.work / "launcher.log")
        return lead(launch)

    return _fork(child)


def lead(launch: Launch) -> int:
    """Be the parent of the ranks: fork them, run their store, wait. Returns 0 when all of them exited with 0."""
    stop_requests: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.create_server(("localhost", 0), backlog=max(128, launch.ranks))
    ranks = {_fork_rank(launch, rank, listener): rank for rank in range(launch.ranks)}
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    store = TCPStore(
        "localhost", port, None, is_master=True, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    failures: dict[int, int] = {}  # of the ranks that failed before the others were ended, in that order
    terminated = False
    kill_time = float("inf")
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if pid in ranks and code:
                print(f"rank {ranks[pid]} (pid {pid}) ended with {describe_exit(code)}", flush=True)
                if not terminated:
                    failures[ranks[pid]] = code
            ranks.pop(pid, None)
            continue
        if not terminated and (stop_requests or failures):
            terminated, kill_time = True, time.monotonic() + SHUTDOWN_SECONDS["fork"]
            for rank_pid in ranks:
                os.kill(rank_pid, signal.SIGTERM)
        if time.monotonic() > kill_time:
            for rank_pid in ranks:
                os.kill(rank_pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    write_exits(launch.work, failures)
    del store
    return 1 if stop_requests or failures else 0


def _fork_rank(launch: Launch, rank: int, listener: socket.socket) -> int:
    leader = os.getpid()
    port = listener.getsockname()[1]

    def child() -> int:
        die_with_parent(leader)
        # As under torchrun: each rank leads a session and handles signals like a new Python process.
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        listener.close()
        redirect(launch.work / f"rank.{rank}.log")
        os.environ.update(_torchrun_environment(launch, rank, port))
        _reset_random_state()
        return run(launch)

    return _fork(child)


def _fork(child: Callable[[], int]) -> int:
    """Fork; returns the child's pid. The child runs `child` and exits with its result. Even when `child` raises, it
    neither returns into the server's stack nor runs the server's exit handlers."""
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
    """The variables that torchrun's agent gives a rank on a single node."""
    world = str(launch.ranks)
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank), "GROUP_RANK": "0",
        "ROLE_NAME": "default", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{launch.job}-{launch.attempt}", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip


def _reset_random_state() -> None:
    """Set the random state that a new process has. Otherwise all ranks of all jobs would draw the same numbers."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        # In a new process, torch's CPU generator starts from this constant.
        torch.default_generator.manual_seed(torch.default_generator.__class__().initial_seed())


if __name__ == "__main__":
    main()
