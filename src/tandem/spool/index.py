"""Which jobs there are, from the names of their files alone; what is damaged never gets in the way.

Directories hold at most `BUCKET` queued jobs, or the ended jobs that were submitted within one hour. A directory that
has not changed is not listed again (`tandem.spool.listing`), so no answer costs more because there are many jobs.
"""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.spool.listing import listing
from tandem.spool.paths import BUCKET, Paths, is_run_name
from tandem.spool.schema import TERMINAL, JobKey, JobState


class _Parsed(NamedTuple):
    names: tuple[str, ...]  # as `listing` gave them
    by_name: dict[str, JobKey | None]
    keys: tuple[JobKey, ...]
    first: JobKey | None  # with the lowest base step
    base_steps: frozenset[int]
    junk: tuple[str, ...]  # names that are no job's


_NOTHING = _Parsed((), {}, (), None, frozenset(), ())


def _key(name: str) -> JobKey | None:
    return JobKey.parse(name.removesuffix(".json")) if name.endswith(".json") else None


class Index:
    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._parsed: dict[Path, _Parsed] = {}

    def keys(self, directory: Path) -> tuple[JobKey, ...]:
        """The jobs in one directory, by submission; the very same tuple as long as the directory has not changed."""
        return self._parse(directory).keys

    def directories(self, state: JobState, run: str | None = None) -> list[Path]:
        """The directories that hold the state's jobs, oldest jobs first; of queued jobs also by run."""
        top = self._paths.state_dir(state)
        if state == "running":
            return [top]
        if state in TERMINAL:
            return [top / name for name in listing(top)]
        runs = self.queued_runs() if run is None else [run]
        return [self._paths.queue_dir(name) / bucket for name in runs for bucket in listing(top / name)]

    def all(self, state: JobState) -> Iterator[JobKey]:
        """Every job in one state, in no order."""
        for directory in self.directories(state):
            yield from self.keys(directory)

    def count(self, state: JobState, run: str | None = None) -> int:
        """How many jobs are in one state; `run`: of this run."""
        if state == "queued":
            return sum(len(self.keys(directory)) for directory in self.directories(state, run))
        return sum(1 for key in self.all(state) if run in (None, key.run))

    def newest_first(self, state: JobState, run: str | None = None) -> Iterator[JobKey]:
        """The jobs in one state, newest first, listed as they are needed."""
        if state == "queued":
            runs = self.queued_runs() if run is None else [run]
            # Within a run, a later base step was submitted later, whatever the clocks say.
            return heapq.merge(*(self._newest_first(self.directories(state, name)) for name in runs), reverse=True)
        keys = self._newest_first(self.directories(state))
        return keys if run is None else (key for key in keys if key.run == run)

    def _newest_first(self, directories: Sequence[Path]) -> Iterator[JobKey]:
        for directory in reversed(directories):
            yield from reversed(self.keys(directory))

    def queued_runs(self) -> list[str]:
        """Runs that have, or had, queued jobs."""
        return [name for name in listing(self._paths.state_dir("queued")) if is_run_name(name)]

    def queued(self, run: str) -> Iterator[JobKey]:
        """The run's queued jobs in the order of their base steps, listed as they are needed."""
        for directory in self.directories("queued", run):
            yield from sorted(self.keys(directory), key=lambda key: (key.base_step, key))

    def heads(self) -> Iterator[JobKey]:
        """The queued job with the lowest base step of each run, listed as they are needed."""
        return (head for run in self.queued_runs() if (head := self._head(run)) is not None)

    def _head(self, run: str) -> JobKey | None:
        top = self._paths.queue_dir(run)
        firsts = (self._parse(top / bucket).first for bucket in listing(top))
        return next((key for key in firsts if key is not None), None)

    def running(self, run: str | None = None) -> list[JobKey]:
        """The running jobs, by submission."""
        return [key for key in self.keys(self._paths.state_dir("running")) if run in (None, key.run)]

    def first_gap(self, run: str, step: int, *, taken: frozenset[int], free: frozenset[int]) -> int:
        """The first base step from `step` on that is in `free`, or else neither in `taken` nor a queued job's."""
        while True:
            bucket = step // BUCKET
            queued = self._parse(self._paths.queue_dir(run, bucket)).base_steps - free
            end = (bucket + 1) * BUCKET
            if len(queued) == BUCKET:
                step = end
                continue
            while step < end and (step in queued or step in taken):
                step += 1
            if step < end:
                return step

    def junk(self) -> list[Path]:
        """Names among the jobs' files that belong to no job."""
        top = self._paths.state_dir("queued")
        found = [top / name for name in listing(top) if not is_run_name(name) or not (top / name).is_dir()]
        for state in ("queued", "running", *TERMINAL):
            for directory in self.directories(state):
                if directory.is_dir():
                    found += [directory / name for name in self._parse(directory).junk]
                else:
                    found.append(directory)
        return found

    def _parse(self, directory: Path) -> _Parsed:
        names = listing(directory)
        known = self._parsed.get(directory)
        if known is None or known.names is not names:
            if not names:
                self._parsed.pop(directory, None)
                return _NOTHING
            before = {} if known is None else known.by_name
            by_name = {name: before[name] if name in before else _key(name) for name in names}
            # Names sort as their keys do.
            keys = tuple(key for key in by_name.values() if key is not None)
            if known is not None and known.keys == keys:
                keys = known.keys
            junk = tuple(name for name, key in by_name.items() if key is None)
            first = min(keys, key=lambda key: (key.base_step, key), default=None)
            known = _Parsed(names, by_name, keys, first, frozenset(key.base_step for key in keys), junk)
            self._parsed[directory] = known
        return known
