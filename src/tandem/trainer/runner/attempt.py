"""One attempt at one job: start the ranks, watch them, end them, measure what they left. No state is written here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.spool.schema import Job, JobError
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.system.tail import Tail, last_lines
from tandem.trainer.launch import Launch, Launcher
from tandem.trainer.runner import verdict
from tandem.trainer.runner.echo import Echo
from tandem.trainer.runner.verdict import Heartbeats

log = Log("runner")

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 10.0
"""How long killed processes may take to be gone; the kernel may hold one in an uninterruptible sleep."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Ended:
    """What an attempt came to, seen from outside."""

    error: JobError  # why it failed, if it turns out to have made no checkpoint
    survivors: list[Process]  # that even SIGKILL did not end within the bound


@dataclass(frozen=True)
class Watch:
    """What the runner lets an attempt ask and tell while it runs. None of it may raise."""

    cancelled: Callable[[], bool]
    stopping: Callable[[], bool]
    beat: Callable[[str, list[Process]], None]


class JobLog:
    """`jobs/logs/<id>.log`: the lines of all the attempt's logs, each with who printed it in front. `echo` gets them
    too."""

    def __init__(self, path: Path, work: Path, ranks: int, echo: Echo) -> None:
        self.path = path
        self._echo = echo
        self._tails = {"launcher": Tail(work / "launcher.log")}
        self._tails |= {f"rank {rank}": Tail(work / f"rank.{rank}.log") for rank in range(ranks)}
        self._complained = False

    def pump(self, *, final: bool = False) -> None:
        for name, tail in self._tails.items():
            self._write([f"[{name}] {line}" for line in tail.lines(final=final)])
            if final:
                tail.close()
        self._echo.add([], patience=1.0 if final else 0.0)

    def say(self, text: str) -> None:
        """A line of the runner's own."""
        self._write([f"[runner] {text}"])

    def tail(self) -> str:
        return last_lines(self.path)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        self._echo.add(lines)
        try:
            with self.path.open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            # A log that can't be written must not end the job.
            if not self._complained:
                log.warning("can't write the job's log", path=self.path, error=error)
            self._complained = True


def run(job: Job, launcher: Launcher, launch: Launch, joblog: JobLog, watch: Watch, heartbeat_seconds: float) -> Ended:
    """Run one attempt to its end; when this returns no process of it is left, except those it names.

    It ends, at the latest, `deadline_seconds` (or `stall_seconds` without any progress) after it began, plus
    GRACE_SECONDS + KILL_SECONDS.
    """
    begin = time.monotonic()
    spec = job.spec
    try:
        handle = launcher.launch(launch)
    except OSError as error:
        message = f"can't start the ranks: {error}"
        return Ended(JobError(type="launch_failed", message=message, retriable=True), [])
    heartbeats = Heartbeats(launch.work, launch.ranks)
    stopped: JobError | None = None
    next_beat = begin
    while (code := handle.poll()) is None and stopped is None:
        joblog.pump()
        now = time.monotonic()
        beats = heartbeats.read()
        if watch.stopping():
            stopped = JobError(type="runner_stopped", message="the runner was asked to stop", retriable=True)
        elif watch.cancelled():
            stopped = JobError(type="cancelled", message="cancelled while it ran")
        elif now - begin > spec.deadline_seconds:
            where = "; ".join(map(str, beats))
            message = f"not done within deadline_seconds={spec.deadline_seconds:g}; {where}"
            stopped = JobError(type="deadline", message=message, retriable=True)
        elif beats[0].silent > spec.stall_seconds:
            silent = "; ".join(str(beat) for beat in beats if beat.silent > spec.stall_seconds)
            message = f"no progress for stall_seconds={spec.stall_seconds:g}: {silent}"
            stopped = JobError(type="rank_hung", message=message, retriable=True)
        if stopped is None:
            if now >= next_beat:
                watch.beat(beats[-1].phase, handle.processes())
                next_beat = now + heartbeat_seconds
            time.sleep(POLL_SECONDS)
    if stopped is not None:
        joblog.say(f"stopping the ranks: {stopped.type}: {stopped.message}")
        handle.terminate()
        end = time.monotonic() + GRACE_SECONDS
        while (code := handle.poll()) is None and time.monotonic() < end:
            joblog.pump()
            if time.monotonic() >= next_beat:
                watch.beat("stopping", handle.processes())
                next_beat = time.monotonic() + heartbeat_seconds
            time.sleep(POLL_SECONDS)
        if code is None:
            joblog.say(f"the ranks did not stop within {GRACE_SECONDS:g} s of SIGTERM; killing them")
    survivors = handle.kill_all(KILL_SECONDS)
    joblog.pump(final=True)
    if stopped is None:
        assert code is not None
        stopped = verdict.failure(code, handle.rank_exits(), verdict.rank_errors(launch.work))
    return Ended(stopped, survivors)
