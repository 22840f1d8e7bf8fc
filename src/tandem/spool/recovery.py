"""What a new runner does about the jobs and files that a dead runner left."""

import time
from pathlib import Path

from tandem.errors import CheckpointDamaged, NotFound
from tandem.spool import Spool, fs
from tandem.spool.jobs import JobList
from tandem.spool.paths import is_job_id
from tandem.spool.schema import TERMINAL, Job, JobError, JobResult, JobState

# Younger remains may be work in progress of a living process, as a submission that is being packed.
STALE_SECONDS = 3600.0


def recover(spool: Spool, runner: str) -> JobList:
    """Settles the jobs of a dead runner. The caller holds the runner lock, and has ended orphaned ranks.

    A running job with a result is finished; one that made its checkpoint succeeded; the others are requeued (see
    `Queue.requeue`). Returns the jobs that moved, with their new states. Removes what dead processes left.
    """
    ids = [*spool.jobs.ids("running"), *spool.jobs.ids("queued")]
    moved = [_recover_job(spool, job_id, runner) for job_id in ids]
    _remove_remains(spool)
    return [job for job in moved if job is not None]


def _recover_job(spool: Spool, job_id: str, runner: str) -> tuple[JobState, Job] | None:
    with spool.job_lock(job_id):
        if (located := spool.jobs.locate(job_id)) is None:
            return None
        directory, job = located
        if job.result is not None:
            spool.queue.finish(job, job.result)
        elif directory != "running":
            return None
        elif made_checkpoint(spool, job):
            step = job.spec.base_step + 1
            spool.queue.finish(job, JobResult(state="succeeded", step=step, finished=time.time()))
        else:
            lost = "its runner"
            if (lease := spool.leases.get(job_id)) is not None:
                lost += f" {lease.runner} (pid {lease.pid} on {lease.host}), in phase {lease.phase!r},"
            message = f"{lost} was lost; noticed by {runner}"
            spool.queue.requeue(job, JobError(type="runner_lost", message=message, retriable=True))
        return spool.jobs.get(job_id)


def made_checkpoint(spool: Spool, job: Job) -> bool:
    """Whether the job's checkpoint exists and this job made it."""
    try:
        return spool.checkpoints.manifest(job.spec.run, job.spec.base_step + 1).job == job.spec.id
    except (NotFound, CheckpointDamaged):
        return False


def _remove_remains(spool: Spool) -> None:
    """Removes files of ended jobs, and stale files that belong to no job or to an unfinished write."""
    for kind in ("data", "work", "leases", "cancel"):
        directory = spool.paths.jobs / kind
        for name in fs.names(directory):
            job_id = name.removesuffix(".json") if kind == "leases" else name
            if is_job_id(job_id):
                with spool.job_lock(job_id):
                    _remove_remains_of(spool, job_id, directory / name)
    for depth in range(4):  # down to runs/<run>/checkpoints/
        for path in spool.root.glob("*/" * depth + f"{fs.TEMPORARY}*"):
            _remove_if_stale(path)


def _remove_remains_of(spool: Spool, job_id: str, path: Path) -> None:
    try:
        state, _ = spool.jobs.get(job_id)
    except NotFound:
        _remove_if_stale(path)
        return
    if state in TERMINAL:
        spool.queue.clear(job_id)
    elif state == "queued" and path.parent.name in ("work", "leases"):
        fs.remove_tree(spool.paths.all_work_dirs(job_id))
        fs.remove_file(spool.paths.lease_file(job_id))


def _remove_if_stale(path: Path) -> None:
    if fs.older_than(path, STALE_SECONDS):
        fs.remove_tree(path) if path.is_dir() else fs.remove_file(path)
