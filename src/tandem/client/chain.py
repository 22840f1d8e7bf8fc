"""Trains a file of examples or pairs by a chain of jobs, for a training that is longer than one
job. Each job trains a slice of the file and makes a checkpoint.

The jobs' names are hashes of the file's content and the settings. A second call with the same file
and settings therefore continues after the last job that has made its checkpoint. Only the slice of
one job is in memory.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.client.clients import Tandem
from tandem.client.http import discarded, raise_if_other
from tandem.controller.schemas import JobStatus
from tandem.data.chain_plan import LIMITS, ChainPlan, DPOTraining, SFTTraining, Slice
from tandem.errors import Conflict, InvalidInput, JobFailed, NotFound
from tandem.spool.schema import PENDING, Event

OnStep = Callable[[int, Event], object]


class Chain:
    """The chain of jobs of one training. Raises InvalidInput (field: the setting, or the file) if
    the training's data can't be opened or is too small."""

    def __init__(self, config: SFTTraining | DPOTraining) -> None:
        self.config = config
        self._plan = ChainPlan(config)
        self.examples, self.total = self._plan.examples, self._plan.total
        self.slices = self._plan.slices
        held_out_digest = (
            _digest(Path(config.held_out))
            if isinstance(config.held_out, str)
            else str(config.held_out)
        )
        # After a refusal, a user may change `sequence_length`, `too_long` and the limits, and
        # continue the training. So the names of jobs do not depend on these settings.
        settings = config.model_dump_json(
            exclude={"data", "held_out", "sequence_length", "too_long", *LIMITS}
        )
        content = [settings, _digest(Path(config.data)), held_out_digest]
        share = "" if isinstance(config.held_out, str) else held_out_digest
        self._labels = {
            "settings": hashlib.sha256(f"{settings}\n{share}".encode()).hexdigest()[:20],
            "data": content[1][:20],
        }
        self._data_state = _state(Path(config.data))
        self.name = f"{config.kind}-{hashlib.sha256('\n'.join(content).encode()).hexdigest()[:20]}"

    def run(self, tandem: Tandem, on_step: OnStep = lambda *_: None) -> JobStatus:
        """Submit the jobs that are not done yet, and wait for the last job. While a job trains, the
        next job is already submitted.

        `on_step(optimizer steps so far, event)` is called for each event of a job. When a job
        fails, raises JobFailed and submits no further job; calling `run` again tries the failed job
        once more. Raises Conflict if another training has trained the run between two jobs of this
        chain, or if the run's `trainable` or `lora` differ from the settings. Also raises Conflict
        if the file has changed since an earlier part of the same training.
        """
        made = False
        try:
            raise_if_other(
                tandem.get_run(self.config.run), self.config.model_dump(exclude_unset=True), "lora"
            )
        except NotFound:
            tandem.create_run(
                self.config.run, trainable=self.config.trainable, lora=self.config.lora
            )
            made = True
        first, start = self._done(tandem)
        if not first:
            self._raise_if_changed(tandem)
        if first == len(self.slices) and start is not None:
            newest = f"{self.config.run}@{start + first}"
            raise Conflict(
                f"this training is complete: it made {newest}; for another one change its seed"
            )
        try:
            job = self._submit(tandem, self.slices[first], start)
        except InvalidInput:
            if made:
                tandem.delete_run(self.config.run)
            raise
        start = job.spec.base_step - first
        for part in self.slices[first:]:
            ahead = job
            try:
                if part != self.slices[-1]:
                    ahead = self._submit(tandem, self.slices[part.number + 1], start)
                done = tandem.wait_job(
                    job.id,
                    math.inf,
                    lambda event: on_step(_steps(part, event), event),  # noqa: B023
                )
            except Conflict:
                # `wait_job` raises JobFailed if the job failed before the next job was submitted.
                tandem.wait_job(job.id, math.inf)
                raise
            except JobFailed:
                if ahead != job:
                    tandem.cancel(ahead.id)
                raise
            job = ahead
        return done

    def _done(self, tandem: Tandem) -> tuple[int, int | None]:
        """The number of jobs that have made their checkpoints, and the step that the first job
        started from, if known."""
        for checkpoint in reversed(tandem.checkpoints(self.config.run)):
            name, _, rest = (checkpoint.job or "").partition(".")
            if name == self.name:
                done = int(rest.partition(".")[0]) + 1
                return done, checkpoint.step - done
        return 0, None

    def _raise_if_changed(self, tandem: Tandem) -> None:
        """Raises Conflict if the run's newest job belongs to an unfinished training with the same
        settings but other data. Without this check, a new training would start on a half-trained
        run."""
        run = self.config.run
        jobs, last = tandem.list_jobs(run, PENDING), tandem.checkpoints(run)[-1]
        with suppress(NotFound):  # the job was removed, and nothing is known of its training
            if last.job:
                jobs.insert(0, tandem.get_job(last.job))
        if not jobs or any(job.spec.labels.get("training") == self.name for job in jobs):
            return  # jobs of this training exist already, or no job exists
        newest = jobs[-1].spec.labels
        done, _, total = newest.get("part", "").partition("/")
        if newest.get("settings") != self._labels["settings"] or done == total:
            return
        changed = self.config.data
        if newest.get("data") == self._labels["data"]:
            changed = str(self.config.held_out)
        start = jobs[-1].spec.base_step + 1 - int(done)
        raise Conflict(
            f"{changed} is not what {run} is half trained on: job {done} of {total} is the newest."
            " To go on, restore the file as it was. To train the changed file instead, roll the run"
            f" back (tandem checkpoints rollback {run} {start}), or change the training's"
            " seed to begin on the newest step",
            field="data" if changed == self.config.data else "held_out",
        )

    def _submit(self, tandem: Tandem, part: Slice, start: int | None) -> JobStatus:
        """The job of this slice. An existing job is used if it is queued or running, or if it has
        succeeded and no rollback has discarded its step. Otherwise a new job is submitted."""
        tries = (
            f"{self.name}.{part.number:05}" + (f".{again}" if again else "")
            for again in range(1000)
        )
        for name in tries:
            try:
                job = tandem.get_job(name)
            except NotFound:
                try:
                    return tandem.train(self.config.run, self._request(part, name, start))
                except InvalidInput as error:
                    raise self._plan.as_given(error, part) from error
            if job.state not in ("failed", "cancelled") and not self._rolled_back(tandem, job):
                return job
        raise Conflict(
            f"part {part.number} of {self.name} has failed too often; change the training's seed"
        )

    def _rolled_back(self, tandem: Tandem, job: JobStatus) -> bool:
        """Whether the job has succeeded, but a rollback has discarded the step that it made."""
        if job.state != "succeeded":
            return False
        return discarded(job.id, job.spec.base_step, tandem.checkpoints(self.config.run))

    def _request(self, part: Slice, name: str, start: int | None) -> dict[str, Any]:
        self._raise_if_written()
        labels = {"training": self.name, **self._labels}
        return self._plan.request(part, name, start, labels)

    def _raise_if_written(self) -> None:
        """Raises Conflict if the file's content has changed since this training was opened."""
        path = Path(self.config.data)
        with suppress(OSError):
            if (state := _state(path)) == self._data_state:
                return
            if _digest(path)[:20] == self._labels["data"]:
                self._data_state = state  # same content: the file was copied or touched
                return
        raise Conflict(
            f"{path} has changed while it trains. Restore it as it was; then the same command goes"
            " on",
            field="data",
        )


def _steps(part: Slice, event: Event) -> int:
    """The number of optimizer steps of the whole training that are done when the event is written.
    The event belongs to the job of the slice `part`."""
    if event.type == "succeeded":
        return part.last
    return part.first + (int(event.data["step"]) if event.type in ("step", "evaluated") else 0)


def _state(path: Path) -> tuple[int, ...]:
    """A file's inode, size and mtime, which change when the file is written; () for a directory."""
    found = path.stat()
    return () if path.is_dir() else (found.st_ino, found.st_size, found.st_mtime_ns)


def _digest(path: Path) -> str:
    """The SHA-256 of a file's content, or of the names and sizes of a directory's files."""
    if path.is_dir():
        names = sorted(
            (str(file.relative_to(path)), file.stat().st_size)
            for file in path.rglob("*")
            if file.is_file()
        )
        return hashlib.sha256(repr(names).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
