"""What a new runner does about the jobs and files that a dead runner left."""

from contextlib import suppress
from pathlib import Path

from tandem.spool import Spool, fs
from tandem.spool.jobs import JobList
from tandem.spool.paths import is_job_id, listing
from tandem.spool.schema import TERMINAL, Job, JobError, JobState

# Younger remains may be work in progress of a living process, as a submission that is being packed.
STALE_SECONDS = 3600.0


def recover(spool: Spool, runner: str) -> JobList:
    """Settles the jobs of a dead runner, and removes what dead processes left. The caller holds the
    runner lock, and has ended orphaned ranks. Returns the jobs that moved, with their new states. A
    running job with a result is finished; one that made its checkpoint succeeded; the others are
    requeued."""
    moved = [_recover_job(spool, key.id, runner) for key in spool.jobs.index.running()]
    _remove_remains(spool)
    sweep(spool)
    return [job for job in moved if job is not None]


def _recover_job(spool: Spool, job_id: str, runner: str) -> tuple[JobState, Job] | None:
    with spool.job_lock(job_id):
        if (located := spool.jobs.locate(job_id)) is None:
            return None
        directory, job = located
        if job.result is not None:
            spool.queue.finish(job, job.result)
            if directory in TERMINAL:
                return None
        elif directory != "running":
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
    """Removes stale temporary names, which dead processes left. Anybody may call this at any
    time."""
    queue = spool.jobs.index.directories("queued")
    directories = [
        spool.root,
        spool.paths.runs,
        spool.paths.jobs,
        spool.uploads.directory,
        spool.tunings.directory,
        spool.paths.sessions,
        *spool.paths.jobs.glob("[!.]*"),
        *queue,
    ]
    for run in spool.paths.runs.glob("[!.]*"):
        directories += [run, run / "checkpoints", run / "discarded", run / "pinned", run / "merged"]
        directories.append(run / "requests")
    for path in [path for directory in directories for path in directory.glob(f"{fs.TEMPORARY}*")]:
        _remove_if_stale(path)


def _remove_remains(spool: Spool) -> None:
    """Removes files that ended and waiting jobs don't need, and stale files that belong to no
    job."""
    index = spool.jobs.index
    # Running jobs that are left are those of a newer version: it will need their data.
    pending = {key.id for key in (*index.newest_first("queued"), *index.running())}
    for kind in ("data", "work", "leases", "cancel"):
        directory = spool.paths.jobs / kind
        for name in listing(directory):
            job_id = name.removesuffix(".json") if kind == "leases" else name
            if not is_job_id(job_id) or (kind == "data" and job_id in pending):
                continue
            with spool.job_lock(job_id):
                located = spool.jobs.locate(job_id)
                if located is None:
                    _remove_if_stale(directory / name)
                elif located[0] in TERMINAL:
                    spool.queue.clear(located[1].key)
                elif located[0] == "queued":
                    spool.queue.clear_attempts(job_id)


def _remove_if_stale(path: Path) -> None:
    # Of the volume's own host, by which the file has its time.
    clock = fs.temporary_beside(path.with_name("clock"))
    with fs.volume_errors(path):
        try:
            clock.touch(exist_ok=False)
            # A directory's own time says nothing about what is written deep inside it.
            newest = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
            age = clock.stat().st_mtime - newest
        except FileNotFoundError:
            return
        finally:
            with suppress(OSError):
                clock.unlink()
    if age > STALE_SECONDS:
        fs.remove_tree(path) if path.is_dir() else fs.remove_file(path)
