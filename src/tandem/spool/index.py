"""Which jobs there are, from the names of their files alone; what is damaged never gets in the way.

Directories hold at most `BUCKET` queued jobs, or the ended jobs that were submitted within one hour. A directory that
has not changed is not listed again (`tandem.spool.listing`), so no answer costs more because there are many jobs.
"""

import heapq
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from tandem.spool.listing import listing
from tandem.spool.paths import BUCKET, Paths, is_run_name
from tandem.spool.schema import TERMINAL, JobKey, JobState


def _key(name: str) -> JobKey | None:
    return JobKey.parse(name.removesuffix(".json")) if name.endswith(".json") else None


class Index:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def keys(self, directory: Path) -> tuple[JobKey, ...]:
        """The jobs in one directory, by submission; the very same tuple as long as the directory has not changed."""
        names = listing(directory)
        if names.parsed is None:
            names.parsed = tuple(key for name in names if (key := _key(name)) is not None)
        return names.parsed

    def directories(self, state: JobState, run: str | None = None) -> list[Path]:
        """The directories that hold the state's jobs, oldest jobs first; of queued jobs also by run."""
        top = self._paths.state_dir(state)
        if state == "running":
            return [top]
        if state in TERMINAL:
            return [top / name for name in listing(top)]
        runs = self.queued_runs() if run is None else [run]
        return [self._paths.queue_dir(name) / bucket for name in runs for bucket in listing(top / name)]

    def count(self, state: JobState, run: str | None = None) -> int:
        """How many jobs are in one state; `run`: of this run."""
        if state == "queued":
            return sum(len(self.keys(directory)) for directory in self.directories(state, run))
        return sum(1 for _ in self.newest_first(state, run))

    def newest_first(self, state: JobState, run: str | None = None) -> Iterator[JobKey]:
        """The jobs in one state, newest first, listed as they are needed."""
        if state == "queued" and run is None:
            return heapq.merge(*(self.newest_first(state, name) for name in self.queued_runs()), reverse=True)
        # Within a run, a later base step was submitted later, whatever the clocks say.
        directories = reversed(self.directories(state, run))
        keys = (key for directory in directories for key in reversed(self.keys(directory)))
        return keys if run is None else (key for key in keys if key.run == run)

    def queued_runs(self) -> list[str]:
        """Runs that have, or had, queued jobs."""
        return [name for name in listing(self._paths.state_dir("queued")) if is_run_name(name)]

    def queued(self, run: str) -> Iterator[JobKey]:
        """The run's queued jobs in the order of their base steps, listed as they are needed."""
        for directory in self.directories("queued", run):
            yield from sorted(self.keys(directory), key=lambda key: (key.base_step, key))

    def heads(self) -> Iterator[JobKey]:
        """The queued job with the lowest base step of each run, listed as they are needed."""
        for run in self.queued_runs():
            yield from islice(self.queued(run), 1)

    def running(self, run: str | None = None) -> list[JobKey]:
        """The running jobs, by submission."""
        return [key for key in self.keys(self._paths.state_dir("running")) if run in (None, key.run)]

    def first_gap(self, run: str, step: int, running: Mapping[int, bool]) -> int:
        """The first base step from `step` on that no job takes. `running`: whether the run's running jobs take theirs,
        by base step; then the queue does not count, which a decided job's file may not have left yet."""
        while True:
            bucket = step // BUCKET
            queued = {key.base_step for key in self.keys(self._paths.queue_dir(run, bucket))}
            for gap in range(step, (bucket + 1) * BUCKET):
                if not running.get(gap, gap in queued):
                    return gap
            step = (bucket + 1) * BUCKET

    def junk(self) -> list[Path]:
        """Names among the jobs' files that belong to no job."""
        top = self._paths.state_dir("queued")
        found = [top / name for name in listing(top) if not is_run_name(name) or not (top / name).is_dir()]
        for state in ("queued", "running", *TERMINAL):
            for directory in self.directories(state):
                if not directory.is_dir():
                    found.append(directory)
                elif len(names := listing(directory)) > len(self.keys(directory)):
                    found += [directory / name for name in names if _key(name) is None]
        return found
