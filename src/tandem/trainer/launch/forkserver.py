"""The fork server, the process from which ranks are forked. The runner uses the fork server through
the class `ForkServer`. The fork server imports all modules that a rank needs, once, and runs no job
itself.

    python -m tandem.trainer.launch.forkserver <socket's descriptor> <entry module> <setting of
    the device>

Forking is safe because of three rules:

- The fork server does not use CUDA, because a CUDA context does not survive a fork. With
  PYTORCH_NVML_BASED_CUDA_CHECK=1 the imports look for devices without the CUDA runtime.

- The fork server has no OpenMP region and no second thread. A forked child has only the thread that
  forked, and libgomp would wait for the missing threads for ever. If the fork server has other
  threads, the runner logs a warning with their names. On a host with GPUs, NVML has one thread,
  which waits for the driver's events and causes no warning. Calling nvmlShutdown does not end
  NVML's thread.

- All ranks are forked before the store's threads start. The elastic agent of torch has threads when
  it forks. So the ranks' parent is a process of Tandem, the leader, instead of torch's agent. Like
  torch's agent, the leader ends the other ranks after the first failure, and restarts no rank. The
  ranks' connections wait in the listening socket's backlog until the store runs.

Each packet on the socket between runner and fork server is one JSON object. The runner sends a
`Launch`. If the launch names the store's address and this host has the store, the store's listening
socket comes with the packet. The server sends {"ready": {...}} after the imports, and after each
launch {"exited": status, "work": <the launch's work directory>}. If the launch was killed, its
"exited" packet may arrive after the next launch has started.
"""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

from tandem.system import processes
from tandem.system.logs import Log
from tandem.system.processes import Process, adopt_orphans, describe_exit, die_with_parent
from tandem.trainer.launch import (
    EXITS,
    LAUNCHER_LOG,
    SHUTDOWN_SECONDS,
    Launch,
    start_child,
    write_exits,
)
from tandem.trainer.launch.bootstrap import redirect, run

log = Log("runner")


class ForkServer:
    """The fork server, which is also the handle of its latest launch. `Torchrun` documents the
    methods of a handle.

    A launch never waits for the server's imports: the request stays in the socket until the imports
    are done.

    Args:
        entry: the module whose `main` runs a rank.
        device: the setting of the device: "auto", "cpu" or "cuda".
        environment: all environment variables of the server and the ranks.
    """

    name = "fork server"

    def __init__(self, entry: str, device: str, environment: dict[str, str]) -> None:
        # With PYTORCH_NVML_BASED_CUDA_CHECK=1 torch looks for devices through NVML instead of the
        # CUDA runtime, whose state does not survive a fork.
        environment = environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [
                sys.executable,
                "-m",
                "tandem.trainer.launch.forkserver",
                str(theirs.fileno()),
                entry,
                device,
            ]
            self._process = start_child(command, environment, pass_fds=[theirs.fileno()])
        self.pid = self._process.pid
        self._work = ""
        self._exit: int | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._socket.fileno() >= 0

    def launch(self, launch: Launch, listener: socket.socket | None = None) -> Self:
        """Start a launch. `listener`: the store's socket, if ranks of other hosts reach the
        store."""
        self._work, self._exit = str(launch.work), None
        with suppress(OSError):  # the server has just died; `poll` reports this
            sockets = [] if listener is None else [listener.fileno()]
            socket.send_fds(self._socket, [launch.model_dump_json().encode()], sockets)
        return self

    def poll(self) -> int | None:
        while self._socket.fileno() >= 0 and select.select([self._socket], [], [], 0)[0]:
            packet = b""
            with suppress(ConnectionError):
                packet = self._socket.recv(1 << 16)
            if not packet:
                self._socket.close()
                break
            message = json.loads(packet)
            if ready := message.get("ready"):
                (log.warning if ready["threads"] else log.info)(
                    "fork server is ready", pid=self.pid, **ready
                )
            # A packet with another `work` belongs to an earlier launch, which was killed.
            elif message["work"] == self._work:
                self._exit = message["exited"]
        if self._exit is None and not self.alive:
            self._exit = -signal.SIGKILL  # leader and ranks die together with the server
        return self._exit

    def terminate(self) -> None:
        leaders = [process for process in self.processes() if process.parent == self.pid]
        for leader in leaders:
            processes.send(leader, signal.SIGTERM)
        if not leaders and self.poll() is None:
            # During the server's imports the job has no process yet. Closing the server drops the
            # job's request.
            self.close()

    def processes(self) -> list[Process]:
        return [process for process in processes.descendants(self.pid) if not process.zombie]

    def kill_all(self, timeout: float) -> list[Process]:
        return processes.kill_all(self.processes, timeout=timeout, known=[self.pid])

    def close(self) -> None:
        self._socket.close()
        self.kill_all(10)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


def main() -> None:
    descriptor, entry_name, device = sys.argv[1:]
    adopt_orphans()
    runner = socket.socket(fileno=int(descriptor))
    begin = time.monotonic()
    entry = importlib.import_module(entry_name)
    entry.preload(device)
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    names = [(task / "comm").read_text().strip() for task in others]
    threads = [name for name in names if not name.startswith("cuda")]  # threads of NVML
    ready = {"seconds": time.monotonic() - begin, "threads": ",".join(threads) or None}
    runner.send(json.dumps({"ready": ready}).encode())
    while (received := socket.recv_fds(runner, 1 << 16, 1))[0]:
        launch = Launch.model_validate_json(received[0])
        listener = socket.socket(fileno=received[1][0]) if received[1] else None
        leader = _fork(partial(lead, launch, runner, listener))
        if listener is not None:
            listener.close()
        pid = status = 0
        while pid != leader:
            pid, status = os.wait()  # may also return an adopted orphan
        report = {"exited": os.waitstatus_to_exitcode(status), "work": str(launch.work)}
        runner.send(json.dumps(report).encode())


def lead(launch: Launch, runner: socket.socket, listener: socket.socket | None) -> int:
    """Act as the parent of this host's ranks: fork the ranks, run the ranks' store if this host has
    the store, and wait. Returns 0 if all ranks exited with 0.

    Args:
        listener: the store's socket, if other hosts use the store.
    """
    runner.close()
    redirect(launch.of_parent(LAUNCHER_LOG))
    stop_requests: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if launch.host.store is None:
        listener = socket.create_server(("localhost", 0), backlog=max(128, launch.ranks))
    address, port = launch.host.store or ("localhost", _port(listener))
    environment = _torchrun_environment(launch, address, port)
    ranks = {
        _fork(partial(_run_rank, launch, rank, environment, listener)): rank
        for rank in launch.own_ranks
    }
    store = None if listener is None else _store(address, port, listener)
    # Exit status of each rank that failed before the leader ended the other ranks, in the order of
    # the failures.
    failures: dict[int, int] = {}
    kill_time: float | None = None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                print(f"rank {rank} (pid {pid}) ended with {describe_exit(code)}", flush=True)
                if kill_time is None:
                    failures[rank] = code
            continue
        if kill_time is None and (stop_requests or failures):
            kill_time = time.monotonic() + SHUTDOWN_SECONDS["fork"]
            for rank_pid in ranks:
                os.kill(rank_pid, signal.SIGTERM)
        if kill_time is not None and time.monotonic() > kill_time:
            for rank_pid in ranks:
                os.kill(rank_pid, signal.SIGKILL)
        time.sleep(0.02)
    write_exits(launch.of_parent(EXITS), failures)
    del store
    return 1 if stop_requests or failures else 0


def _port(listener: socket.socket | None) -> int:
    assert listener is not None
    port: int = listener.getsockname()[1]
    return port


def _store(address: str, port: int, listener: socket.socket) -> object:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        address,
        port,
        None,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _run_rank(
    launch: Launch, rank: int, environment: dict[str, str], listener: socket.socket | None
) -> int:
    """Run one rank in this process. Gives the rank the signal handlers of a new Python process, as
    torchrun does."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    local = str(rank - launch.own_ranks.start)
    os.environ.update(environment | {"RANK": str(rank), "LOCAL_RANK": local})
    if listener is not None:
        listener.close()
    return run(launch)


def _fork(child: Callable[[], int]) -> int:
    """Fork; returns the child's pid. The child leads a session, dies with its parent, runs `child`,
    and exits with the result of `child`. The child neither returns into the server's stack nor runs
    the server's exit handlers."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        code = child()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _torchrun_environment(launch: Launch, address: str, port: int) -> dict[str, str]:
    """The environment variables that torchrun's agent would set to the same values for all ranks of
    this host. Ranks read these variables."""
    return {
        "GROUP_RANK": str(launch.host.number),
        "WORLD_SIZE": str(launch.ranks),
        "LOCAL_WORLD_SIZE": str(len(launch.own_ranks)),
        "GROUP_WORLD_SIZE": str(launch.host.hosts),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"{launch.job}-{launch.attempt}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


if __name__ == "__main__":
    main()
