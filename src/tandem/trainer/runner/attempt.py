"""The processes of one attempt at one job: start the ranks, watch them, end them."""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem.spool.schema import Job, JobError
from tandem.system.processes import Process
from tandem.trainer.launch import Handle, Launch, Launcher, read_exits
from tandem.trainer.runner.failure import failure, rank_errors
from tandem.trainer.runner.heartbeats import Heartbeats, RankProgress
from tandem.trainer.runner.joblog import JobLog

TERMINATE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
KILL_SECONDS = 10.0
"""How long killed processes may take to be gone. The kernel may hold one in an uninterruptible sleep."""
_POLL_SECONDS = 0.1

BeatFunction = Callable[[str, Handle], None]


def run(
    job: Job,
    launcher: Launcher,
    launch: Launch,
    joblog: JobLog,
    interrupted: Callable[[], JobError | None],
    beat: BeatFunction,
) -> tuple[JobError, list[Process]]:
    """Run one attempt to its end.

    `interrupted` gives the reason to stop the ranks early, if there is one; `beat(phase, handle)` is called several
    times a second. Neither may raise. An attempt ends at the latest `deadline_seconds` after it began, or
    `stall_seconds` after its last progress, plus TERMINATE_SECONDS + KILL_SECONDS.

    Returns why the attempt failed, if it made no checkpoint, and the processes that survived SIGKILL.
    """
    begin = time.monotonic()
    try:
        handle = launcher.launch(launch)
    except OSError as error:
        return JobError(type="launch_failed", message=f"can't start the ranks: {error}", retriable=True), []
    heartbeats = Heartbeats(launch.work, launch.ranks)
    while (status := handle.poll()) is None:
        joblog.collect()
        ranks = heartbeats.read()
        reason = interrupted() or _overdue(job, time.monotonic() - begin, ranks)
        if reason is not None:
            joblog.say(f"stopping the ranks: {reason.type}: {reason.message}")
            _terminate(handle, joblog, beat)
            break
        beat(ranks[-1].phase, handle)
        time.sleep(_POLL_SECONDS)
    survivors = handle.kill_all(KILL_SECONDS)
    joblog.collect(final=True)
    if status is not None:
        reason = failure(status, read_exits(launch.work), rank_errors(launch.work))
    assert reason is not None
    return reason, survivors


def _overdue(job: Job, seconds: float, ranks: list[RankProgress]) -> JobError | None:
    """The error of an attempt that has run too long, or too long without progress. `ranks`: longest silent first."""
    spec = job.spec
    if seconds > spec.deadline_seconds:
        message = f"not done within deadline_seconds={spec.deadline_seconds:g}; {'; '.join(map(str, ranks))}"
        return JobError(type="deadline", message=message, retriable=True)
    if ranks[0].silent > spec.stall_seconds:
        silent = "; ".join(str(rank) for rank in ranks if rank.silent > spec.stall_seconds)
        message = f"no progress for stall_seconds={spec.stall_seconds:g}: {silent}"
        return JobError(type="rank_hung", message=message, retriable=True)
    return None


def _terminate(handle: Handle, joblog: JobLog, beat: BeatFunction) -> None:
    handle.terminate()
    end = time.monotonic() + TERMINATE_SECONDS
    while handle.poll() is None:
        if time.monotonic() > end:
            joblog.say(f"the ranks did not stop within {TERMINATE_SECONDS:g} s of SIGTERM; killing them")
            return
        joblog.collect()
        beat("stopping", handle)
        time.sleep(_POLL_SECONDS)
