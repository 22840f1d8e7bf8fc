"""supervisord: which programs each role has, its configuration file, and asking it how they are."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
import tempfile
import xmlrpc.client
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, get_args

from tandem.config import Settings
from tandem.errors import SpoolUnusable
from tandem.system.tail import last_lines

# A socket's address holds 107 bytes. Ours takes up to 57 of them: the directory's name, the socket's, and the pid that
# supervisord appends until it listens.
_LONGEST_PARENT = 50

Role = Literal["all", "trainer", "inference"]
"""Whose programs run under one supervisord: one container's, or everything on one machine."""


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    priority: int  # started in this order, stopped in the opposite one
    stop_seconds: int  # between SIGTERM and SIGKILL
    essential: bool = True  # the others may fail again and again without ending anything
    port: Literal["controller", "inference", "metrics"] | None = None  # it listens on settings.<port>_port


_EXPORTER = Program("exporter", "tandem.metrics.exporter", 50, 5, essential=False, port="metrics")
_CONTROLLER = Program("controller", "tandem.controller", 100, 8, port="controller")
_VLLM = Program("vllm", "tandem.inference.server.serve", 200, 20, port="inference")
_PUBLISHER = Program("publisher", "tandem.inference.publisher", 300, 8)
# It stops its ranks, puts the job back, and wakes a vLLM that shares its GPUs; its own bound is
# tandem.trainer.runner.loop.STOP_SECONDS.
_RUNNER = Program("runner", "tandem.trainer.runner", 400, 61)
_PROGRAMS: dict[Role, tuple[Program, ...]] = {
    "all": (_EXPORTER, _CONTROLLER, _VLLM, _PUBLISHER, _RUNNER),
    "trainer": (_EXPORTER, _RUNNER),
    "inference": (_EXPORTER, _VLLM, _PUBLISHER),
}
LEFTOVERS_SECONDS = 13
"""For what supervisord leaves, or where it doesn't end itself."""


def programs(role: Role) -> tuple[Program, ...]:
    """The programs of a container, in the order they are started."""
    return _PROGRAMS[role]


def stop_seconds(of: Sequence[Program]) -> int:
    """Bound between SIGTERM and the end of `tandem up`: supervisord stops its programs one after another."""
    return supervisord_seconds(of) + LEFTOVERS_SECONDS


def supervisord_seconds(of: Sequence[Program]) -> int:
    """The part of `stop_seconds` that supervisord gets: its programs' sum, and a margin."""
    return sum(program.stop_seconds for program in of) + 8


def current_role() -> Role:
    """TANDEM_ROLE, as `tandem up` sets it for its programs and the images for everything in them; else "all"."""
    role = os.environ.get("TANDEM_ROLE")
    return next((known for known in get_args(Role) if known == role), "all")


@dataclass(frozen=True)
class Status:
    """Of one program, as supervisord sees it."""

    name: str
    state: str  # STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, STOPPED
    pid: int  # 0: not running


def logs_dir(settings: Settings, role: Role) -> Path:
    """Where the programs' logs are; two roles that share a root don't share their logs."""
    if settings.log_dir is not None:
        return settings.log_dir
    return settings.root / "logs" if role == "all" else settings.root / "logs" / role


def runtime_dir(root: Path, role: Role) -> Path:
    """Where this user keeps socket, lock and configuration of the stack on `root`: 0700, on this machine (a socket
    can't lie on a network volume). Raises SpoolUnusable if somebody else owns it."""
    parents = [Path(value) for value in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if value]
    parent = next((path for path in parents if path.is_dir() and len(str(path)) <= _LONGEST_PARENT), Path("/tmp"))
    key = hashlib.sha256(f"{root.absolute()} {role}".encode()).hexdigest()[:12]
    directory = parent / f"tandem-{os.getuid()}-{key}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SpoolUnusable(f"{directory} is not a directory of this user alone; remove it")
    return directory


def write_config(directory: Path, logs: Path, of: Sequence[Program]) -> Path:
    """Write supervisord.conf. It holds no secrets: those reach the programs through supervisord's environment."""
    limits = {"maxbytes": "10MB", "backups": "1"}
    sections = {
        "supervisord": {
            "nodaemon": "true",
            "logfile": _escaped(log_path(logs, "supervisord")),
            **{f"logfile_{key}": value for key, value in limits.items()},
            "silent": "true",
            "pidfile": _escaped(directory / "supervisord.pid"),
            "childlogdir": _escaped(logs),
            **({"user": "root"} if os.getuid() == 0 else {}),
        },
        "unix_http_server": {"file": _escaped(socket_path(directory)), "chmod": "0700"},
        "rpcinterface:supervisor": {
            "supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"
        },
        "supervisorctl": {"serverurl": f"unix://{_escaped(socket_path(directory))}"},
    }
    for program in of:
        sections[f"program:{program.name}"] = {
            "command": f'"{_escaped(sys.executable)}" -m {program.module}',
            "priority": str(program.priority),
            "autorestart": "true",
            "startsecs": "1",
            "startretries": "3",
            "stopsignal": "TERM",
            "stopwaitsecs": str(program.stop_seconds),
            # vLLM's engine stays in the server's process group, and would keep the GPU if only the server was killed.
            "killasgroup": "true",
            "redirect_stderr": "true",
            "stdout_logfile": _escaped(log_path(logs, program.name)),
            **{f"stdout_logfile_{key}": value for key, value in limits.items()},
        }
    text = "".join(
        f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in options.items()) + "\n"
        for name, options in sections.items()
    )
    path = directory / "supervisord.conf"
    path.write_text(text)
    return path


def socket_path(directory: Path) -> Path:
    return directory / "supervisor.sock"


def log_path(logs: Path, program: str) -> Path:
    return logs / f"{program}.log"


def how_it_ended(logs: Path, program: str) -> str:
    """What supervisord's log says of its last end: "exit status 1", "terminated by SIGKILL", or that it says nothing.

    Asked over its socket, supervisord has forgotten as soon as it starts the program again.
    """
    pattern = rf"(?:exited|stopped): {re.escape(program)} \(([^;\n]+?)(?:; .*)?\)$"
    ends = re.findall(pattern, last_lines(log_path(logs, "supervisord")), re.MULTILINE)
    return str(ends[-1]) if ends else "for a reason that supervisord's log does not hold"


def _escaped(value: object) -> str:
    """supervisord expands `%(name)s`."""
    return str(value).replace("%", "%%")


def statuses(settings: Settings, role: Role | None = None) -> dict[str, Status]:
    """How the programs of this spool's `tandem up` are; empty when supervisord doesn't answer. `role`: whose, by
    default the one this process belongs to."""
    try:
        with _supervisor(settings, role or current_role()) as supervisor:
            answers: list[dict[str, Any]] = supervisor.getAllProcessInfo()
    except (OSError, xmlrpc.client.Error, HTTPException):
        return {}
    return {answer["name"]: Status(answer["name"], answer["statename"], answer["pid"]) for answer in answers}


def start_again(settings: Settings, role: Role, program: str) -> None:
    """Have supervisord try a program that it gave up. Nothing happens where it can't, or doesn't answer."""
    with suppress(OSError, xmlrpc.client.Error, HTTPException), _supervisor(settings, role) as supervisor:
        supervisor.startProcess(program, False)


@contextmanager
def _supervisor(settings: Settings, role: Role) -> Iterator[Any]:
    path = socket_path(runtime_dir(settings.root, role))
    if not path.exists():
        raise FileNotFoundError(path)
    from supervisor.xmlrpc import SupervisorTransport

    # The address is a placeholder: the transport connects to the socket.
    transport = SupervisorTransport(None, None, f"unix://{path}")
    server: Any = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
    try:
        yield server.supervisor
    finally:
        transport.close()
