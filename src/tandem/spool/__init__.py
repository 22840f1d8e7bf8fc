"""The spool: the volume that controller, trainer and inference share. `Spool` opens it; all access
goes through it."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryFile

from tandem.errors import SpoolUnusable
from tandem.spool import fs
from tandem.spool.checkpoints import Checkpoints, MergedFiles
from tandem.spool.events import Events
from tandem.spool.inference import InferenceRecords
from tandem.spool.jobs import Jobs
from tandem.spool.locks import (
    HoldRecord,
    Leases,
    file_lock,
    hold_publisher_lock,
    hold_runner_lock,
    runner_info,
)
from tandem.spool.paths import Paths, listing
from tandem.spool.queue import Queue
from tandem.spool.replicas import Replicas
from tandem.spool.requests import RequestLog
from tandem.spool.runs import Runs, ServedRecords
from tandem.spool.schema import SCHEMA_VERSION, RunnerInfo
from tandem.spool.sessions import CheckpointNames, TrainingSessions
from tandem.spool.tunings import Tunings, Uploads


def real_root(root: Path | str) -> Path:
    """The spool's directory without a link in its path, so that a link below it is found."""
    return Path(os.path.realpath(root))


class Spool:
    """A spool, for many processes at once."""

    def __init__(self, root: Path | str) -> None:
        """Opens an existing spool, also a full or read-only one. SpoolUnusable if it can't be
        read."""
        self.root = real_root(root)
        self.paths = Paths(self.root)
        self.runs = Runs(self.paths)
        self.served = ServedRecords(self.runs)
        self.events = Events(self.paths)
        self.jobs = Jobs(self.paths, self.events)
        self.checkpoints = Checkpoints(self.runs, self.jobs)
        self.replicas = Replicas(self.paths, self.runs, self.served, self.checkpoints)
        self.merged = MergedFiles(self.runs, self.served, self.replicas.steps)
        self.leases = Leases(self.paths)
        self.hold = HoldRecord(self.paths)
        self.inference = InferenceRecords(self.paths, self.replicas)
        self.queue = Queue(
            self.paths, self.runs, self.checkpoints, self.jobs, self.events, self.leases
        )
        self.uploads = Uploads(self.paths)
        self.tunings = Tunings(self.paths)
        self.sessions = TrainingSessions(self.paths)
        self.requests = RequestLog(self.paths, self.runs, self.sessions)
        self.names = CheckpointNames(self.runs, self.checkpoints)
        self.check()

    @classmethod
    def create(cls, root: Path | str) -> "Spool":
        """Makes what a spool lacks, and opens it. SpoolUnusable if it can't; later calls go on from
        there."""
        paths = Paths(real_root(root))
        with fs.volume_errors(paths.root):
            if fs.exists(paths.version_file):
                _check_version(paths)
            for directory in paths.directories:
                fs.make_dir(directory)
            # Made now, so that a full disk can't keep anybody from locking later.
            for file in paths.locks:
                if not fs.exists(file):
                    file.touch()
            if not fs.exists(paths.version_file):
                fs.write_atomic(
                    paths.version_file, json.dumps({"schema_version": SCHEMA_VERSION}).encode()
                )
        return cls(paths.root)

    def check(self) -> None:
        """SpoolUnusable if the spool is gone. Without its volume a mount point is an empty
        directory, which would look like a spool without runs and jobs."""
        _check_version(self.paths)

    def check_writable(self) -> None:
        """SpoolUnusable if a small file can't be written now. Leaves nothing behind."""
        with (
            fs.volume_errors(self.root),
            TemporaryFile(dir=self.root, prefix=fs.TEMPORARY, buffering=0) as file,
        ):
            fs.write_all(file.fileno(), b"\0" * 4096)
            os.fsync(file.fileno())

    def damage(self) -> dict[str, list[str]]:
        """What is damaged and left out, by kind: `job` (set aside), `name` (names among the jobs'
        directories that are no job's), `run`. Each entry names a path."""
        jobs = [str(self.paths.damaged / name) for name in listing(self.paths.damaged)]
        names = [str(path) for path in self.jobs.index.junk()]
        runs = [
            f"{self.paths.runs / name}: {problem}" for name, problem in self.runs.damaged().items()
        ]
        return {"job": jobs, "name": names, "run": runs}

    def job_lock(self, job_id: str) -> AbstractContextManager[int]:
        """Serialises changes of a job and its events. Take it after `runs.lock`, never before."""
        return file_lock(self.paths.job_lock(job_id))

    def runner_lock(self, runner: str) -> AbstractContextManager[None]:
        """Held by the spool's one runner while it lives. SpoolUnusable names the holder if there is
        another."""
        return hold_runner_lock(self.paths, runner)

    def publisher_lock(self) -> AbstractContextManager[None]:
        """Held by the spool's one publisher while it lives. SpoolUnusable names another holder."""
        return hold_publisher_lock(self.paths)

    def runner(self) -> RunnerInfo | None:
        """Who holds, or last held, the runner lock; None if nobody did. The runner itself must not
        call this."""
        return runner_info(self.paths)


def _check_version(paths: Paths) -> None:
    path = paths.version_file
    with fs.volume_errors(paths.root):
        content = fs.read_bytes(path)
    if content is None:
        reason = "it is a file" if paths.root.is_file() else f"{path} does not exist"
        raise SpoolUnusable(
            f"{paths.root} is not a spool: {reason}; set TANDEM_ROOT to the shared volume's"
            " directory, or make a spool there first (the controller and `tandem up` do)"
        )
    try:
        version = int(json.loads(content)["schema_version"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SpoolUnusable(
            f'{path} is damaged; restore it: {{"schema_version": {SCHEMA_VERSION}}}'
        ) from error
    if version == SCHEMA_VERSION:
        return
    problem = f"{paths.root} has schema version {version}, this Tandem reads {SCHEMA_VERSION}"
    remedy = "use the same Tandem version in all containers"
    if version == 1:
        remedy = (
            "end its jobs with the Tandem that made it, stop that, and remove spool.json and jobs/:"
            " the runs stay"
        )
    raise SpoolUnusable(f"{problem}; {remedy}")
