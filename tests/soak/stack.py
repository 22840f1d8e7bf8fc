"""The programs of the soak on one volume, and their processes. A program that ends is started
again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model import write_tiny_qwen3

from free_ports import free_ports

REPOSITORY = Path(__file__).parents[2]
API_KEY, ADMIN_TOKEN = "key", "token"  # the fake vLLM's
RANKS = ("forkserver", "leader", "agent", "rank")
_PROGRAMS = ("up", "supervisord", "runner", "exporter")
CONTAINERS: dict[str, dict[str, tuple[str, ...]]] = {
    "local": {"trainer": (*_PROGRAMS, *RANKS)},
    "hosts": {"trainer": _PROGRAMS, "hosts": ("host", *RANKS)},
}
"""Executor -> the programs of each kind of container. All hosts are struck together, because a
rank's process does not show its host."""
HOSTS = 2
_MODULES = {
    "tandem": "up",
    "supervisor.supervisord": "supervisord",
    "tandem.trainer.runner": "runner",
    "tandem.trainer.agent": "host",
    "tandem.metrics.exporter": "exporter",
    "tandem.trainer.launch.forkserver": "forkserver",
    "tandem.trainer.launch.torchrun_agent": "agent",
    "tandem.trainer.launch.bootstrap": "rank",
    "tandem.controller": "controller",
    "tandem.inference.publisher": "publisher",
    "soak.vllm": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
}
RESTART_SECONDS = 0.2


@dataclass(frozen=True)
class Victim:
    """A living process of the soak. `started` distinguishes the process from a later process with
    the same pid."""

    program: str
    pid: int
    started: str

    def send(self, number: signal.Signals) -> bool:
        """Signals the process; returns whether it existed."""
        with suppress(OSError, IndexError):
            if _stat(self.pid)[19] == self.started:
                os.kill(self.pid, number)
                return True
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat that follow the field `comm`."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Volume:
    """The spool's directory. The directory is the mount of a tmpfs, which can get full and
    read-only. If the mount is refused, the spool's directory is a plain directory."""

    def __init__(self, root: Path, mebibytes: int) -> None:
        self.root = root
        self._filler = root / "soak-junk-filler"
        root.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tandem-soak", str(root)]
        try:
            self.mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
        except OSError:
            self.mounted = False

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("ab") as file:
            while True:
                file.write(b"\0" * 65536)
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(b"\0" * 512)

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def read_only(self) -> bool:
        """Mounts the volume onto itself read-only, for files that are opened from now on. Open
        files are not affected. Returns False if the mount did not succeed."""
        subprocess.run(["mount", "--bind", str(self.root), str(self.root)], check=True)
        command = ["mount", "-o", "remount,bind,ro", str(self.root)]
        for _ in range(20):
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return True
            time.sleep(0.01)  # a process has opened a file for writing since the bind
        self.writable()
        return False

    def writable(self) -> None:
        subprocess.run(["umount", "-l", str(self.root)], check=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.root)], check=False)


class Stack:
    """`tandem up --role trainer`, a controller, and a publisher and a vLLM for each of `servers`
    inference servers. With the executor `hosts` the stack also has an agent for each of two hosts.
    A program that ends is started again, as an orchestrator does."""

    def __init__(
        self,
        work: Path,
        volume: Volume,
        *,
        real_vllm: bool,
        servers: int = 1,
        executor: str = "local",
    ) -> None:
        self.work, self.root = work, volume.root
        self.conditions = work / "conditions.json"
        self.logs = work / "logs"
        for directory in (self.logs, work / "tmp"):
            directory.mkdir()
        shape = {
            "hidden_size": 16,
            "layers": 1,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 8,
            "ffn_size": 16,
        }
        write_tiny_qwen3(self.root / "models/tiny", **shape)
        controller, inference, metrics, metrics_2 = map(str, free_ports(4))
        self.url = f"http://127.0.0.1:{controller}"
        paths = [
            Path(__file__).parent / "site",
            *(REPOSITORY / name for name in ("src", "tests", "examples")),
        ]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TANDEM_", "XDG_"))
        }
        self._environment = inherited | {
            "TANDEM_ROOT": str(self.root),
            "TANDEM_BASE_MODEL": "models/tiny",
            "TANDEM_DEVICE": "cpu",
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "TANDEM_CONTROLLER_PORT": controller,
            "TANDEM_INFERENCE_PORT": inference,
            "TANDEM_METRICS_PORT": metrics,
            "TANDEM_MAX_LORA_RANK": "8",
            "TANDEM_HEARTBEAT_SECONDS": "0.5",
            "TANDEM_LEASE_SECONDS": "10",
            "TANDEM_MAX_MODEL_LEN": "256",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(work / "tmp"),
            "SOAK_CONDITIONS": str(self.conditions),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        self._commands = {"controller": ["tandem.controller"]}
        if real_vllm:
            self._commands["inference"] = ["tandem", "up", "--role", "inference"]
        self._extra: dict[str, dict[str, str]] = {"inference": {"TANDEM_METRICS_PORT": metrics_2}}
        self.containers = CONTAINERS[executor]
        if executor == "hosts":
            self._environment |= {
                "TANDEM_EXECUTOR": "hosts",
                "TANDEM_TRAINER_HOSTS": str(HOSTS),
                "TANDEM_TRAINER_RANKS": str(HOSTS),
                "TANDEM_HOST_ADDRESS": "127.0.0.1",
            }
            for host in range(HOSTS):
                self._commands[f"host-{host}"] = ["tandem.trainer.agent", "--follow"]
                self._extra[f"host-{host}"] = {"TANDEM_HOST_INDEX": str(host)}
        self.vllm_urls: list[str] = []
        for number in range(0 if real_vllm else servers):
            port = inference if servers == 1 else str(free_ports(1)[0])
            self.vllm_urls.append(f"http://127.0.0.1:{port}")
            own = {"TANDEM_INFERENCE_PORT": port}
            if servers > 1:
                own["TANDEM_REPLICA"] = str(number)
            for program, module in (
                ("publisher", "tandem.inference.publisher"),
                ("vllm", "soak.vllm"),
            ):
                name = program if servers == 1 else f"{program}-{number}"
                self._commands[name] = [module]
                self._extra[name] = own
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.starts = 0
        self.launch_kind = ""
        self.set_conditions({})
        threading.Thread(target=self._keep_running, daemon=True).start()

    def set_conditions(self, conditions: dict[str, Any]) -> None:
        """Sets the conditions that `site/sitecustomize.py` reads."""
        staged = self.conditions.with_suffix(".new")
        staged.write_text(json.dumps(conditions))
        staged.replace(self.conditions)

    def launch(self, kind: str) -> None:
        """Start the trainer with TANDEM_LAUNCH=`kind`."""
        with self._lock:
            self._commands["up"] = ["tandem", "up", "--role", "trainer"]
            self._extra["up"] = {"TANDEM_LAUNCH": kind}
            self.launch_kind = kind

    def stop(self, name: str, seconds: float) -> list[str]:
        """Sends SIGTERM. Returns a violation if the program does not end within `seconds`."""
        with self._lock:
            self._commands.pop(name, None)
            process = self._running.pop(name, None)
        if process is None:
            return []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return [f"{name} did not end within {seconds:.0f} s of SIGTERM"]
        return []

    def _keep_running(self) -> None:
        while not self._closed.wait(RESTART_SECONDS):
            with self._lock:
                for name, words in self._commands.items():
                    if name not in self._running or self._running[name].poll() is not None:
                        self._running[name] = self._start(name, words)

    def _start(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        self.starts += 1
        with (self.logs / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                env=self._environment | self._extra.get(name, {}),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def sweep(self, done: Callable[[], bool]) -> None:
        """Run a runner until `done` is true, for at most a minute. A runner sweeps at its start.
        The trainer must be stopped."""
        environment = self._environment | {"TANDEM_LAUNCH": "torchrun", "TANDEM_EXECUTOR": "local"}
        environment |= {"TANDEM_TRAINER_HOSTS": "1", "TANDEM_TRAINER_RANKS": "1"}
        with (self.logs / "sweep.log").open("ab") as log:
            runner = subprocess.Popen(
                [sys.executable, "-m", "tandem.trainer.runner"],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=REPOSITORY,
            )
        end = time.monotonic() + 60
        while not done() and time.monotonic() < end:
            time.sleep(0.1)
        runner.send_signal(signal.SIGTERM)
        runner.wait(90)

    def victims(self) -> list[Victim]:
        """All living processes of the soak's programs."""
        mark, found = f"TANDEM_ROOT={self.root}".encode(), {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError, IndexError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                module = words[words.index("-m") + 1] if "-m" in words else ""
                if module not in _MODULES or mark not in (entry / "environ").read_bytes().split(
                    b"\0"
                ):
                    continue
                fields = _stat(int(entry.name))
                if fields[0] not in "ZX":
                    found[int(entry.name)] = (_MODULES[module], int(fields[1]), fields[19])
        return [
            Victim(self._program(pid, found), pid, started)
            for pid, (_, _, started) in found.items()
        ]

    def _program(self, pid: int, found: dict[int, tuple[str, int, str]]) -> str:
        """The program of a process. The fork server's children (leaders) and their children (ranks)
        have the fork server's command line."""
        program, parent, _ = found[pid]
        depth = 0
        while program == "forkserver" and found.get(parent, ("",))[0] == "forkserver":
            depth, parent = depth + 1, found[parent][1]
        return (
            ("forkserver", "leader", "rank")[min(depth, 2)] if program == "forkserver" else program
        )

    def close(self, seconds: float = 90) -> list[str]:
        """Stop everything. Returns a violation for each program that does not end."""
        problems = [problem for name in list(self._running) for problem in self.stop(name, seconds)]
        self._closed.set()
        return problems

    def keep_evidence(self) -> Path:
        """Copies the spool beside the logs. Returns the directory that has the copy and the
        logs."""
        shutil.copytree(
            self.root, self.work / "spool", ignore=shutil.ignore_patterns("soak-junk-filler")
        )
        return self.work
