"""What a new runner does about the remains of a dead one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tandem.errors import CheckpointDamaged, NotFound
from tandem.spool import fs, names
from tandem.spool.schema import TERMINAL, Job, JobError, JobResult, JobState

if TYPE_CHECKING:
    from tandem.spool import Spool

# Younger remains may be somebody's work in progress (a submission that is being packed).
STALE_SECONDS = 3600.0


def recover(spool: Spool, runner: str) -> list[tuple[JobState, Job]]:
    """`Jobs.recover`."""
    moved: list[tuple[JobState, Job]] = []
    for state in ("running", "queued"):
        for name in fs.names(spool.root / "jobs" / state):
            job_id = name.removesuffix(".json")
            if names.is_job_id(job_id) and (job := _recover_job(spool, job_id, runner)) is not None:
                moved.append(job)
    _sweep(spool)
    return moved


def _recover_job(spool: Spool, job_id: str, runner: str) -> tuple[JobState, Job] | None:
    with spool.job_lock(job_id):
        try:
            _, job = spool.jobs.get(job_id)
        except NotFound:
            return None
        if job.result is not None:
            spool.jobs.finish(job, job.result)
        elif not fs.exists(spool.root / "jobs/running" / f"{job_id}.json"):
            return None
        elif made_by(spool, job):
            result = JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())
            spool.jobs.finish(job, result)
        else:
            lease = spool.jobs.lease(job_id)
            who = "its runner" if lease is None else f"its runner {lease.runner} (pid {lease.pid} on {lease.host})"
            phase = "" if lease is None else f" in phase {lease.phase!r}"
            message = f"{who} was lost{phase}; found by {runner}"
            spool.jobs.requeue(job, JobError(type="runner_lost", message=message, retriable=True))
        return spool.jobs.get(job_id)


def made_by(spool: Spool, job: Job) -> bool:
    """Whether the checkpoint that the job was to make is there, and was made by it."""
    try:
        return spool.checkpoints.manifest(job.spec.run, job.spec.base_step + 1).job == job.spec.id
    except (NotFound, CheckpointDamaged):
        return False


def _sweep(spool: Spool) -> None:
    """Removes what belongs to ended jobs, and remains without an owner once they are stale."""
    jobs = spool.root / "jobs"
    for kind in ("data", "work", "leases", "cancel"):
        for name in fs.names(jobs / kind):
            job_id = name.removesuffix(".json") if kind == "leases" else name
            if names.is_job_id(job_id):
                with spool.job_lock(job_id):
                    _sweep_one(spool, kind, job_id)
    parents = [spool.root, spool.root / "runs", *(jobs / name for name in fs.names(jobs))]
    for run in fs.names(spool.root / "runs"):
        parents += [spool.root / "runs" / run, spool.root / "runs" / run / "checkpoints"]
    for parent in parents:
        if parent.is_dir():
            for path in parent.glob(f"{fs.TEMPORARY}*"):
                if fs.older_than(path, STALE_SECONDS):
                    fs.remove_tree(path) if path.is_dir() else fs.remove_file(path)


def _sweep_one(spool: Spool, kind: str, job_id: str) -> None:
    try:
        state, _ = spool.jobs.get(job_id)
    except NotFound:
        remains = spool.root / "jobs" / kind / (f"{job_id}.json" if kind == "leases" else job_id)
        if fs.older_than(remains, STALE_SECONDS):
            fs.remove_tree(remains) if remains.is_dir() else fs.remove_file(remains)
        return
    if state in TERMINAL:
        spool.jobs.clear(job_id)
    elif state == "queued" and kind in ("work", "leases"):
        fs.remove_tree(spool.root / "jobs/work" / job_id)
        fs.remove_file(spool.root / "jobs/leases" / f"{job_id}.json")
