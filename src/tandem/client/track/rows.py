"""Makes the rows for trackers from the events of a run's jobs. Each event of a type in KINDS is a
row. Also opens a file that only one `tandem track` may use, and imports optional packages.
"""

import fcntl
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from tandem.client import Event, JobStatus, RunSpec, Tandem
from tandem.client.memory import by_attempt
from tandem.client.rl.samples import read_samples, said
from tandem.errors import Conflict, InvalidInput, NotFound
from tandem.spool.schema import TERMINAL, SessionJob

KINDS = ("step", "evaluated", "succeeded", "served")
"""The types of events that become rows, in the order in which they occur for one optimizer step."""
_ALIASES = {"loss": "train/loss", "reward_mean": "train/reward", "held_out_loss": "eval/loss"}
_POLL_SECONDS = 1.0
SAMPLE_COLUMNS = ("step", "task", "reward", "text")
_SAMPLES = 20  # the most samples in the row of a checkpoint


class Position(NamedTuple):
    """The event from which a row is made. Positions are ordered by the submission of the jobs, and
    within a job by the order of its events."""

    created: float  # when the job was submitted, Unix seconds
    job: str
    seq: int  # sequence number of the event within its job
    step: int  # number of optimizer steps of the run so far

    def __str__(self) -> str:
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(*json.loads(text))


@dataclass(frozen=True)
class Row:
    position: Position
    kind: str  # one of KINDS
    time: float  # Unix seconds
    values: dict[str, float]
    parameters: dict[str, str]  # settings of the run and the job

    # Only for a checkpoint's row: the samples from the step that the job started from, if `tandem
    # rl` keeps samples.
    samples: Sequence[Mapping[str, Any]] = ()

    def table(self) -> list[tuple[int, str, float, str]]:
        """The samples as rows of SAMPLE_COLUMNS."""
        return [
            (one["step"], str(one.get("task")), float(one["reward"]), said(one))
            for one in self.samples
        ]

    def markdown(self) -> str:
        """The samples as a Markdown table."""
        return markdown(
            SAMPLE_COLUMNS,
            [(step, task, f"{reward:g}", text) for step, task, reward, text in self.table()],
        )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. Newlines and vertical bars in a cell's text are escaped."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Follower:
    """Reads the run's events, and makes rows of the events.

    Args:
        position: the event after which the reading begins; None: before the first event.
        samples: finds the file in which `tandem rl` keeps its samples, or returns None.
        follow: whether `rows` waits for later events, without end.
    """

    def __init__(
        self,
        tandem: Tandem,
        run: RunSpec,
        position: Position | None,
        samples: Callable[[], Path | None] = lambda: None,
        *,
        follow: bool,
    ) -> None:
        self._tandem, self._run, self._follow, self._find = tandem, run, follow, samples
        self._from = position[:2] if position else (0.0, "")
        self._seq = {position.job: position.seq} if position else {}  # job -> its last event read
        self._before: JobStatus | None = None

    def rows(self) -> Iterator[Row]:
        """All rows so far; with `follow` also all later rows, without end."""
        while True:
            for job in self._jobs():
                with suppress(NotFound):  # the job was removed after it was listed
                    yield from self._rows(job)
                self._from, self._before = (job.spec.created, job.id), job
            if not self._follow:
                return
            time.sleep(_POLL_SECONDS)

    def _jobs(self) -> list[JobStatus]:
        """The last job that was read, which may have new events, and the jobs that were submitted
        after it."""
        found: list[JobStatus] = []
        while not found or (found[0].spec.created, found[0].id) >= self._from:
            before = found[0].id if found else None
            page = self._tandem.list_jobs(
                self._run.name, limit=min(20 + 10 * len(found), 1000), before=before
            )
            if not page:
                break
            found = page + found
        return [job for job in found if (job.spec.created, job.id) >= self._from]

    def _rows(self, job: JobStatus) -> Iterator[Row]:
        seq, before = self._seq.get(job.id, -1), self._before
        live = self._follow and job.state not in TERMINAL
        for event in (
            self._tandem.events(job.id, seq, math.inf)
            if live
            else self._tandem.job_events(job.id, seq)
        ):
            if before and before.id != job.id and event.type in ("step", *TERMINAL):
                last, before, self._before = before, None, None
                # The previous job's event `served` comes after that job's terminal event. The row
                # of `served` belongs before the rows of the present job.
                yield from self._rows(last)
            self._seq[job.id] = event.seq
            if event.type in KINDS and (row := self._row(job, event)):
                yield row

    def _row(self, job: JobStatus, event: Event) -> Row | None:
        events = [event] if event.type == "step" else self._tandem.job_events(job.id)
        steps = [other for other in events if other.type == "step" and other.seq <= event.seq]
        if not steps:
            return None  # the file of the job's events was damaged
        values = _numbers(
            event.data.get("metrics") or event.data, "served/" if event.type == "served" else ""
        )
        values |= {alias: values[name] for name, alias in _ALIASES.items() if name in values}
        if event.type == "succeeded":
            values = _numbers(_checkpoint(job, events, event), "checkpoint/")
        settings = self._run.model_dump(exclude={"created"}) | job.spec.model_dump(
            include={"kind", "loss", "optimizer"}
        )
        position = Position(
            job.spec.created, job.id, event.seq, int(steps[-1].data["metrics"]["optimizer_step"])
        )
        samples = self._samples(job.spec.base_step) if event.type == "succeeded" else ()
        return Row(position, event.type, event.time, values, dict(_flat(settings)), samples)

    def _samples(self, step: int) -> Sequence[Mapping[str, Any]]:
        """The last `_SAMPLES` samples of the step, without the samples of evaluations."""
        file = self._find()
        kept = read_samples(file) if file else []
        return [
            one
            for one in kept
            if (one["run"], one["step"]) == (self._run.name, step) and not one.get("evaluated")
        ][-_SAMPLES:]


def _checkpoint(job: JobStatus, events: list[Event], end: Event) -> dict[str, Any]:
    """Statistics of the job's data, the bytes of its checkpoint, the seconds from the last claim to
    the event `end`, and the peak memory of all ranks."""
    found = {event.type: event for event in events}  # the last event of each type

    # If there is no event `checkpoint`, the rank that writes it died right after the commit.
    written = found["checkpoint"].data if "checkpoint" in found else {}
    ranks = by_attempt(events)[-1].ranks.values()
    peaks = [
        kinds.get("peak", 0) for rank in ranks for kinds in (rank.phases | rank.highest).values()
    ]
    of_data = {} if isinstance(job.spec, SessionJob) else job.spec.data.model_dump()
    return of_data | {
        "step": end.data["step"],
        "attempt": end.attempt,
        "seconds": end.time - found["claimed"].time,
        "bytes": written.get("bytes"),
        "write_seconds": written.get("seconds"),
        "peak_memory_bytes": max(peaks, default=None),
    }


def _numbers(data: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        prefix + name: float(value)
        for name, value in data.items()
        if isinstance(value, int | float)
    }


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as flat keys such as `optimizer.learning_rate`; settings that are None are
    left out."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, ",".join(value) if isinstance(value, tuple) else str(value)


def open_alone(path: Path) -> BinaryIO:
    """The file, opened for reading and appending, and created if it is missing. The file is locked
    until it is closed. Raises Conflict if another process has the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(
            f"another `tandem track` holds {path}; stop it first", field="--to"
        ) from error
    return file


def optional(module: str) -> Any:
    """A module of an optional package. Raises InvalidInput if the package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        extra = module.split(".")[0]
        raise InvalidInput(
            f"it needs a package: pip install 'tandem-rl[{extra}]' ({error})", field="--to"
        ) from error
