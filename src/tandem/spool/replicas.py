"""Several inference servers on one spool. `replicas/<id>.json` describes a server, and
`runs/<run>/served/<id>.json` has the steps of a run that this server serves.

A step is *announced* (`runs/<run>/served.json`) when every ready replica has verified this step or,
with merged weights, a newer step. A replica is one inference server. Each replica writes only its
own records. `announce` reads the records of all replicas under one lock, so its result does not
depend on the process that calls it.
"""

import re
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import InvalidInput, TandemError
from tandem.spool import fs
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.locks import file_lock, hold_publisher_lock
from tandem.spool.paths import Paths, listing, remembered
from tandem.spool.runs import Runs, ServedRecords
from tandem.spool.schema import Refused, Replica, ReplicaServed, Served
from tandem.system.environment import REPLICA_PATTERN

DEAD_SECONDS = 30.0
"""A replica whose record has not changed for this long is dead, and no step waits for it. Each
process measures these seconds with its own monotonic clock, because the hosts' clocks differ and
may be changed."""
FORGET_SECONDS = 600.0
"""The records of a replica that has been dead for this long are removed."""


@dataclass(frozen=True)
class Announcement:
    """The field `served` has the announced step of a run, and the newest step that all ready
    replicas refused. The field `verified` has all steps of the run that every ready replica
    serves."""

    served: Served | None
    verified: tuple[Served, ...]


class Replicas:
    def __init__(
        self, paths: Paths, runs: Runs, served: ServedRecords, checkpoints: Checkpoints
    ) -> None:
        self._paths, self._runs = paths, runs
        self._announced, self._checkpoints = served, checkpoints
        # Replica -> the last heartbeat (`beat`) in its record, and the monotonic time at which this
        # process first saw that heartbeat.
        self._seen: dict[str, tuple[float, float]] = {}

    def lock(self) -> AbstractContextManager[int]:
        """The lock for two kinds of changes: a replica becomes ready or stops being ready, or a
        step is announced."""
        fs.make_dir(self._paths.replicas)
        return file_lock(self._paths.replicas / "lock")

    def publisher_lock(self, replica: str) -> AbstractContextManager[None]:
        """The lock that the only publisher of a replica holds while it lives. If another publisher
        holds the lock, raises SpoolUnusable with that holder's name."""
        path = self._file(replica).with_suffix(".lock")
        fs.make_dir(path.parent)
        return hold_publisher_lock(self._paths, path)

    def put(self, record: Replica) -> None:
        """Writes a replica's record. The write is not durable, because a power loss ends the
        replica too."""
        fs.write_json_atomic(self._file(record.replica), record, durable=False)

    def all(self) -> dict[str, Replica]:
        """Replica id -> the replica's record if it can be read. Dead replicas are included."""
        records = {}
        for name in listing(self._paths.replicas):
            if name.endswith(".json"):
                record = fs.read_undamaged(self._paths.replicas / name, Replica)
                if record is not None and f"{record.replica}.json" == name:
                    records[record.replica] = record
        return records

    def living(self) -> dict[str, Replica]:
        """The replicas whose records changed within DEAD_SECONDS. A replica whose record this
        process reads for the first time counts as living, even if it died long ago. The method
        `fresh` compares the time in the record with this machine's clock, and therefore leaves out
        replicas that died long ago."""
        records = self.all()
        return {
            name: records[name] for name, age in self._ages(records).items() if age <= DEAD_SECONDS
        }

    def fresh(self) -> dict[str, Replica]:
        """The replicas that are alive according to this machine's clock. The method is for programs
        that call `fresh` only once, and that do not use the result for a decision."""
        now = time.time()
        return {
            name: record
            for name, record in self.all().items()
            if abs(now - record.beat) <= DEAD_SECONDS
        }

    def _ages(self, records: Mapping[str, Replica]) -> dict[str, float]:
        """Replica id -> the number of seconds since this process first read the replica's record,
        or last saw a change of the record."""
        now = time.monotonic()
        self._seen = {
            name: seen
            if (seen := self._seen.get(name, (0.0, now)))[0] == record.beat
            else (record.beat, now)
            for name, record in records.items()
        }
        return {name: now - since for name, (_, since) in self._seen.items()}

    def serves(self, run: str, replica: str) -> ReplicaServed:
        """The steps of a run that one replica serves. Raises NotFound (field `run`) if the run does
        not exist."""
        return _read_serves(self._of_run(run, replica)) or ReplicaServed()

    def put_serves(self, run: str, replica: str, record: ReplicaServed) -> None:
        """Writes the steps of a run that a replica serves, unless the record is unchanged."""
        path = self._of_run(run, replica)
        if fs.read_undamaged(path, ReplicaServed) != record:
            # `mkdir` without `parents` does not make the directory of a deleted run again.
            path.parent.mkdir(exist_ok=True)
            fs.write_json_atomic(path, record)

    def steps(self, run: str) -> dict[int, str]:
        """The steps of a run that living replicas serve, each with the id of a replica that serves
        it."""
        found: dict[int, str] = {}
        if fs.exists(self._paths.replicas):
            for replica in self.living():
                for served in self.serves(run, replica).steps:
                    found.setdefault(served.step, replica)
        return found

    def announce(self, run: str, *, one_step: bool) -> Announcement:
        """Writes the newest step that all ready replicas serve to the run's `served.json`. The
        caller holds `lock`.

        `one_step` is true for merged weights. With merged weights, a replica serves only one step
        at a time, and the oldest step that a ready replica serves is announced. `one_step` is false
        for adapters: a step is announced only if all ready replicas serve the step.
        """
        ready = [name for name, record in self.living().items() if record.ready]
        records = {name: self.serves(run, name) for name in ready}
        in_chain = {
            name: {(s.step, s.checkpoint): s for s in record.steps if self._checkpoints.has(run, s)}
            for name, record in records.items()
        }
        announced = self._announced.get(run)
        if not in_chain:
            return Announcement(announced, ())
        common = _oldest(in_chain) if one_step else _in_common(in_chain)
        if common:
            announced = self._put(run, common[0], records)
        elif announced is not None and not any(record.steps for record in records.values()):
            self._announced.withdraw(run)  # with merged weights, vLLM now serves another run
            announced = None
        elif announced is None and (refused := _refused_by_all(records, -1)) is not None:
            self._announced.put_refused(run, refused)
        return Announcement(announced, tuple(common))

    def _put(self, run: str, newest: Served, records: Mapping[str, ReplicaServed]) -> Served:
        refused = _refused_by_all(records, newest.step)
        step, reason = (None, None) if refused is None else (refused.step, refused.reason)
        record = newest.model_copy(update={"refused_step": step, "refused_reason": reason})
        if self._announced.get(run) != record:
            self._announced.put(run, record)
        return record

    def withdraw(self, replica: str) -> None:
        """Records that a replica's vLLM has nothing loaded. The announced step is kept while other
        replicas serve it."""
        with self.lock():
            fs.remove_file(self._file(replica))
            for run in self._runs.names():
                fs.remove_file(self._of_run(run, replica))
            self.withdraw_unserved()

    def withdraw_unserved(self, listed: Collection[str] = ()) -> None:
        """Withdraws the announced steps if no replica is ready. Keeps announced steps whose names
        are in `listed`. The argument `listed` has the steps that a vLLM still has and that a
        publisher is about to verify again. The caller holds `lock`."""
        if not any(record.ready for record in self.living().values()):
            for run in self._runs.names():
                announced = self._announced.get(run)
                if announced is not None and announced.model not in listed:
                    self._announced.withdraw(run)

    def forget_dead(self) -> None:
        """Removes the records of replicas that no longer exist, for example because the number of
        replicas was reduced. The caller holds `lock`."""
        ages = self._ages(self.all())
        for replica in [name for name, age in ages.items() if age > FORGET_SECONDS]:
            for run in self._runs.names():
                with suppress(TandemError):
                    fs.remove_file(self._of_run(run, replica))
            fs.remove_file(self._file(replica))

    def _file(self, replica: str) -> Path:
        if not re.fullmatch(REPLICA_PATTERN, replica):
            raise InvalidInput(f"{replica!r:.100} is not a replica's id", field="TANDEM_REPLICA")
        return self._paths.replicas / f"{replica}.json"

    def _of_run(self, run: str, replica: str) -> Path:
        return self._runs.directory(run) / "served" / self._file(replica).name


@remembered
def _read_serves(path: Path) -> ReplicaServed | None:
    return fs.read_undamaged(path, ReplicaServed)


_Steps = Mapping[str, Mapping[tuple[int, str], Served]]


def _in_common(replicas: _Steps) -> list[Served]:
    """The steps that all replicas serve, the newest first. Returns, for each step, the record of
    the replica that verified the step last."""
    keys = set.intersection(*(set(steps) for steps in replicas.values()))
    return [
        max((steps[key] for steps in replicas.values()), key=lambda served: served.verified)
        for key in sorted(keys, reverse=True)
    ]


def _oldest(replicas: _Steps) -> list[Served]:
    """A list with one step, the oldest of the replicas' newest steps. The list is empty if a
    replica serves no step."""
    newest = [
        max(steps.values(), key=lambda s: s.step, default=None) for steps in replicas.values()
    ]
    if None in newest:
        return []
    step = min(served.step for served in newest if served)
    return [max((s for s in newest if s and s.step == step), key=lambda s: s.verified)]


def _refused_by_all(records: Mapping[str, ReplicaServed], above: int) -> Refused | None:
    """The oldest of the replicas' newest refused steps, if it is newer than the step `above`. None
    if a replica has refused no step."""
    refusals = [record.refused for record in records.values()]
    if not refusals or None in refusals:
        return None
    found = min((refused for refused in refusals if refused), key=lambda refused: refused.step)
    return found if found.step > above else None
