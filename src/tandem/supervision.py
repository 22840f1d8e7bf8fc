"""supervisord for one machine: which programs there are, its configuration file, and asking it how they are."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
import xmlrpc.client
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tandem.config import Settings
from tandem.errors import SpoolUnusable

# A socket's address holds 107 bytes; the name of ours and the directory's take up to 40.
_LONGEST_PARENT = 60


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    priority: int  # started in this order, stopped in the opposite one
    stop_seconds: int  # between SIGTERM and SIGKILL


PROGRAMS = (
    Program("controller", "tandem.controller", 100, 8),
    Program("vllm", "tandem.inference.serve", 200, 20),
    Program("publisher", "tandem.inference.publisher", 300, 8),
    # It stops its ranks and puts the job back; its own bound is tandem.trainer.runner.STOP_SECONDS.
    Program("runner", "tandem.trainer.runner", 400, 36),
)


def stop_seconds(programs: Sequence[Program] = PROGRAMS) -> int:
    """supervisord stops its programs one after another, so the whole takes at most the sum, and a margin."""
    return sum(program.stop_seconds for program in programs) + 8


@dataclass(frozen=True)
class Status:
    """Of one program, as supervisord sees it."""

    name: str
    state: str  # STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, STOPPED
    pid: int  # 0: not running
    exit_status: int


def runtime_dir(root: Path) -> Path:
    """Where this user keeps socket, lock and configuration of the stack on `root`: 0700, on this machine (a socket
    can't lie on a network volume). Raises SpoolUnusable if somebody else owns it."""
    parents = [Path(value) for value in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if value]
    parent = next((path for path in parents if path.is_dir() and len(str(path)) <= _LONGEST_PARENT), Path("/tmp"))
    directory = parent / f"tandem-{os.getuid()}-{hashlib.sha256(str(root.absolute()).encode()).hexdigest()[:12]}"
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SpoolUnusable(f"{directory} is not a directory of this user alone; remove it")
    return directory


def write_config(directory: Path, logs: Path, programs: Sequence[Program] = PROGRAMS) -> Path:
    """Write supervisord.conf. It holds no secrets: those reach the programs through supervisord's environment."""
    sections = {
        "supervisord": {
            "nodaemon": "true",
            "logfile": _escaped(logs / "supervisord.log"),
            "logfile_maxbytes": "10MB",
            "logfile_backups": "1",
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
    for program in programs:
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
            "stdout_logfile_maxbytes": "50MB",
            "stdout_logfile_backups": "2",
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


def _escaped(value: object) -> str:
    """supervisord expands `%(name)s`."""
    return str(value).replace("%", "%%")


def statuses(settings: Settings) -> dict[str, Status]:
    """How the programs of this spool's `tandem up` are; empty when supervisord doesn't answer."""
    path = socket_path(runtime_dir(settings.root))
    if not path.exists():
        return {}
    from supervisor.xmlrpc import SupervisorTransport

    # The address is a placeholder: the transport connects to the socket.
    transport = SupervisorTransport(None, None, f"unix://{path}")
    server: Any = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
    try:
        answers: list[dict[str, Any]] = server.supervisor.getAllProcessInfo()
    except (OSError, xmlrpc.client.Error, HTTPException):
        return {}
    finally:
        transport.close()
    return {
        answer["name"]: Status(answer["name"], answer["statename"], answer["pid"], answer["exitstatus"])
        for answer in answers
    }
