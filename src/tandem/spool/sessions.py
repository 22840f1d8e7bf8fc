"""Sessions (`sessions/<id>/`), whose clients train by single API calls. Each of a session's models
is a run, `<id>-train-<number>`."""

import json
import os
import time
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.errors import Conflict, NotFound
from tandem.spool import fs
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.paths import Paths, listing, remembered
from tandem.spool.runs import Runs
from tandem.spool.schema import (
    ClientModel,
    ClientSampler,
    SavedName,
    SavedNames,
    SessionBeat,
    SessionEnd,
    SessionRecord,
)

_RECORD, _BEAT, _END = "session.json", "beat.json", "end.json"


# The result is cached, because the runner reads `end.json` of every session in each iteration of
# its loop.
@remembered
def _read_end(path: Path) -> SessionEnd | None:
    return fs.read_undamaged(path, SessionEnd)


class TrainingSessions:
    """All sessions. A session accepts requests until its client ends the session, or is silent for
    too long."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def create(
        self, *, submitted_by: str | None = None, labels: Mapping[str, str] | None = None
    ) -> SessionRecord:
        """A new session. The creation of a session counts as the first sign of life of the
        session's client."""
        record = SessionRecord(
            id=fs.new_ulid().lower(),
            created=time.time(),
            submitted_by=submitted_by,
            labels=dict(labels or {}),
        )
        directory = self._paths.session_dir(record.id)
        with fs.volume_errors(directory):
            fs.make_dir(directory.parent)
        with fs.staging(directory.parent) as staged:
            fs.write_json_atomic(staged / _RECORD, record)
            fs.write_json_atomic(staged / _BEAT, SessionBeat(time=record.created))
            fs.rename_dir(staged, directory)
        return record

    def get(self, session: str) -> SessionRecord:
        """The session. Raises NotFound (field `session`) if the session does not exist, or if its
        record is damaged."""
        record = fs.read_undamaged(self._paths.session_dir(session) / _RECORD, SessionRecord)
        if record is None:
            raise NotFound(f"there is no session {session!r}", field="session")
        return record

    def ids(self) -> list[str]:
        """All sessions, the oldest first."""
        return [*listing(self._paths.sessions)]

    def unended(self) -> list[str]:
        """The sessions that have not ended, the oldest first."""
        return [session for session in self.ids() if self.ended(session) is None]

    def beat(self, session: str) -> None:
        """Records that the session's client is alive. Raises NotFound if the session does not
        exist. Raises Conflict (field `session`) if the session has ended."""
        self.check_open(session)
        path = self._paths.session_dir(session) / _BEAT
        fs.write_json_atomic(path, SessionBeat(time=time.time()), durable=False)

    def check_open(self, session: str) -> None:
        """Raises NotFound if the session does not exist. Raises Conflict (field `session`) if the
        session has ended."""
        self.get(session)
        if (end := self.ended(session)) is not None:
            raise Conflict(f"session {session!r} has ended: {end.reason}", field="session")

    def ended(self, session: str) -> SessionEnd | None:
        return _read_end(self._paths.session_dir(session) / _END)

    def end(self, session: str, reason: str) -> None:
        """Ends a session: it accepts no further requests. If the session has ended before, the
        first reason is kept. Raises NotFound if the session does not exist."""
        self.get(session)
        if self.ended(session) is None:
            path = self._paths.session_dir(session) / _END
            fs.write_json_atomic(path, SessionEnd(finished=time.time(), reason=reason))

    def expire(self, seconds: float) -> list[str]:
        """Ends the sessions whose clients have been silent for more than `seconds`. Returns the ids
        of the ended sessions."""
        silent = []
        for session in self.unended():
            beat = fs.read_undamaged(self._paths.session_dir(session) / _BEAT, SessionBeat)
            if beat is not None and time.time() - beat.time > seconds:
                self.end(session, f"its client was not heard of for {seconds:g} s")
                silent.append(session)
        return silent

    def put_model(self, session: str, number: int, model: ClientModel) -> None:
        """Writes a model's record. Raises Conflict (field `model_seq_id`) if another model has this
        number."""
        self._put(session, f"model-{number}.json", model, "model_seq_id")

    def model(self, session: str, number: int) -> ClientModel:
        """The model's record. Raises NotFound (field `model_id`) if the model does not exist."""
        path = self._paths.session_dir(session) / f"model-{number}.json"
        if (found := fs.read_undamaged(path, ClientModel)) is None:
            raise NotFound(f"session {session!r} has no model {number}", field="model_id")
        return found

    def put_sampler(self, session: str, number: int, sampler: ClientSampler) -> None:
        """Writes a sampler's record. Raises Conflict (field `sampling_session_seq_id`) if another
        sampler has this number."""
        self._put(session, f"sampler-{number}.json", sampler, "sampling_session_seq_id")

    def sampler(self, session: str, number: int) -> ClientSampler:
        """The sampler's record. Raises NotFound (field `sampling_session_id`) if the sampler does
        not exist."""
        path = self._paths.session_dir(session) / f"sampler-{number}.json"
        if (found := fs.read_undamaged(path, ClientSampler)) is None:
            problem = f"session {session!r} has no sampler {number}"
            raise NotFound(problem, field="sampling_session_id")
        return found

    def use_sampler(self, session: str, number: int) -> None:
        """Records that the sampler's client samples now."""
        path = self._paths.session_dir(session) / f"sampler-{number}.json"
        with fs.volume_errors(path), suppress(FileNotFoundError):
            os.utime(path)

    def sampler_used(self, session: str, number: int) -> float:
        """The time at which the sampler's client last sampled, in Unix seconds by the volume's
        clock; 0 if the client never sampled."""
        with suppress(OSError):
            path = self._paths.session_dir(session) / f"sampler-{number}.json"
            return path.stat().st_mtime
        return 0.0

    def samplers(self, session: str) -> list[int]:
        """The numbers of a session's samplers."""
        names = listing(self._paths.session_dir(session))
        return sorted(
            int(name.removeprefix("sampler-").removesuffix(".json"))
            for name in names
            if name.startswith("sampler-")
        )

    def _put(
        self, session: str, name: str, record: ClientModel | ClientSampler, field: str
    ) -> None:
        self.get(session)
        path = self._paths.session_dir(session) / name
        known = fs.read_undamaged(path, type(record))
        if known is not None and known != record:
            raise Conflict(f"session {session!r} has another one of this number", field=field)
        if known is None:
            fs.write_json_atomic(path, record)

    def run_name(self, session: str, number: int) -> str:
        """The name of the run that belongs to model `number` of the session. The run's
        `RunSpec.session` refers to the session."""
        self._paths.session_dir(session)
        return f"{session}-train-{number}"

    def runs(self, session: str) -> list[str]:
        """The names of the session's runs that exist."""
        prefix, names = f"{session}-train-", listing(self._paths.runs)
        found = []
        for name in names[bisect_left(names, prefix) :]:
            if not name.startswith(prefix):
                break
            found.append(name)
        return sorted(found, key=lambda name: (len(name), name))


class CheckpointNames:
    """Names that clients gave to checkpoints, `runs/<run>/names.json`. A named checkpoint is
    pinned."""

    def __init__(self, runs: Runs, checkpoints: Checkpoints) -> None:
        self._runs, self._checkpoints = runs, checkpoints

    def list(self, run: str) -> list[SavedName]:
        """The names of a run's checkpoints, in the order in which they were assigned. Raises
        NotFound if the run does not exist."""
        path = self._runs.directory(run) / "names.json"
        return [*(fs.read_undamaged(path, SavedNames) or SavedNames()).names]

    def find(self, run: str, group: str, name: str) -> SavedName:
        """The checkpoint with this name. Raises NotFound (field `name`) if no checkpoint has the
        name.

        Args:
            group: "weights" or "sampler"; each group has its own names.
        """
        for saved in self.list(run):
            if (saved.group, saved.name) == (group, name):
                return saved
        raise NotFound(f"run {run!r} has no checkpoint {json.dumps(name)}", field="name")

    def put(self, run: str, saved: SavedName) -> None:
        """Gives the name `saved.name` to the checkpoint `saved.step`. If another checkpoint in the
        same group has this name, that checkpoint loses the name."""
        self._checkpoints.pin(run, saved.step)
        self._replace(run, saved, saved)

    def remove(self, run: str, group: str, name: str) -> None:
        """Forgets the name of a checkpoint. Raises NotFound if no checkpoint has the name. A
        checkpoint without any name is no longer pinned.

        Args:
            group: "weights" or "sampler", as for `find`.
        """
        self._replace(run, self.find(run, group, name), None)

    def _replace(self, run: str, old: SavedName, new: SavedName | None) -> None:
        with self._runs.lock(run):
            before = self.list(run)
            names = [one for one in before if (one.group, one.name) != (old.group, old.name)]
            names += [] if new is None else [new]
            path = self._runs.directory(run) / "names.json"
            fs.write_json_atomic(path, SavedNames(names=tuple(names)))
            for step in {one.step for one in before} - {one.step for one in names}:
                self._checkpoints.unpin(run, step)
