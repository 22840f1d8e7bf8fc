"""`tandem up`: the programs of one container, or of all three on one machine, under one supervisord in the foreground.

supervisord restarts what crashes. It would do so for ever, and it exits with 0 whatever happened to its programs, so
this process watches over it and says with its own exit status how it ended:

     0  stopped by Ctrl-C or SIGTERM
    70  an essential program could not be started
    71  an essential program crashed more than CRASHES times in a row, each within STEADY_SECONDS
    72  supervisord itself ended

Whatever the way, nothing it started is left running after at most `supervisord.stop_seconds()` more. It may be the
first process of a container, or have an init before it: it adopts and reaps what loses its parent.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, TandemError
from tandem.spool import Spool
from tandem.supervise import supervisord
from tandem.supervise.console import Console
from tandem.supervise.supervisord import Program, Role, Status
from tandem.supervise.watchdog import Watchdog
from tandem.system import environment, gpu_links, liveness, ports, processes

EXIT_FATAL, EXIT_CRASH_LOOP, EXIT_SUPERVISOR = 70, 71, 72
CRASHES = 8
STEADY_SECONDS = 600.0
"""A program that ran this long before it crashed is not in a crash loop: its count starts again."""
TRY_AGAIN_SECONDS = 30.0
"""How often a program that is not essential is tried again after supervisord gave it up."""
_POLL_SECONDS = 0.25


class NotReady(TandemError):
    """The stack did not become ready in time, or is not running."""

    code = "not_ready"
    http_status = 503
    retriable = True


def up(settings: Settings, role: Role = "all", programs: Sequence[Program] | None = None) -> int:
    """Run the programs of `role` until Ctrl-C, SIGTERM or a crash loop; the exit status (see above). In a process of
    its own: all its descendants are ended with the stack.

    Raises InvalidInput, Conflict (a port is taken, or this role runs on this spool already) or SpoolUnusable before
    anything is started.
    """
    if find_spec("supervisor") is None:
        raise InvalidInput("supervisor is not installed; install tandem-rl[cpu] or tandem-rl[gpu]")
    if role != "all":
        # Containers of one group share the volume, whatever their users.
        os.umask(0o002)
    programs = supervisord.programs(role) if programs is None else programs
    root = Spool.create(settings.root).root
    if any(program.name == "vllm" for program in programs):
        settings.model_path()
    directory = supervisord.runtime_dir(root, role)
    logs = supervisord.logs_dir(settings, role)
    logs.mkdir(exist_ok=True, parents=True)
    console = Console(logs, [program.name for program in programs], as_json=settings.log_format == "json")
    with ExitStack() as held:
        held.enter_context(_only_one(directory, root))
        for program in programs:
            if program.port is None:
                continue
            host, port = (getattr(settings, f"{program.port}_{what}") for what in ("host", "port"))
            try:
                held.enter_context(ports.reserve(port, host=host, name=f"{program.port}_port"))
            except Conflict as error:
                if program.essential:
                    raise
                console.say(f"{program.name} has to wait: {error}")
        return _Stack(settings, role, directory, logs, programs, console).run()


def wait_ready(settings: Settings, timeout: float) -> float:
    """Wait until a `tandem up` of everything takes requests, its vLLM answers and its runner runs; the seconds it took.

    Raises NotReady, naming what is missing, after `timeout` seconds.
    """
    begin = time.monotonic()
    while missing := _missing(settings, supervisord.programs("all"), supervisord.statuses(settings, "all")):
        if time.monotonic() - begin > timeout:
            raise NotReady(
                f"not ready after {timeout:.0f} s: {', '.join(missing)}; see {supervisord.logs_dir(settings, 'all')}"
            )
        time.sleep(0.5)
    return time.monotonic() - begin


def _missing(settings: Settings, programs: Sequence[Program], statuses: dict[str, Status]) -> list[str]:
    if not statuses:
        return ["`tandem up` is not running on this spool"]
    essential = {program.name for program in programs if program.essential}
    missing = [
        f"{name} is {status.state}"
        for name, status in statuses.items()
        if name in essential and status.state != "RUNNING"
    ]
    urls = {
        "controller": f"http://{settings.controller_host}:{settings.controller_port}/readyz",
        "vllm": f"{settings.resolved_inference_url}/health",
    }
    return missing + [
        f"{name} does not answer at {url}" for name, url in urls.items() if name in statuses and not _answers(url)
    ]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url.replace("//0.0.0.0", "//127.0.0.1"), timeout=3).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _only_one(directory: Path, root: Path) -> Iterator[None]:
    """One `tandem up` per spool and role; the kernel frees the lock when this process dies."""
    with (directory / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"`tandem up` runs on {root} already; stop that one first", field="TANDEM_ROOT") from None
        yield


@dataclass
class _Life:
    """What is known of a program's present and past processes."""

    pid: int = 0
    since: float = 0.0
    crashes: int = 0  # in a row, without a steady life between
    tried: float | None = None  # when supervisord was last asked to try again what it gave up


class _Stack:
    def __init__(
        self, settings: Settings, role: Role, directory: Path, logs: Path, programs: Sequence[Program], console: Console
    ) -> None:
        self._programs = {program.name: program for program in programs}
        self._settings = settings
        self._role: Role = role
        self._directory = directory
        self._logs = logs
        self._console = console
        self._say = console.say
        self._signals = 0
        self._lives = {program.name: _Life() for program in programs}
        # vLLM's admin routes are never open; who started the stack doesn't need to know this one.
        self._token = settings.secret("admin_token") or secrets.token_urlsafe(32)
        self._watchdog = Watchdog(settings, self._token) if "vllm" in self._programs else None
        self._config = supervisord.write_config(directory, logs, programs)
        # Of a `tandem up` that was killed.
        for left in (supervisord.socket_path(directory), *directory.glob("*.alive")):
            left.unlink(missing_ok=True)

    def run(self) -> int:
        processes.adopt_orphans()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        daemon = self._start()
        self._say(f"starting {', '.join(self._lives)}; logs are in {self._logs}")
        if self._role != "all" and (path := gpu_links.describe(self._settings, self._role)):
            self._say(path)
        code = 0
        try:
            if self._watchdog is not None:
                self._watchdog.start()
            code = self._watch(daemon)
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
            self._stop(daemon)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return code

    def _watch(self, daemon: subprocess.Popen[bytes]) -> int:
        begin = time.monotonic()
        next_probe, ready = begin, False
        while not self._signals:
            liveness.beat("up", self._directory)
            self._console.follow()
            processes.reap_orphans([daemon.pid])
            if daemon.poll() is not None:
                self._say(f"supervisord ended with {processes.describe_exit(daemon.returncode)}")
                return EXIT_SUPERVISOR
            statuses = supervisord.statuses(self._settings, self._role)
            if code := self._check(statuses):
                return code
            self._end_what_stalls(statuses)
            if not ready and time.monotonic() > next_probe:
                next_probe = time.monotonic() + 1
                if ready := not _missing(self._settings, list(self._programs.values()), statuses):
                    self._say(f"ready after {time.monotonic() - begin:.0f} s; {self._addresses()}")
            time.sleep(_POLL_SECONDS)
        return 0

    def _start(self) -> subprocess.Popen[bytes]:
        variables = os.environ | environment.of(self._settings)
        variables |= {"PYTHONUNBUFFERED": "1", "TANDEM_ROLE": self._role, liveness.VARIABLE: str(self._directory)}
        if self._settings.secret("admin_token") is None:
            variables["TANDEM_ADMIN_TOKEN"] = self._token
        parent = os.getpid()
        with (self._logs / "supervisord.out").open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(self._config)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Ctrl-C reaches this process only; supervisord stops the programs in their order when it is told to,
                # which the kernel does if this process is killed.
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def _check(self, statuses: dict[str, Status]) -> int:
        """Count crashes; the exit status if this can't go on, else 0."""
        now = time.monotonic()
        for name, status in statuses.items():
            life, essential = self._lives[name], self._programs[name].essential
            if status.state == "FATAL":
                if life.tried is None:
                    self._say(f"{name} can't be started; the end of its log:\n{self._console.end_of_log(name)}")
                if essential:
                    return EXIT_FATAL
                if life.tried is None or now - life.tried > TRY_AGAIN_SECONDS:
                    life.tried = now
                    supervisord.start_again(self._settings, self._role, name)
            elif status.state == "RUNNING":
                life.tried = None
            if status.pid == life.pid:
                continue
            if life.pid:
                life.crashes = 1 if now - life.since > STEADY_SECONDS else life.crashes + 1
                if essential or life.crashes <= CRASHES:
                    self._say(f"{name} (pid {life.pid}) ended: {supervisord.how_it_ended(self._logs, name)}; "
                              f"crash {life.crashes} of {CRASHES} at most; it is started again")  # fmt: skip
                if life.crashes == CRASHES + 1:
                    self._say(f"{name} crashes again and again; the end of its log:\n{self._console.end_of_log(name)}")
                if essential and life.crashes > CRASHES:
                    return EXIT_CRASH_LOOP
            life.pid, life.since = status.pid, now
        return 0

    def _end_what_stalls(self, statuses: dict[str, Status]) -> None:
        if self._watchdog is None:
            return
        status = statuses.get("vllm")
        self._watchdog.watch(processes.read(status.pid) if status is not None and status.pid else None)
        stall = self._watchdog.take()
        if stall is not None:
            pid = stall.life[0]
            self._say(f"vllm (pid {pid}) has stalled: {stall.why}; killing it")
            with suppress(ProcessLookupError):
                # supervisord made it the leader of a group, which its engine belongs to.
                os.killpg(pid, signal.SIGKILL)

    def _stop(self, daemon: subprocess.Popen[bytes]) -> None:
        self._say("stopping; once more Ctrl-C kills")
        before = self._signals
        end = time.monotonic() + supervisord.supervisord_seconds(list(self._programs.values()))
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
        while daemon.poll() is None and time.monotonic() < end and self._signals <= max(before, 1):
            self._console.follow()
            time.sleep(0.1)
        # All descendants, supervisord or none: if it was killed, its programs are this process's children now.
        left = processes.descendants(os.getpid())
        if daemon.poll() is not None and left:
            for process in left:
                processes.send(process, signal.SIGTERM)
            self._wait_gone(3.0)
        processes.kill_all(lambda: processes.descendants(os.getpid()), timeout=10, known=[daemon.pid])
        daemon.poll()
        self._console.follow()
        self._say("stopped")

    def _wait_gone(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            processes.reap_orphans()
            if not processes.descendants(os.getpid()):
                return
            time.sleep(0.1)

    def _on_signal(self, *_: object) -> None:
        self._signals += 1

    def _addresses(self) -> str:
        settings, found = self._settings, []
        if "controller" in self._programs:
            found.append(f"jobs at http://{settings.controller_host}:{settings.controller_port}")
        if "vllm" in self._programs:
            found.append(f"sampling at {settings.resolved_inference_url}/v1")
        if "exporter" in self._programs:
            found.append(f"metrics at http://{settings.metrics_host}:{settings.metrics_port}/metrics")
        return ", ".join(found)
