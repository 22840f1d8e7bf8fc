"""Recovery: a new runner ends or requeues the jobs of a dead runner, and removes the files of the
dead runner."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.spool import Spool, fs
from tandem.spool.jobs import JobList
from tandem.spool.schema import TERMINAL, Job, JobError, JobState

# Temporary files that are newer than this many seconds are kept, because a living process may still
# write them, for example to submit a job.
STALE_SECONDS = 3600.0


def recover(
    spool: Spool, runner: str, adopts: Callable[[Job], bool] = lambda _job: False
) -> JobList:
    """Ends or requeues the jobs of a dead runner, and removes the files that dead processes left.
    The caller holds the runner lock, and has ended orphaned ranks. Returns the jobs whose state
    changed, with their new states. A running job that already has a result is ended with this
    result. A running job that made its checkpoint ends as `succeeded`. A running job with neither a
    result nor a checkpoint is queued again (`Queue.requeue`).

    Args:
        runner: the name of the caller, which is a runner.
        adopts: `adopts(job)` says whether the caller continues the attempt of a running job. A job
            whose attempt the caller continues stays running. By default, the caller continues no
            attempt.
    """
    index = spool.jobs.index
    # a power loss may have removed names in `jobs/active/`
    keys = dict.fromkeys([*index.active(), *index.heads()])
    moved = [_recover_job(spool, key.id, runner, adopts) for key in keys]
    for key in index.active():
        spool.queue.settle(key)
    sweep(spool)
    return [job for job in moved if job is not None]


def _recover_job(
    spool: Spool, job_id: str, runner: str, adopts: Callable[[Job], bool]
) -> tuple[JobState, Job] | None:
    with spool.job_lock(job_id):
        located = spool.jobs.locate(job_id)
        if located is None or located[0] == "queued" or located[0] in TERMINAL:
            return None
        job = located[1]
        if job.result is not None:
            spool.queue.finish(job, job.result)
        elif adopts(job):
            return None
        else:
            lost = "its runner"
            if (lease := spool.leases.get(job_id)) is not None:
                lost += (
                    f" {lease.runner} (pid {lease.pid} on {lease.host}), in phase {lease.phase!r},"
                )
            message = f"{lost} was lost; noticed by {runner}"
            spool.queue.requeue(job, JobError(type="runner_lost", message=message, retriable=True))
        return spool.jobs.get(job_id)


def sweep(spool: Spool) -> None:
    """Removes stale temporary files of dead processes. Temporary files in a job's directory are
    removed when the job ends."""
    paths = spool.paths
    directories = [spool.root, paths.runs, paths.jobs, paths.replicas, *paths.jobs.glob("[!.]*")]
    directories += [spool.uploads.directory, spool.tunings.directory, paths.sessions]
    directories += [*paths.ended.glob("[!.]*"), *paths.live_buckets()]
    for run in paths.runs.glob("[!.]*"):
        below = ("checkpoints", "discarded", "pinned", "merged", "served", "requests")
        directories += [run, *(run / name for name in below)]
    for path in [path for directory in directories for path in directory.glob(f"{fs.TEMPORARY}*")]:
        _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    # The current time on the volume's own clock, which also sets the files' times.
    clock = fs.temporary_beside(path.with_name("clock"))
    with fs.volume_errors(path):
        try:
            clock.touch(exist_ok=False)
            # The mtime of a directory does not change when a file deep inside the directory is
            # written.
            newest = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
            age = clock.stat().st_mtime - newest
        except FileNotFoundError:
            return
        finally:
            with suppress(OSError):
                clock.unlink()
    if age > STALE_SECONDS:
        fs.remove_tree(path) if path.is_dir() else fs.remove_file(path)
