"""`tandem up`: runs the programs of one container, or the programs of all three containers on one
machine, under one supervisord in the foreground.

supervisord restarts a program that crashes. But supervisord alone would restart a crashing program
for ever, and would exit with 0 whatever happened to its programs. So `tandem up` watches
supervisord, and the exit status of `tandem up` shows how the programs ended:

- 0: Ctrl-C or SIGTERM stopped the programs.
- 70: An essential program could not be started.
- 71: An essential program crashed more than MOST_CRASHES times in a row, each time within
  STEADY_SECONDS.
- 72: supervisord itself ended.

The programs that are costly to restart are vLLM and a runner with its job. A failure of another
program must not destroy the state of vLLM or the runner. Once all programs have been ready, a
failing program therefore does not end `tandem up` with 70 or 71 while another program that is
costly to restart stays up. The failing program is restarted for ever instead.

All processes that `tandem up` started end within `supervisord.stop_seconds()`, in whatever way
`tandem up` ends. If supervisord is killed together with `tandem up`, the next `tandem up` of this
role ends the remaining processes. In a container, `tandem up` may be the first process or the child
of an init process. `tandem up` adopts and reaps processes that lose their parent.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, TandemError
from tandem.spool import Spool
from tandem.spool.locks import LockHeldError, file_lock
from tandem.supervise import health, proxy, supervisord
from tandem.supervise.supervisord import (
    Console,
    Program,
    Status,
    programs_of,
    supervisord_seconds,
)
from tandem.supervise.watchdog import Watchdog
from tandem.system import liveness, ports, processes
from tandem.system.environment import ROLE_VARIABLE, Role, runtime_dir
from tandem.system.gpus import Devices, Side, check_apart, nccl_path
from tandem.system.nvml import DriverFailed
from tandem.system.tail import last_lines

# `tandem up --help` explains these exit statuses.
EXIT_FATAL, EXIT_CRASH_LOOP, EXIT_SUPERVISORD = 70, 71, 72
MOST_CRASHES = 8  # the most crashes in a row of an essential program
STEADY_SECONDS = 600.0
"""A program that has run for this long before a crash is not in a crash loop, so the count of its
crashes starts again."""
TRY_AGAIN_SECONDS = 30.0
"""Seconds between two restarts of a program that is not essential and for which supervisord has
stopped trying."""
LEFTOVER_SECONDS = 3.0
"""The most seconds that the remaining processes of supervisord may take to end."""


def up(settings: Settings, role: Role = "all", programs: Sequence[Program] | None = None) -> int:
    """Run the programs of `role` until Ctrl-C, SIGTERM or a crash loop; returns the exit status.

    Call this function in a separate process, because it changes the process's environment and
    umask, and ends all descendants of the process. Raises InvalidInput, SpoolUnusable or Conflict
    before any program is started. Conflict means that a port is taken, or that this role already
    runs on this spool.

    Args:
        programs: the programs to run; None: the programs of `role` under these settings.
    """
    if find_spec("supervisor") is None:
        raise InvalidInput("supervisor is not installed; install tandem-rl[cpu] or tandem-rl[gpu]")
    # In containers, users of one group share the volume. On a machine with several users, other
    # users must not read runs, prompts and logs.
    os.umask(0o027 if role == "all" else 0o002)
    programs = programs_of(settings, role) if programs is None else programs
    names = {program.kind for program in programs}
    if "proxy" in names:
        proxy.check_installed()
    if {"runner", "vllm"} <= names:
        check_apart(settings)
    sides: tuple[tuple[str, Side], ...] = (("runner", "trainer"), ("vllm", "inference"))
    for of, side in sides:
        # Only the local executor runs its ranks on this host.
        if of in names and (of != "runner" or settings.executor == "local"):
            with suppress(DriverFailed):
                # `Devices` raises InvalidInput if this machine lacks the GPUs.
                Devices(settings, side)
    if "controller" in names:
        settings.check_bind("controller")
    if "vllm" in names:
        settings.check_bind("inference")
    if (
        "vllm" in names
        and (model := Path(settings.model_path())).is_absolute()
        and not model.is_dir()
    ):
        raise InvalidInput(f"there is no directory {model}", field="TANDEM_BASE_MODEL")
    root = Spool.create(settings.root).root
    logs = settings.log_dir or (root / "logs" if role == "all" else root / "logs" / role)
    logs.mkdir(exist_ok=True, parents=True)
    console = Console(
        logs, [program.name for program in programs], as_json=settings.log_format == "json"
    )
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(runtime_dir(root, role) / "lock", blocking=False))
        except LockHeldError:
            raise Conflict(
                f"`tandem up` runs on {root} already; stop that one first", field="TANDEM_ROOT"
            ) from None
        _end_remains(runtime_dir(root, role), supervisord_seconds(programs), console)
        for program in (program for program in programs if program.port):
            host, port = (getattr(settings, f"{program.port}_{part}") for part in ("host", "port"))
            port = program.number or port
            try:
                held.enter_context(ports.reserve(port, host=host, name=f"{program.port}_port"))
            except Conflict as error:
                if program.essential:
                    raise
                console.say(f"{program.name} has to wait: {error}")
        return Stack(settings, role, logs, programs, console).run()


def _end_remains(directory: Path, seconds: float, console: Console) -> None:
    """End the processes that a killed `tandem up` left, because these processes would keep ports
    and the runner's lock. A supervisord that still runs stops its programs within `seconds`.
    Processes that are left after `seconds` are killed."""
    find = partial(processes.marked, liveness.VARIABLE, str(directory))
    if not (left := find()):
        return
    pids = {process.pid for process in left}
    console.say(f"ending what a killed `tandem up` left: pids {sorted(pids)}")
    for process in left:
        if process.parent not in pids:
            processes.send(process, signal.SIGTERM)
    end = time.monotonic() + seconds
    while find() and time.monotonic() < end:
        time.sleep(0.1)
    processes.kill_all(find, timeout=10)


@dataclass
class _Life:
    """A program's current process, and the program's crashes."""

    pid: int = 0
    since: float = 0.0
    # the number of consecutive crashes without a run of STEADY_SECONDS in between
    crashes: int = 0
    # The monotonic time at which `start_again` was last called for the program; None if supervisord
    # has not given the program up.
    tried: float | None = None


class Stack:
    """supervisord and its programs, from their start to the end of the last process.

    Args:
        role: the container that the programs belong to; "all": the whole deployment.
        logs: the directory of the programs' logs.
        programs: the programs that supervisord starts.
        console: prints the programs' logs and the lines of `tandem up` itself.
    """

    def __init__(
        self,
        settings: Settings,
        role: Role,
        logs: Path,
        programs: Sequence[Program],
        console: Console,
    ) -> None:
        self._settings, self._role, self._logs, self._console = settings, role, logs, console
        self._say = console.say
        self._programs = {program.name: program for program in programs}
        self._lives = {program.name: _Life() for program in programs}
        self._directory = runtime_dir(settings.root, role)
        self._signals = 0
        # Whether the stack has been ready at least once.
        self._ready = False
        # vLLM's admin routes always need a token. If no token is configured, a random token is
        # generated, which users don't need to know.
        self._token = settings.secret("admin_token") or secrets.token_urlsafe(32)

    def run(self) -> int:
        processes.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self._daemon = self._start()
        self._say(f"starting {', '.join(self._programs)}; logs are in {self._logs}")
        if self._role != "all" and (path := nccl_path(self._settings, self._role)):
            self._say(path)
        for program in self._programs.values():
            if program.kind == "vllm":
                Watchdog(
                    self._settings, self._token, self._say, program.name, program.number
                ).start()
        try:
            return self._watch()
        finally:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # A `tandem up` that was killed leaves its socket and liveness files behind.
        for stale in (supervisord.socket_path(self._directory), *self._directory.glob("*.alive")):
            stale.unlink(missing_ok=True)
        config = supervisord.write_config(
            self._directory, self._logs, list(self._programs.values())
        )
        # The variables are also set in this process, because `supervisord.statuses` reads the role
        # from the environment to find its supervisord.
        os.environ |= {ROLE_VARIABLE: self._role, liveness.VARIABLE: str(self._directory)}
        variables = {"PYTHONUNBUFFERED": "1"}
        if not self._settings.secret("admin_token"):
            variables["TANDEM_ADMIN_TOKEN"] = self._token
        parent = os.getpid()
        with (self._logs / "supervisord.out").open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(config)],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Ctrl-C reaches only `tandem up`. On SIGTERM, supervisord stops the programs in the
                # opposite order of their start. If `tandem up` is killed, the kernel sends SIGTERM
                # to supervisord.
                start_new_session=True,
                preexec_fn=partial(  # noqa: PLW1509
                    processes.die_with_parent, parent, signal.SIGTERM
                ),
            )

    def _watch(self) -> int:
        begin = time.monotonic()
        next_probe = begin
        while not self._signals:
            liveness.beat("up")
            self._console.follow()
            processes.reap_orphans([self._daemon.pid])
            if self._daemon.poll() is not None:
                self._say(
                    f"supervisord ended with {processes.describe_exit(self._daemon.returncode)}"
                )
                return EXIT_SUPERVISORD
            for name, status in supervisord.statuses(self._settings).items():
                if code := self._check(self._programs[name], status):
                    return code
            if not self._ready and time.monotonic() > next_probe:
                next_probe = time.monotonic() + 1
                with suppress(TandemError, OSError):
                    self._ready = not health.problems(self._settings, self._role)
                if self._ready:
                    self._say(f"ready after {time.monotonic() - begin:.0f} s; {self._addresses()}")
            time.sleep(0.25)
        return 0

    def _check(self, program: Program, status: Status) -> int:
        """Counts a program's crashes. Returns the exit status if the stack must end, and 0 if the
        stack continues."""
        life, now = self._lives[program.name], time.monotonic()
        if status.state == "FATAL":
            if life.tried is None:
                self._say_end_of_log(program, "can't be started")
            if self._ends_stack(program):
                return EXIT_FATAL
            if life.tried is None or now - life.tried > TRY_AGAIN_SECONDS:
                life.tried = now
                supervisord.start_again(self._settings, program.name)
        elif status.state == "RUNNING":
            life.tried = None
        if status.pid != life.pid:
            if life.pid and self._count_crash(program, life):
                return EXIT_CRASH_LOOP
            life.pid, life.since = status.pid, now
        return 0

    def _ends_stack(self, program: Program) -> bool:
        """Whether the stack ends because this program fails to stay up."""
        others = [
            other for other in self._programs.values() if other.costly and other is not program
        ]
        lives = [self._lives[other.name] for other in others]
        # A program that has just crashed and waits for its restart still counts as staying up.
        stays_up = any(life.tried is None and life.crashes <= MOST_CRASHES for life in lives)
        return program.essential and not (self._ready and stays_up)

    def _count_crash(self, program: Program, life: _Life) -> bool:
        """Counts a crash. Returns whether the stack must end because the program has crashed too
        often in a row."""
        life.crashes = 1 if time.monotonic() - life.since > STEADY_SECONDS else life.crashes + 1
        if life.crashes <= MOST_CRASHES + 1:
            how = supervisord.how_it_ended(self._logs, program.name)
            self._say(
                f"{program.name} (pid {life.pid}) ended: {how}; "
                f"crash {life.crashes} of {MOST_CRASHES} in a row; it is started again"
            )
        if life.crashes == MOST_CRASHES + 1:
            self._say_end_of_log(program, "crashes again and again")
        return life.crashes > MOST_CRASHES and self._ends_stack(program)

    def _say_end_of_log(self, program: Program, trouble: str) -> None:
        end = last_lines(supervisord.log_path(self._logs, program.name), lines=30)
        self._say(f"{program.name} {trouble}; the end of its log:\n{end}")

    def _addresses(self) -> str:
        settings = self._settings
        addresses = {
            "controller": (
                f"jobs at {ports.local_url(settings.controller_host, settings.controller_port)}"
            ),
            "vllm": f"sampling at {settings.resolved_inference_url}/v1",
            "proxy": f"sampling at {settings.resolved_inference_url}/v1",
            "exporter": (
                "metrics at"
                f" {ports.local_url(settings.metrics_host, settings.metrics_port)}/metrics"
            ),
        }
        return ", ".join(address for name, address in addresses.items() if name in self._programs)

    def _stop(self) -> None:
        left = partial(processes.descendants, os.getpid())
        self._say("stopping; once more Ctrl-C kills")
        self._daemon.send_signal(signal.SIGTERM)
        most_signals = max(self._signals, 1)
        seconds = supervisord_seconds(list(self._programs.values()))
        self._wait(lambda: self._daemon.poll() is not None, seconds, most_signals)
        if self._daemon.poll() is not None:
            # If supervisord was killed, its programs are now children of this process.
            for process in left():
                processes.send(process, signal.SIGTERM)
            self._wait(lambda: not left(), LEFTOVER_SECONDS, most_signals)
        processes.kill_all(left, timeout=10, known=[self._daemon.pid])
        self._daemon.poll()
        self._console.follow()
        self._say("stopped")

    def _wait(self, done: Callable[[], bool], seconds: float, most_signals: int) -> None:
        end = time.monotonic() + seconds
        while not done() and self._signals <= most_signals and time.monotonic() < end:
            processes.reap_orphans([self._daemon.pid])
            self._console.follow()
            time.sleep(0.1)

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
