"""Removes runs, checkpoints, ended jobs and damaged jobs that nothing needs any more.

Each directory is renamed to a temporary name first, so that no reader finds an incomplete
directory. If the process dies, every reader finds each run, checkpoint or job either complete or
not at all. The next `sweep` then removes the remaining files.
"""

import math
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config import Settings
from tandem.errors import Conflict, TandemError
from tandem.spool import Spool, fs
from tandem.spool.paths import JOB_FILE, JobDir, listing
from tandem.spool.schema import SessionJob
from tandem.system.logs import Log

log = Log("spool")

SILENT_SECONDS = 3600.0
"""A session ends if its client has been silent for this long. A silent session occupies space on
the volume, but no GPU."""
RESULT_SECONDS = 3600.0
"""Seconds for which the results of an ended session are kept."""


def delete_run(spool: Spool, run: str) -> Path:
    """Removes a run with its ended jobs. Returns the directory that the caller still has to remove
    (`shutil.rmtree`). Raises Conflict if jobs of the run are queued or running, and NotFound if the
    run does not exist. If the process dies during the removal, the run may remain complete,
    although some of its ended jobs are already removed. Another call completes the removal."""
    with spool.runs.lock(run):
        spool.jobs.check_none_pending(run, "run")
        # A job that has just ended may still be in `jobs/live/`, because the job's directory is
        # moved last.
        for entry in spool.jobs.index.newest_live(run):
            spool.queue.settle(entry.key)
        for entries in spool.jobs.index.ended().values():
            _remove_jobs(spool, [entry for entry in entries if entry.key.run == run])
        return _set_aside([spool.runs.directory(run)])[0]


def delete_checkpoint(spool: Spool, run: str, step: int) -> Path:
    """Removes a checkpoint. Returns the directory that the caller still has to remove. Raises
    NotFound if the checkpoint does not exist. Raises Conflict if the checkpoint is step 0, the
    newest step, a pinned step or a served step. Also raises Conflict if a queued or running job
    needs the checkpoint."""
    with spool.runs.lock(run):
        directory = spool.checkpoints.path(run, step)
        if why := _needed(spool, run).get(step):
            raise Conflict(f"{run}@{step} stays: {why}", field="step")
        return _set_aside([directory])[0]


def prune(spool: Spool, settings: Settings) -> None:
    """Removes everything that the settings `keep_*` don't keep, and whole merged weights that are
    no longer served."""
    # If the limit is 0, nothing is old enough to be removed.
    limit = max(0.0, time.time() - (settings.keep_days or math.inf) * 86400)
    for run in spool.runs.names():
        try:
            doomed, whole = (
                _old_checkpoints(spool, run, settings, limit),
                _old_whole_weights(spool, run),
            )
        except (TandemError, OSError) as error:  # the run was deleted meanwhile, or is damaged
            log.warning("can't remove old checkpoints", run=run, error=error)
            continue
        for directory in doomed + whole:
            shutil.rmtree(directory, ignore_errors=True)
        if doomed or whole:
            log.info(
                "removed old checkpoints", run=run, count=len(doomed), whole_weights=len(whole)
            )
    for entries in spool.jobs.index.ended().values():
        _remove_jobs(spool, [entry for entry in entries if _ended_before(limit, entry)])
    damaged = [spool.paths.damaged / name for name in listing(spool.paths.damaged)]
    for directory in _set_aside([path for path in damaged if _set_aside_before(limit, path)]):
        shutil.rmtree(directory, ignore_errors=True)
    spool.tunings.prune(limit)
    _prune_sessions(spool, limit)


def _old_checkpoints(spool: Spool, run: str, settings: Settings, limit: float) -> list[Path]:
    """Renames the checkpoints that the settings `keep_*` don't keep to temporary names. Also
    renames the checkpoints that rollbacks discarded before `limit` (Unix seconds). Returns the new
    paths."""
    checkpoints = spool.checkpoints
    doomed = _set_aside(
        [path for path in checkpoints.discarded(run) if _set_aside_before(limit, path)]
    )
    if _surplus(checkpoints.steps(run), settings):
        # while this lock is held, no rollback, fork or submission begins
        with spool.runs.lock(run):
            surplus = _surplus(checkpoints.steps(run), settings)
            old = surplus - _needed(spool, run).keys()
            doomed += _set_aside([checkpoints.path(run, step) for step in sorted(old)])
    return doomed


def _old_whole_weights(spool: Spool, run: str) -> list[Path]:
    """Renames the whole merged weights of a run to temporary names, except the weights of the
    served steps and of the chain's two newest steps. Returns the new paths. A rank removes old
    weights only when it writes new weights. After a rollback or a change of the transport, ranks
    may write no new weights.
    """
    if not spool.merged.steps(run):
        return []
    with spool.runs.lock(run):  # No rollback begins while this lock is held.
        # The merged weights are listed before the checkpoints, because a step gets its checkpoint
        # before its whole weights.
        written, served = spool.merged.steps(run), spool.served.get(run)
        keep = {*spool.checkpoints.steps(run)[-2:], served.step if served else None}
        keep |= spool.replicas.steps(run).keys()
        return _set_aside([path for path, step in written.items() if step not in keep])


def _surplus(steps: Sequence[int], settings: Settings) -> set[int]:
    newest, every = settings.keep_checkpoints, settings.keep_every
    return (
        set()
        if newest is None
        else {step for step in steps[:-newest] if step and (every is None or step % every)}
    )


def _needed(spool: Spool, run: str) -> dict[int, str]:
    """Step -> the reason why its checkpoint must stay."""
    newest = spool.checkpoints.newest(run)
    needed = {0: "it is the beginning of its run", newest: "it is the newest"}
    needed |= dict.fromkeys(spool.checkpoints.pinned(run), "it is pinned")
    if (served := spool.served.get(run)) is not None:
        needed.setdefault(served.step, "it is served")
    for has, replica in spool.replicas.steps(run).items():
        needed.setdefault(has, f"replica {replica} serves it")
    for _, job in spool.jobs.pending(run):
        spec = job.spec
        reference = None if isinstance(spec, SessionJob) else spec.loss.reference_step
        for step in (spec.base_step, spec.base_step + 1, reference):
            if step is not None:
                needed.setdefault(step, f"job {job.spec.id} needs it")
    return needed


def _set_aside(directories: Sequence[Path]) -> list[Path]:
    """Durably renames directories to temporary names. All directories must have the same parent.
    Returns the new paths."""
    doomed = []
    for directory in directories:
        target = fs.temporary_beside(directory)
        with fs.volume_errors(directory):
            directory.rename(target)
        doomed.append(target)
    if doomed:
        with fs.volume_errors(doomed[0]):
            fs.fsync_dir(doomed[0].parent)
    return doomed


def _set_aside_before(limit: float, path: Path) -> bool:
    """Whether a checkpoint was discarded, or a damaged job was set aside, before `limit` (Unix
    seconds). The time is in the ULID at the end of the directory's name. A directory whose name has
    no ULID stays, because a person gave it this name."""
    ulid = re.fullmatch(r".*[-.]([0-9A-HJKMNP-TV-Z]{26})", path.name)
    return ulid is not None and ulid[1][:10] < fs.new_ulid(limit)[:10]  # the ULID's milliseconds


def _ended_before(limit: float, entry: JobDir) -> bool:
    """Whether the job ended before `limit` (Unix seconds)."""
    if entry.key.created / 1e6 >= limit:
        return False
    with suppress(FileNotFoundError):  # the mtime is the time of the last write
        return (entry.directory / JOB_FILE).stat().st_mtime < limit
    return False


def _prune_sessions(spool: Spool, limit: float) -> None:
    """Ends sessions whose clients have been silent for SILENT_SECONDS. Removes the requests of
    ended sessions after RESULT_SECONDS, so that clients have time to read the results. Removes the
    records of sessions that ended before `limit` (Unix seconds)."""
    for session in spool.sessions.expire(SILENT_SECONDS):
        log.info("ended a session whose client is silent", session=session)
    for session in spool.sessions.ids():
        end = spool.sessions.ended(session)
        if end is None or time.time() - end.finished < RESULT_SECONDS:
            continue
        for run in spool.sessions.runs(session):
            if not spool.jobs.index.running(run):
                fs.remove_tree(spool.paths.requests_dir(run))
        if end.finished < limit:
            fs.remove_tree(spool.paths.session_dir(session))


def _remove_jobs(spool: Spool, entries: Sequence[JobDir]) -> None:
    """Removes the ended jobs `entries`, which are in the same directory."""
    doomed = []
    for entry in entries:
        # The job may have been moved meanwhile, either by another removal or by a reader that found
        # the job damaged.
        with spool.job_lock(entry.key.id), suppress(FileNotFoundError):
            doomed += _set_aside([entry.directory])
    for directory in doomed:
        shutil.rmtree(directory, ignore_errors=True)
