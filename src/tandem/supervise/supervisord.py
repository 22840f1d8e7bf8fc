"""supervisord: its configuration file, how its programs are, and why one of them ended."""

import os
import re
import sys
import xmlrpc.client
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tandem.config import Settings
from tandem.supervise.programs import Program
from tandem.system.environment import current_role, runtime_dir
from tandem.system.tail import last_lines

_NO_ANSWER = (OSError, xmlrpc.client.Error, HTTPException)


@dataclass(frozen=True)
class Status:
    """How one program is, as supervisord reports it."""

    state: str  # STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, STOPPED
    pid: int  # 0: not running
    started: float  # Unix seconds, of its last process


def socket_path(directory: Path) -> Path:
    return directory / "supervisor.sock"


def log_path(logs: Path, program: str) -> Path:
    return logs / f"{program}.log"


def write_config(directory: Path, logs: Path, programs: Sequence[Program]) -> Path:
    """Write supervisord.conf: `programs` start in their order, and stop in the opposite one. It holds no secrets: the
    programs get those through supervisord's environment."""
    text = f"""\
[supervisord]
silent = true
pidfile = {directory}/supervisord.pid
childlogdir = {logs}
logfile = {log_path(logs, "supervisord")}
logfile_maxbytes = 10MB
logfile_backups = 1
{"user = root" if os.getuid() == 0 else ""}
[unix_http_server]
file = {socket_path(directory)}
chmod = 0700
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
    for priority, program in enumerate(programs):
        # killasgroup: vLLM's engine stays in its server's process group, and would keep the GPU of a killed server.
        text += f"""
[program:{program.name}]
command = "{sys.executable}" -m {program.module}
priority = {priority}
autorestart = true
stopwaitsecs = {program.stop_seconds}
killasgroup = true
redirect_stderr = true
stdout_logfile = {log_path(logs, program.name)}
stdout_logfile_maxbytes = 10MB
stdout_logfile_backups = 1
"""
    path = directory / "supervisord.conf"
    path.write_text(text.replace("%", "%%"))  # supervisord expands `%(name)s`
    return path


def how_it_ended(logs: Path, program: str) -> str:
    """How supervisord's log describes a program's last end: "exit status 1", "terminated by SIGKILL".

    supervisord itself has forgotten it as soon as it starts the program again.
    """
    pattern = rf"(?:exited|stopped): {re.escape(program)} \(([^;\n]+?)(?:; .*)?\)$"
    ends = re.findall(pattern, last_lines(log_path(logs, "supervisord")), re.MULTILINE)
    return str(ends[-1]) if ends else "for a reason that supervisord's log does not hold"


def statuses(settings: Settings) -> dict[str, Status]:
    """How the programs of this role's `tandem up` are, by name; empty when supervisord doesn't answer."""
    with suppress(*_NO_ANSWER), _rpc(settings) as supervisor:
        answers: list[dict[str, Any]] = supervisor.getAllProcessInfo()
        return {answer["name"]: Status(answer["statename"], answer["pid"], answer["start"]) for answer in answers}
    return {}


def start_again(settings: Settings, program: str) -> None:
    """Have supervisord start a program that it gave up. Does nothing where it can't, or doesn't answer."""
    with suppress(*_NO_ANSWER), _rpc(settings) as supervisor:
        supervisor.startProcess(program, False)


@contextmanager
def _rpc(settings: Settings) -> Iterator[Any]:
    path = socket_path(runtime_dir(settings.root, current_role()))
    if not path.exists():
        raise FileNotFoundError(path)
    from supervisor.childutils import getRPCInterface  # late: not installed where no supervisord runs

    with getRPCInterface({"SUPERVISOR_SERVER_URL": f"unix://{path}"}) as server:
        yield server.supervisor
