"""`tandem up`: the programs of all three containers on one machine, under one supervisord, in the foreground.

supervisord restarts what crashes. It would do so for ever, and it exits with 0 whatever happened to its programs, so
this process watches over it and says with its own exit status how it ended:

     0  stopped by Ctrl-C or SIGTERM
    70  a program could not be started
    71  a program crashed more than CRASHES times in a row, each within STEADY_SECONDS
    72  supervisord itself ended

Whatever the way, nothing it started is left running after at most `supervision.stop_seconds()` more.
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

from tandem import environment, ports, processes, supervision
from tandem.config import Settings
from tandem.errors import Conflict, InvalidInput, TandemError
from tandem.spool import Spool
from tandem.supervision import PROGRAMS, Program, Status
from tandem.tail import Tail, last_lines

EXIT_FATAL, EXIT_CRASH_LOOP, EXIT_SUPERVISOR = 70, 71, 72
CRASHES = 8
STEADY_SECONDS = 600.0
"""A program that ran this long before it crashed is not in a crash loop: its count starts again."""
_POLL_SECONDS = 0.25
_COLOURS = {"controller": "36", "vllm": "35", "publisher": "33", "runner": "32", "up": "1"}


class NotReady(TandemError):
    """The stack did not become ready in time, or is not running."""

    code = "not_ready"
    http_status = 503
    retriable = True


def up(settings: Settings, programs: Sequence[Program] = PROGRAMS) -> int:
    """Run the stack until Ctrl-C, SIGTERM or a crash loop; the exit status (see above). In a process of its own: all
    its descendants are ended with the stack.

    Raises InvalidInput, Conflict (a port is taken, or a stack runs on this spool already) or SpoolUnusable before
    anything is started.
    """
    if find_spec("supervisor") is None:
        raise InvalidInput("supervisor is not installed; install tandem-rl[cpu] or tandem-rl[gpu]")
    root = Spool.create(settings.root).root
    settings.model_path()
    directory = supervision.runtime_dir(root)
    logs = root / "logs"
    logs.mkdir(exist_ok=True)
    with ExitStack() as held:
        held.enter_context(_only_one(directory, root))
        held.enter_context(
            ports.reserve(settings.controller_port, host=settings.controller_host, name="controller_port")
        )
        held.enter_context(ports.reserve(settings.inference_port, host=settings.inference_host, name="inference_port"))
        return _Stack(settings, directory, logs, programs).run()


def wait_ready(settings: Settings, timeout: float) -> float:
    """Wait until the controller takes requests, vLLM answers and the runner runs; the seconds it took.

    Raises NotReady, naming what is missing, after `timeout` seconds.
    """
    begin = time.monotonic()
    while missing := _missing(settings):
        if time.monotonic() - begin > timeout:
            raise NotReady(f"not ready after {timeout:.0f} s: {', '.join(missing)}; see {settings.root / 'logs'}")
        time.sleep(0.5)
    return time.monotonic() - begin


def _missing(settings: Settings) -> list[str]:
    statuses = supervision.statuses(settings)
    if not statuses:
        return ["`tandem up` is not running on this spool"]
    missing = [f"{name} is {status.state}" for name, status in statuses.items() if status.state != "RUNNING"]
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
    """One `tandem up` per spool; the kernel frees the lock when this process dies."""
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


class _Stack:
    def __init__(self, settings: Settings, directory: Path, logs: Path, programs: Sequence[Program]) -> None:
        self._programs = programs
        self._settings = settings
        self._logs = logs
        self._signals = 0
        self._lives = {program.name: _Life() for program in programs}
        self._tails = {
            program.name: Tail(supervision.log_path(logs, program.name), from_end=True) for program in programs
        }
        self._config = supervision.write_config(directory, logs, programs)
        supervision.socket_path(directory).unlink(missing_ok=True)  # of a supervisord that was killed

    def run(self) -> int:
        processes.adopt_orphans()
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        supervisord = self._start()
        begin = time.monotonic()
        self._say(f"starting {', '.join(self._lives)}; logs are in {self._logs}")
        code, ready = 0, False
        try:
            next_probe = begin
            while not self._signals:
                self._print()
                if supervisord.poll() is not None:
                    self._say(f"supervisord ended with {processes.describe_exit(supervisord.returncode)}")
                    code = EXIT_SUPERVISOR
                    break
                code = self._check(supervision.statuses(self._settings))
                if code:
                    break
                if not ready and time.monotonic() > next_probe:
                    next_probe = time.monotonic() + 1
                    if ready := not _missing(self._settings):
                        self._say(f"ready after {time.monotonic() - begin:.0f} s; {self._addresses()}")
                time.sleep(_POLL_SECONDS)
        finally:
            self._stop(supervisord)
            for number, handler in previous.items():
                signal.signal(number, handler)
        return code

    def _start(self) -> subprocess.Popen[bytes]:
        variables = os.environ | environment.of(self._settings) | {"PYTHONUNBUFFERED": "1"}
        if self._settings.secret("admin_token") is None:
            # vLLM's admin routes are never open; who started the stack doesn't need to know this one.
            variables["TANDEM_ADMIN_TOKEN"] = secrets.token_urlsafe(32)
        parent = os.getpid()
        with (self._logs / "supervisord.out").open("ab") as out:
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
            life = self._lives[name]
            if status.state == "FATAL":
                self._say(f"{name} can't be started; the end of its log:\n{self._end_of_log(name)}")
                return EXIT_FATAL
            if status.pid == life.pid:
                continue
            if life.pid:
                life.crashes = 1 if now - life.since > STEADY_SECONDS else life.crashes + 1
                self._say(f"{name} (pid {life.pid}) ended, exit status {status.exit_status}; "
                          f"crash {life.crashes} of {CRASHES} at most; it is started again")  # fmt: skip
                if life.crashes > CRASHES:
                    self._say(f"{name} crashes again and again; the end of its log:\n{self._end_of_log(name)}")
                    return EXIT_CRASH_LOOP
            life.pid, life.since = status.pid, now
        return 0

    def _stop(self, supervisord: subprocess.Popen[bytes]) -> None:
        self._say("stopping; once more Ctrl-C kills")
        before = self._signals
        end = time.monotonic() + supervision.stop_seconds(self._programs)
        if supervisord.poll() is None:
            supervisord.send_signal(signal.SIGTERM)
        while supervisord.poll() is None and time.monotonic() < end and self._signals <= max(before, 1):
            self._print()
            time.sleep(0.1)
        # All descendants, supervisord or none: if it was killed, its programs are this process's children now.
        left = processes.descendants(os.getpid())
        if supervisord.poll() is not None and left:
            for process in left:
                processes.send(process, signal.SIGTERM)
            self._wait_gone(3.0)
        processes.kill_all(lambda: processes.descendants(os.getpid()), timeout=10, known=[supervisord.pid])
        supervisord.poll()
        self._print()
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

    # ---------------------------------------------------------------- the terminal

    def _print(self) -> None:
        for name, tail in self._tails.items():
            for line in tail.lines():
                self._line(name, line)

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            self._line("up", line)

    @staticmethod
    def _line(name: str, text: str) -> None:
        prefix = f"{name:>10} |"
        if sys.stdout.isatty():
            prefix = f"\x1b[{_COLOURS.get(name, '1')}m{prefix}\x1b[0m"
        with suppress(OSError):  # the terminal may be gone; the logs are not
            print(prefix, text, flush=True)

    def _end_of_log(self, name: str) -> str:
        return last_lines(supervision.log_path(self._logs, name), lines=30)

    def _addresses(self) -> str:
        settings = self._settings
        return (
            f"jobs at http://{settings.controller_host}:{settings.controller_port}, "
            f"sampling at {settings.resolved_inference_url}/v1"
        )
