"""supervisord and its programs, from their start to the last process's end.

supervisord restarts a program that crashes. It would do so for ever, and it exits with 0 whatever happened to its
programs, so this process watches over it and reports with its own exit status how the stack ended:

     0  stopped by Ctrl-C or SIGTERM
    70  an essential program could not be started
    71  an essential program crashed more than MOST_CRASHES times in a row, each within STEADY_SECONDS
    72  supervisord itself ended

However it ends, no process that it started is left after at most `programs.stop_seconds()` more. It may be the first
process of a container, or have an init before it: it adopts and reaps processes that lose their parent.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.supervise import health, supervisord
from tandem.supervise.console import Console
from tandem.supervise.programs import Program, supervisord_seconds
from tandem.supervise.supervisord import Status
from tandem.supervise.watchdog import Watchdog
from tandem.system import gpu_links, liveness, processes
from tandem.system.role import ROLE_VARIABLE, Role, runtime_dir
from tandem.system.tail import last_lines

EXIT_FATAL, EXIT_CRASH_LOOP, EXIT_SUPERVISORD = 70, 71, 72
MOST_CRASHES = 8
STEADY_SECONDS = 600.0
"""A program that ran this long before it crashed is not in a crash loop: its count starts again."""
TRY_AGAIN_SECONDS = 30.0
"""How often a program that is not essential is tried again after supervisord gave it up."""
_POLL_SECONDS = 0.25


@dataclass
class _Life:
    """The present process of a program, and the program's crashes."""

    pid: int = 0
    since: float = 0.0
    crashes: int = 0  # in a row, without a steady life between them
    tried: float | None = None  # when supervisord was last asked to start the program that it had given up


class Stack:
    """`role`: whose `programs` these are; `logs`: the directory of their logs."""

    def __init__(
        self, settings: Settings, role: Role, logs: Path, programs: Sequence[Program], console: Console
    ) -> None:
        self._settings, self._role, self._logs, self._console = settings, role, logs, console
        self._say = console.say
        self._programs = {program.name: program for program in programs}
        self._lives = {program.name: _Life() for program in programs}
        self._directory = runtime_dir(settings.root, role)
        self._signals = 0
        # vLLM's admin routes are never open; the user who started the stack doesn't need to know this token.
        self._token = settings.secret("admin_token") or secrets.token_urlsafe(32)

    def run(self) -> int:
        """Returns the exit status."""
        processes.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        self._daemon = self._start()
        self._say(f"starting {', '.join(self._programs)}; logs are in {self._logs}")
        if self._role != "all" and (path := gpu_links.describe(self._settings, self._role)):
            self._say(path)
        if "vllm" in self._programs:
            Watchdog(self._settings, self._token, self._say).start()
        try:
            return self._watch()
        finally:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # Of a `tandem up` that was killed.
        for stale in (supervisord.socket_path(self._directory), *self._directory.glob("*.alive")):
            stale.unlink(missing_ok=True)
        config = supervisord.write_config(self._directory, self._logs, list(self._programs.values()))
        # In this process too: `supervisord.statuses` asks the supervisord of the role that the environment names.
        os.environ[ROLE_VARIABLE] = self._role
        variables = {"PYTHONUNBUFFERED": "1", liveness.VARIABLE: str(self._directory)}
        if self._settings.secret("admin_token") is None:
            variables["TANDEM_ADMIN_TOKEN"] = self._token
        parent = os.getpid()
        with (self._logs / "supervisord.out").open("wb") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(config)],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Ctrl-C reaches this process only. supervisord stops the programs in their order when it gets SIGTERM,
                # which the kernel sends if this process is killed.
                start_new_session=True,
                preexec_fn=lambda: processes.die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def _watch(self) -> int:
        begin = time.monotonic()
        next_probe, ready = begin, False
        while not self._signals:
            liveness.beat("up", self._directory)
            self._console.follow()
            processes.reap_orphans([self._daemon.pid])
            if self._daemon.poll() is not None:
                self._say(f"supervisord ended with {processes.describe_exit(self._daemon.returncode)}")
                return EXIT_SUPERVISORD
            for name, status in supervisord.statuses(self._settings).items():
                if code := self._check(self._programs[name], status):
                    return code
            if not ready and time.monotonic() > next_probe:
                next_probe = time.monotonic() + 1
                if ready := self._is_ready():
                    self._say(f"ready after {time.monotonic() - begin:.0f} s; {self._addresses()}")
            time.sleep(_POLL_SECONDS)
        return 0

    def _check(self, program: Program, status: Status) -> int:
        """Counts a program's crashes; the exit status if the stack has to end, else 0."""
        life, now = self._lives[program.name], time.monotonic()
        if status.state == "FATAL":
            if life.tried is None:
                self._say_end_of_log(program, "can't be started")
            if program.essential:
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

    def _count_crash(self, program: Program, life: _Life) -> bool:
        """Whether an essential program has crashed once too often."""
        life.crashes = 1 if time.monotonic() - life.since > STEADY_SECONDS else life.crashes + 1
        if program.essential or life.crashes <= MOST_CRASHES:
            how = supervisord.how_it_ended(self._logs, program.name)
            self._say(f"{program.name} (pid {life.pid}) ended: {how}; "
                      f"crash {life.crashes} of {MOST_CRASHES} at most; it is started again")  # fmt: skip
        if life.crashes == MOST_CRASHES + 1:
            self._say_end_of_log(program, "crashes again and again")
        return program.essential and life.crashes > MOST_CRASHES

    def _say_end_of_log(self, program: Program, trouble: str) -> None:
        end = last_lines(supervisord.log_path(self._logs, program.name), lines=30)
        self._say(f"{program.name} {trouble}; the end of its log:\n{end}")

    def _is_ready(self) -> bool:
        try:
            return not health.problems(self._settings, self._role)
        except (TandemError, OSError):
            return False

    def _addresses(self) -> str:
        settings = self._settings
        addresses = {
            "controller": f"jobs at http://{settings.controller_host}:{settings.controller_port}",
            "vllm": f"sampling at {settings.resolved_inference_url}/v1",
            "exporter": f"metrics at http://{settings.metrics_host}:{settings.metrics_port}/metrics",
        }
        return ", ".join(address for name, address in addresses.items() if name in self._programs)

    def _stop(self) -> None:
        self._say("stopping; once more Ctrl-C kills")
        if self._daemon.poll() is None:
            self._daemon.send_signal(signal.SIGTERM)
        most_signals = max(self._signals, 1)
        self._wait(
            lambda: self._daemon.poll() is not None or self._signals > most_signals,
            supervisord_seconds(list(self._programs.values())),
        )
        if self._daemon.poll() is not None:
            # If it was killed, its programs are this process's children now.
            for process in self._left():
                processes.send(process, signal.SIGTERM)
            self._wait(lambda: not self._left(), 3.0)
        processes.kill_all(self._left, timeout=10, known=[self._daemon.pid])
        self._daemon.poll()
        self._console.follow()
        self._say("stopped")

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            processes.reap_orphans([self._daemon.pid])
            self._console.follow()
            time.sleep(0.1)

    @staticmethod
    def _left() -> list[processes.Process]:
        return processes.descendants(os.getpid())

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
