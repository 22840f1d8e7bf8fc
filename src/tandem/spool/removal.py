"""Removes runs, checkpoints, ended jobs and damaged files that nothing needs any more.

Whatever goes is renamed first, so that nobody finds half of it: a run or checkpoint to a temporary
name beside it, a job into `jobs/removed/`. After a death at any point it is whole or gone for
everybody, and the next `sweep` and `complete_removals` remove what is left of it.
"""

import math
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.config import Settings
from tandem.errors import Conflict, TandemError
from tandem.spool import Spool, fs
from tandem.spool.paths import HOUR_FORMAT, listing
from tandem.spool.schema import PENDING, TERMINAL, JobKey, SessionJob
from tandem.system.logs import Log

log = Log("spool")

SILENT_SECONDS = 3600.0
"""A session whose client was not heard of for so long ends. It holds files, but no GPU."""
RESULT_SECONDS = 3600.0
"""How long the results of an ended session stay."""


def delete_run(spool: Spool, run: str) -> Path:
    """Removes a run with its ended jobs; returns the directory that the caller still has to remove
    (`shutil.rmtree`). Conflict if jobs of the run are queued or running; NotFound. After a death
    half-way the run is whole without some of its ended jobs, and calling again does the rest."""
    with spool.runs.lock(run):
        spool.jobs.check_none_pending(run, "run")
        index = spool.jobs.index
        for directory in [
            directory for state in TERMINAL for directory in index.directories(state)
        ]:
            _remove_jobs(spool, directory, [key for key in index.keys(directory) if key.run == run])
        complete_removals(spool)
        return _set_aside([spool.runs.directory(run)])[0]


def delete_checkpoint(spool: Spool, run: str, step: int) -> Path:
    """Removes a checkpoint; returns the directory that the caller still has to remove. NotFound;
    Conflict if it is step 0, the newest, pinned or served, or if a job that is not done needs
    it."""
    with spool.runs.lock(run):
        directory = spool.checkpoints.path(run, step)
        if why := _needed(spool, run).get(step):
            raise Conflict(f"{run}@{step} stays: {why}", field="step")
        return _set_aside([directory])[0]


def prune(spool: Spool, settings: Settings) -> None:
    """Removes what the settings `keep_*` don't keep, and whole merged weights that are not served
    any more."""
    limit = max(0.0, time.time() - (settings.keep_days or math.inf) * 86400)  # 0: nothing is old
    for run in spool.runs.names():
        try:
            doomed, whole = (
                _old_checkpoints(spool, run, settings, limit),
                _old_whole_weights(spool, run),
            )
        except (TandemError, OSError) as error:  # it was deleted meanwhile, or is damaged
            log.warning("can't remove old checkpoints", run=run, error=error)
            continue
        for directory in doomed + whole:
            shutil.rmtree(directory, ignore_errors=True)
        if doomed or whole:
            log.info(
                "removed old checkpoints", run=run, count=len(doomed), whole_weights=len(whole)
            )
    try:
        _prune_jobs(spool, limit)
        _prune_damaged(spool, limit)
        spool.tunings.prune(limit)
        _prune_sessions(spool, limit)
    finally:
        complete_removals(spool)


def _old_checkpoints(spool: Spool, run: str, settings: Settings, limit: float) -> list[Path]:
    """Sets aside the checkpoints that are not kept, and those that were discarded before `limit`,
    Unix seconds."""
    checkpoints = spool.checkpoints
    doomed = _set_aside(
        [path for path in checkpoints.discarded(run) if _set_aside_before(limit, path)]
    )
    if _surplus(checkpoints.steps(run), settings):
        with spool.runs.lock(run):  # nobody rolls back, begins to fork or submits now
            surplus = _surplus(checkpoints.steps(run), settings)
            old = surplus - _needed(spool, run).keys()
            doomed += _set_aside([checkpoints.path(run, step) for step in sorted(old)])
    return doomed


def _old_whole_weights(spool: Spool, run: str) -> list[Path]:
    """Sets aside the whole merged weights of steps that are neither served nor one of the chain's
    two newest. A rank removes them only when it writes others: it does not after a change of the
    transport or a rollback.
    """
    if not spool.merged.steps(run):
        return []
    with spool.runs.lock(run):  # nobody rolls back now
        # In this order: a step has its checkpoint before its whole weights.
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
    """The steps that stay, each with its reason."""
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
    """Renames directories with one parent to temporary names, durably; returns those."""
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
    """Whether a checkpoint was discarded, or a damaged file set aside, before `limit`, Unix
    seconds, by the ULID at the end of its name. Names by hand stay."""
    ulid = re.fullmatch(r".*[-.]([0-9A-HJKMNP-TV-Z]{26})", path.name)
    return ulid is not None and ulid[1][:10] < fs.new_ulid(limit)[:10]  # the milliseconds


def _prune_jobs(spool: Spool, limit: float) -> None:
    """Removes the jobs that ended before `limit`, Unix seconds."""

    def ended(directory: Path, key: JobKey) -> float:
        with suppress(FileNotFoundError):
            return (directory / f"{key.name}.json").stat().st_mtime  # it was last written then
        return time.time()

    index, last_hour = spool.jobs.index, time.strftime(HOUR_FORMAT, time.gmtime(limit))
    for directory in [directory for state in TERMINAL for directory in index.directories(state)]:
        if directory.name <= last_hour:  # the jobs in others were submitted later
            _remove_jobs(
                spool,
                directory,
                [key for key in index.keys(directory) if ended(directory, key) < limit],
            )


def _prune_sessions(spool: Spool, limit: float) -> None:
    """Ends sessions whose clients are silent. Removes the requests of ended ones when a client has
    had time to read the results, and their records when they ended before `limit`, Unix seconds."""
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


def _prune_damaged(spool: Spool, limit: float) -> None:
    """Removes files that were set aside before `limit`, Unix seconds, with the events, logs and ids
    of their jobs."""
    paths = [spool.paths.damaged / name for name in listing(spool.paths.damaged)]
    for path in (path for path in paths if _set_aside_before(limit, path)):
        key = JobKey.parse(path.name.partition(",")[2].rpartition(".json.")[0])
        if key is not None and spool.jobs.locate(key) is None:
            with spool.job_lock(key.id):
                fs.move_file(path, spool.paths.removed / f"{key.name}.json")
        else:  # another file of the job is whole
            fs.remove_file(path)


def _remove_jobs(spool: Spool, directory: Path, keys: Iterable[JobKey]) -> None:
    """Removes ended jobs, whose files are in `directory`, with their events and logs."""
    gone = False
    for key in keys:
        with spool.job_lock(key.id), fs.volume_errors(directory), suppress(FileNotFoundError):
            spool.queue.clear(key)
            # A file that a dead process left in a weaker directory, and that can't go now, would be
            # the job again.
            if not any(fs.exists(spool.paths.job_file(state, key)) for state in PENDING):
                (directory / f"{key.name}.json").rename(spool.paths.removed / f"{key.name}.json")
                gone = True
    if gone:
        with fs.volume_errors(directory):
            fs.fsync_dir(spool.paths.removed)
            with suppress(FileNotFoundError):  # another removal has emptied and removed it
                fs.fsync_dir(directory)
    fs.remove_empty(directory)


def complete_removals(spool: Spool) -> None:
    """Removes events, logs and ids of the jobs in `jobs/removed/`, and then their files."""
    paths = spool.paths
    if not (
        keys := [
            key
            for name in listing(paths.removed)
            if (key := JobKey.parse(name.removesuffix(".json")))
        ]
    ):
        return
    for key in keys:
        with spool.job_lock(key.id):
            if spool.jobs.find(key.id) in (key, None):  # else the id is another job's by now
                for path in (
                    paths.log_file(key.id),
                    paths.events_file(key.id),
                    paths.id_file(key.id),
                ):
                    fs.remove_file(path, durable=False)
    with fs.volume_errors(paths.removed):
        for name in ("logs", "events", "ids"):
            fs.fsync_dir(paths.jobs / name)
    for key in keys:
        fs.remove_file(paths.removed / f"{key.name}.json", durable=False)
