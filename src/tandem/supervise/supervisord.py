"""Lists the programs of each role, writes supervisord's configuration, prints the programs' logs,
and finds the programs' states and how they ended."""

import json
import os
import re
import sys
import xmlrpc.client
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.system import liveness
from tandem.system.environment import current_role, runtime_dir
from tandem.system.gpus import Devices
from tandem.system.logs import json_line
from tandem.system.nvml import DriverFailed
from tandem.system.ports import local_url
from tandem.system.tail import Tail, last_lines

_COLOURS = {
    "controller": "36",
    "vllm": "35",
    "publisher": "33",
    "proxy": "31",
    "runner": "32",
    "exporter": "34",
    "up": "1",
}
_NO_ANSWER = (OSError, xmlrpc.client.Error, HTTPException)


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    stop_seconds: int  # seconds between SIGTERM and SIGKILL
    # a program that is not essential may fail repeatedly without ending `tandem up`
    essential: bool = True
    # whether a restart is costly, because the program's state takes minutes to build
    costly: bool = False
    # The program listens on the port `number`. If `number` is None, it listens on the port
    # settings.<port>_port.
    port: Literal["controller", "inference", "metrics"] | None = None
    number: int | None = None
    environment: tuple[tuple[str, str], ...] = ()  # variables in addition to supervisord's own

    @property
    def kind(self) -> str:
        return liveness.program_kind(self.name)


_EXPORTER = Program("exporter", "tandem.metrics.exporter", 5, essential=False, port="metrics")
_CONTROLLER = Program("controller", "tandem.controller", 8, port="controller")
_VLLM = Program("vllm", "tandem.inference.server.serve", 20, costly=True, port="inference")
# The proxy listens on the common address of several inference servers.
_PROXY = Program("proxy", "tandem.supervise.proxy", 5, port="inference")
_PUBLISHER = Program("publisher", "tandem.inference.publisher", 8)
# After SIGTERM, the runner stops its ranks, puts the job back into the queue, and gives shared GPUs
# back. The runner needs at most tandem.trainer.runner.loop.STOP_SECONDS to stop. The runner does
# not contact vLLM, so it gets neither vLLM's address nor the admin token.
_RUNNER = Program(
    "runner",
    "tandem.trainer.runner",
    61,
    costly=True,
    environment=tuple(
        (f"TANDEM_{name}", "") for name in ("ADMIN_TOKEN", "ADMIN_TOKEN_FILE", "INFERENCE_URL")
    ),
)
PROGRAMS: dict[str, tuple[Program, ...]] = {
    "all": (_EXPORTER, _CONTROLLER, _VLLM, _PUBLISHER, _RUNNER),
    "trainer": (_EXPORTER, _RUNNER),
    "inference": (_EXPORTER, _VLLM, _PUBLISHER),
}
"""The programs of each role, in the order in which they start."""
_LEFTOVER_SECONDS = 13


def programs_of(settings: Settings, role: str) -> tuple[Program, ...]:
    """The programs of a role. If there are several inference servers, each server is a pair of a
    vLLM and a publisher, and a proxy is in front of all pairs. With TANDEM_REPLICA, this machine
    runs only one pair of a vLLM and a publisher. Raises InvalidInput if there are not enough GPUs
    for the servers."""
    programs = PROGRAMS.get(role, PROGRAMS["all"])
    if settings.local_replicas == 1 or _VLLM not in programs:
        return programs
    several = [_PROXY]
    for number, variables in enumerate(replica_variables(settings)):
        of = tuple(variables.items())
        port = int(variables["TANDEM_INFERENCE_PORT"])
        several += [
            replace(_VLLM, name=f"vllm-{number}", number=port, environment=of),
            replace(_PUBLISHER, name=f"publisher-{number}", environment=of),
        ]
    at = programs.index(_VLLM)
    return (*programs[:at], *several, *(p for p in programs[at:] if p not in (_VLLM, _PUBLISHER)))


def inference_ports(settings: Settings) -> dict[str, int]:
    """The port of each inference server of this machine, by the server's name. A single server has
    the name in TANDEM_REPLICA, or an empty name if TANDEM_REPLICA is not set."""
    first = settings.inference_port
    if settings.local_replicas == 1:
        return {settings.replica or "": first}
    return {str(number): first + 1 + number for number in range(settings.local_replicas)}


def replica_variables(settings: Settings) -> list[dict[str, str]]:
    """The environment variables of each inference server, if this machine has several servers.
    Raises InvalidInput if there are too few GPUs for the servers."""
    count, each = settings.local_replicas, settings.inference_tensor_parallel
    try:
        gpus = Devices(settings, "inference").uuids
    except DriverFailed:
        gpus = ()  # vLLM reports the error when it starts
    if gpus and len(gpus) < count * each:
        raise InvalidInput(
            f"{count} inference servers of {each} GPUs need {count * each}, and there are"
            f" {len(gpus)}; set TANDEM_INFERENCE_DEVICES, or fewer replicas",
            field="TANDEM_INFERENCE_REPLICAS",
        )
    variables = []
    for number, (name, port) in enumerate(inference_ports(settings).items()):
        own = {
            "TANDEM_REPLICA": name,
            "TANDEM_INFERENCE_PORT": str(port),
            "TANDEM_INFERENCE_URL": local_url(settings.inference_host, port),
            liveness.NAME_VARIABLE: f"publisher-{name}",
        }
        if gpus:
            own["TANDEM_INFERENCE_DEVICES"] = ",".join(gpus[number * each : (number + 1) * each])
        variables.append(own)
    return variables


def supervisord_seconds(programs: Sequence[Program]) -> int:
    """The longest time, in seconds, that supervisord takes to stop its programs. The kinds of
    programs stop one after another, and all programs of a kind stop at the same time."""
    return sum(max(p.stop_seconds for p in of) for of in _by_kind(programs).values()) + 8


def stop_seconds(programs: Sequence[Program]) -> int:
    """The longest time, in seconds, between SIGTERM and the end of `tandem up`, including the time
    to end processes that supervisord left running."""
    return supervisord_seconds(programs) + _LEFTOVER_SECONDS


def _by_kind(programs: Sequence[Program]) -> dict[str, list[Program]]:
    kinds: dict[str, list[Program]] = {}
    for program in programs:
        kinds.setdefault(program.kind, []).append(program)
    return kinds


@dataclass(frozen=True)
class Status:
    """The state of a program according to supervisord."""

    state: str  # STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, STOPPED
    pid: int  # 0: not running
    started: float  # start of the program's last process, in Unix seconds


def socket_path(directory: Path) -> Path:
    return directory / "supervisor.sock"


def log_path(logs: Path, program: str) -> Path:
    return logs / f"{program}.log"


def write_config(directory: Path, logs: Path, programs: Sequence[Program]) -> Path:
    """Write supervisord.conf, and return its path. The file contains no secrets: programs get
    secrets through supervisord's environment.

    Args:
        directory: the place of supervisord.conf, of supervisord's socket and of its pid file.
        logs: the directory for the programs' logs and supervisord's own log.
        programs: the programs, in the order in which they start. They stop in the opposite order.
            Programs of one kind start and stop together.
    """
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
        # killasgroup kills the whole process group. The engine of vLLM is in the process group of
        # vLLM's server, and would keep the GPU if only the server was killed.
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
environment = {",".join(f'{name}="{value}"' for name, value in program.environment)}
"""
    for kind, of in _by_kind(programs).items():
        text += f"""
[group:{kind}]
programs = {",".join(program.name for program in of)}
priority = {programs.index(of[0])}
"""
    path = directory / "supervisord.conf"
    path.write_text(text.replace("%", "%%"))  # supervisord expands `%(name)s`
    return path


class Console:
    """Prints programs' logs. Lines that the logs already contain are not printed.

    Args:
        logs: the directory of the logs.
        programs: the programs' names.
        as_json: whether every printed line is a JSON object with a key `program`.
    """

    def __init__(self, logs: Path, programs: Iterable[str], *, as_json: bool) -> None:
        self._as_json = as_json
        self._tails = {name: Tail(log_path(logs, name), from_end=True) for name in programs}

    def follow(self) -> None:
        """Print the lines that the programs have logged since the last call."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                self._print(name, line)

    def say(self, text: str) -> None:
        """Print lines of `tandem up` itself."""
        for line in text.splitlines():
            self._print("up", line)

    def _print(self, program: str, text: str) -> None:
        if self._as_json:
            entry = None
            with suppress(ValueError):
                entry = json.loads(text)
            if not isinstance(entry, dict):
                entry = json.loads(json_line("info", program, text))
            text = json.dumps({"program": program} | entry)
        else:
            before, after = (
                (f"\x1b[{_COLOURS.get(liveness.program_kind(program), '1')}m", "\x1b[0m")
                if sys.stdout.isatty()
                else ("", "")
            )
            text = f"{before}{program:>10} |{after} {text}"
        with suppress(OSError):  # the terminal may be closed; the log files remain
            print(text, flush=True)


def how_it_ended(logs: Path, program: str) -> str:
    """The end of a program's last process as described in supervisord's log, such as "exit status
    1" or "terminated by SIGKILL".

    Only supervisord's log has the exit status. A restart of a program erases its exit status in
    supervisord, and supervisord's events do not contain exit statuses.
    """
    pattern = rf"(?:exited|stopped): {re.escape(program)} \(([^;\n]+?)(?:; .*)?\)$"
    ends = re.findall(pattern, last_lines(log_path(logs, "supervisord")), re.MULTILINE)
    return str(ends[-1]) if ends else "for a reason that supervisord's log does not hold"


def statuses(settings: Settings) -> dict[str, Status]:
    """The state of each program of this role's `tandem up`, by the program's name; empty if
    supervisord doesn't answer."""
    with suppress(*_NO_ANSWER), _rpc(settings) as supervisor:
        answers: list[dict[str, Any]] = supervisor.getAllProcessInfo()
        return {
            answer["name"]: Status(answer["statename"], answer["pid"], answer["start"])
            for answer in answers
        }
    return {}


def start_again(settings: Settings, program: str) -> None:
    """Make supervisord start a program again after supervisord has given up on it. Does nothing if
    supervisord can't do so or doesn't answer."""
    with suppress(*_NO_ANSWER), _rpc(settings) as supervisor:
        supervisor.startProcess(f"{liveness.program_kind(program)}:{program}", False)


@contextmanager
def _rpc(settings: Settings) -> Iterator[Any]:
    path = socket_path(runtime_dir(settings.root, current_role()))
    if not path.exists():
        raise FileNotFoundError(path)
    # The package `supervisor` is imported here, because it is not installed on every machine.
    from supervisor.childutils import getRPCInterface

    with getRPCInterface({"SUPERVISOR_SERVER_URL": f"unix://{path}"}) as server:
        yield server.supervisor
