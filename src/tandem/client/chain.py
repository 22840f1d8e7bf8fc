"""A training longer than a job: a file of examples or pairs as a chain of jobs, each of which makes
a checkpoint.

The content of the file and the settings name the jobs, so the same training started again goes on
where it was: the run's checkpoints say which jobs have succeeded. Only the slice of one job is in
memory.
"""

import hashlib
import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tandem.client.clients import Tandem
from tandem.client.http import discarded, raise_if_other
from tandem.controller.schemas import JobStatus
from tandem.data.examples import JsonObject
from tandem.data.formats import Examples
from tandem.data.inputs import PackingSettings
from tandem.errors import Conflict, InvalidInput, JobFailed, NotFound
from tandem.spool.schema import (
    PENDING,
    Event,
    LoraShape,
    OptimizerSettings,
    PreferenceLoss,
    Record,
    RunName,
    Schedule,
    SFTLoss,
    Trainable,
)

OnStep = Callable[[int, Event], object]
_LIMITS = {"deadline_seconds", "stall_seconds", "max_attempts"}


class TrainingConfig(Record):
    """What `tandem train sft` and `tandem train dpo` take: as options, or as keys of a TOML
    file."""

    run: RunName
    data: str  # a file of examples or pairs; docs/data.md lists the formats
    format: str = "auto"
    # A file, or a share of `data`: its loss is computed and not trained.
    held_out: float | str | None = Field(default=None, union_mode="left_to_right")
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)  # examples or pairs per optimizer step
    learning_rate: float | None = Field(default=None, gt=0)  # default: 2e-4 for SFT, 2e-5 for pairs
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: float = Field(default=0.03, ge=0)  # optimizer steps, or below 1 the share of all
    floor: float = Field(default=0.0, ge=0, le=1)  # share of the learning rate at the end
    checkpoint_every: int = Field(default=100, ge=1)  # optimizer steps of a job
    evaluate_every: int = Field(default=1, ge=1)  # jobs from one held-out loss to the next
    sequence_length: int = PackingSettings.model_fields["sequence_length"].default
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    trainable: Trainable = "lora"  # this and `lora`: of a run that does not exist yet
    lora: LoraShape | None = None
    optimizer: OptimizerSettings = OptimizerSettings()  # Adam's other settings
    chat_template_kwargs: JsonObject = Field(default_factory=dict)  # where a record has none
    seed: int = Field(default=0, strict=True)  # of the order of the examples
    # This and the next two: limits of each job.
    deadline_seconds: float = Field(default=86400.0, gt=0)
    stall_seconds: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)

    @model_validator(mode="after")
    def _share(self) -> Self:
        if isinstance(self.held_out, float) and not 0 < self.held_out < 1:
            raise ValueError("held_out is a file or a share between 0 and 1")
        others = {
            "learning_rate",
            "schedule",
            "epochs",
            "batch_size",
            "grad_accumulation_sequences",
        }
        if given := sorted(others & self.optimizer.model_fields_set):
            raise ValueError(
                f"optimizer.{given[0]}: the training sets it; see learning_rate, schedule and"
                " batch_size"
            )
        return self


class SFTTraining(TrainingConfig):
    kind: Literal["sft"] = "sft"
    loss: SFTLoss = SFTLoss()


class DPOTraining(TrainingConfig):
    kind: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = PreferenceLoss()


@dataclass(frozen=True)
class Slice:
    """A job of the chain: optimizer steps [first, last) of the whole training, which are a part of
    one epoch or several whole epochs. The trainer visits the batches of these in another order in
    each epoch."""

    number: int
    first: int
    last: int


class Chain:
    """One training. InvalidInput (field: the setting, or the file) if its data can't be opened or
    is too little."""

    def __init__(self, config: SFTTraining | DPOTraining) -> None:
        self.config = config
        self._key = "pairs" if config.kind == "dpo" else "examples"
        self._data = _checked(config.data, config)
        self._held_out: list[tuple[str, dict[str, Any]]] = []  # place and record
        indices = list(range(len(self._data)))
        if isinstance(config.held_out, float):
            random.Random(f"{config.seed} held out").shuffle(indices)
            size = max(1, round(config.held_out * len(indices)))
            self._held_out = [self._data[index] for index in indices[:size]]
            indices = sorted(indices[size:])
        elif config.held_out is not None:
            others = _checked(config.held_out, config)
            self._held_out = [others[index] for index in range(len(others))]
        if not indices:
            raise InvalidInput(f"{config.data} has nothing to train", field="data")
        self._indices = indices
        self.examples = len(indices)
        self._per_epoch = math.ceil(len(indices) / config.batch_size)
        self.total = config.epochs * self._per_epoch
        self.slices = _slices(self.total, self._per_epoch, config.checkpoint_every)
        held_out_digest = (
            _digest(Path(config.held_out))
            if isinstance(config.held_out, str)
            else str(config.held_out)
        )
        # What may be changed to go on after a refusal in mid-training names no job.
        settings = config.model_dump_json(
            exclude={"data", "held_out", "sequence_length", "too_long", *_LIMITS}
        )
        content = [settings, _digest(Path(config.data)), held_out_digest]
        share = "" if isinstance(config.held_out, str) else held_out_digest
        self._labels = {
            "settings": hashlib.sha256(f"{settings}\n{share}".encode()).hexdigest()[:20],
            "data": content[1][:20],
        }
        self._data_state = _state(Path(config.data))
        self.name = f"{config.kind}-{hashlib.sha256('\n'.join(content).encode()).hexdigest()[:20]}"
        warmup = round(config.warmup * self.total) if config.warmup < 1 else round(config.warmup)
        warmup = min(warmup, self.total - 1)
        self._schedule = Schedule(
            shape=config.schedule, total=self.total, warmup=warmup, floor=config.floor
        )

    def run(self, tandem: Tandem, on_step: OnStep = lambda *_: None) -> JobStatus:
        """Submit what is not done yet, one job ahead of the one that trains, and wait for the last.

        `on_step(optimizer steps so far, event)` is called for each event of a job. Raises
        JobFailed, with which the chain ends; `run` again takes that job up once more. Conflict if
        another training of the run came between, if it trains something else than `trainable` and
        `lora` say, or if the run is half trained on another content of the same file.
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
                # Raises JobFailed if it failed before the next one was submitted.
                tandem.wait_job(job.id, math.inf)
                raise
            except JobFailed:
                if ahead != job:
                    tandem.cancel(ahead.id)
                raise
            job = ahead
        return done

    def _done(self, tandem: Tandem) -> tuple[int, int | None]:
        """How many of the jobs have made their checkpoints, and the step that the first one started
        from, if known."""
        for checkpoint in reversed(tandem.checkpoints(self.config.run)):
            name, _, rest = (checkpoint.job or "").partition(".")
            if name == self.name:
                done = int(rest.partition(".")[0]) + 1
                return done, checkpoint.step - done
        return 0, None

    def _raise_if_changed(self, tandem: Tandem) -> None:
        """Conflict where the run's newest job is a part, not the last, of a training with these
        settings and other data: the same command would begin anew on a half-trained run."""
        run = self.config.run
        jobs, last = tandem.list_jobs(run, PENDING), tandem.checkpoints(run)[-1]
        with suppress(NotFound):  # it was removed, and nothing is known of its training
            if last.job:
                jobs.insert(0, tandem.get_job(last.job))
        if not jobs or any(job.spec.labels.get("training") == self.name for job in jobs):
            return  # its own first jobs are on their way
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
        """The job of this part: the one that waits, runs or has succeeded, or else a new one."""
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
                    raise self._as_given(error, part) from error
            if job.state not in ("failed", "cancelled") and not self._rolled_back(tandem, job):
                return job
        raise Conflict(
            f"part {part.number} of {self.name} has failed too often; change the training's seed"
        )

    def _rolled_back(self, tandem: Tandem, job: JobStatus) -> bool:
        """Whether the job has succeeded and its step has left the run's chain since."""
        if job.state != "succeeded":
            return False
        return discarded(job.id, job.spec.base_step, tandem.checkpoints(self.config.run))

    def _request(self, part: Slice, name: str, start: int | None) -> dict[str, Any]:
        config, loss = self.config, self.config.loss
        self._raise_if_written()
        follows = start is not None
        if (
            follows
            and config.kind == "dpo"
            and config.loss.kind != "simpo"
            and config.loss.reference == "start"
        ):
            # One reference for the whole chain.
            loss = config.loss.model_copy(update={"reference": start})
        rate = config.learning_rate or (2e-4 if config.kind == "sft" else 2e-5)
        evaluated = (part.number + 1) % config.evaluate_every == 0 or part.number + 1 == len(
            self.slices
        )
        own = {
            "schedule": self._schedule.model_copy(update={"start": part.first}),
            "batch_size": config.batch_size,
            "epochs": max(1, (part.last - part.first) // self._per_epoch),
            "learning_rate": rate,
        }
        return {
            "kind": config.kind,
            "id": name,
            "base_step": None if start is None else start + part.number,
            self._key: [self._data[index][1] for index in self._part(part)],
            "held_out": [record for _, record in self._held_out] if evaluated else [],
            "loss": loss.model_dump(),
            "packing": {"sequence_length": config.sequence_length, "too_long": config.too_long},
            "optimizer": config.optimizer.model_copy(update=own).model_dump(),
            "labels": {
                "training": self.name,
                "part": f"{part.number + 1}/{len(self.slices)}",
                **self._labels,
            },
            **config.model_dump(include=_LIMITS),
        }

    def _raise_if_written(self) -> None:
        """Conflict where the file has other content than when this training was opened."""
        path = Path(self.config.data)
        with suppress(OSError):
            if (state := _state(path)) == self._data_state:
                return
            if _digest(path)[:20] == self._labels["data"]:
                self._data_state = state  # it was copied or touched
                return
        raise Conflict(
            f"{path} has changed while it trains. Restore it as it was; then the same command goes"
            " on",
            field="data",
        )

    def _as_given(self, error: InvalidInput, part: Slice) -> InvalidInput:
        """A refusal of `examples.17.messages`, with the place in the file instead, and with the
        training's names of settings instead of the request's."""
        error = type(error)(error.message.replace("packing.", ""), field=error.field)
        name, index, *rest = [*(error.field or "").split("."), ""]
        if name == "packing":
            return InvalidInput(error.message, field=index)
        if name not in (self._key, "held_out") or not index.isdigit():
            return error
        at = int(index)
        place, _ = self._held_out[at] if name == "held_out" else self._data[self._part(part)[at]]
        return InvalidInput(
            error.message, field=f"{place}: {'.'.join(rest[:-1])}".removesuffix(": ")
        )

    def _part(self, part: Slice) -> list[int]:
        """The records of a job, in the order of its epoch, drawn from the seed."""
        epoch, step = divmod(part.first, self._per_epoch)
        order = list(self._indices)
        random.Random(f"{self.config.seed} {epoch}").shuffle(order)
        size = self.config.batch_size
        return order[step * size : (step + part.last - part.first) * size]  # of several epochs: all


def _slices(total: int, per_epoch: int, most: int) -> list[Slice]:
    """The jobs of `total` optimizer steps: each of as many whole epochs as `most` steps have, or of
    a part of one."""
    block = max(1, most // per_epoch) * per_epoch
    firsts = [
        first
        for start in range(0, total, block)
        for first in range(start, min(start + block, total), most)
    ]
    return [Slice(number, *steps) for number, steps in enumerate(pairwise([*firsts, total]))]


def _steps(part: Slice, event: Event) -> int:
    """Optimizer steps of the training that are done after this event of a part's job."""
    if event.type == "succeeded":
        return part.last
    return part.first + (int(event.data["step"]) if event.type in ("step", "evaluated") else 0)


def _checked(path: str, config: SFTTraining | DPOTraining) -> Examples:
    """The file, of which every record has the right shape: none is refused when half of them have
    trained."""
    examples = Examples(path, config.format, config.kind, config.chat_template_kwargs)
    for index in range(len(examples)):
        examples.parse(index)
    return examples


def _state(path: Path) -> tuple[int, ...]:
    """A file's inode, size and mtime, which change when it is written; empty: a directory."""
    found = path.stat()
    return () if path.is_dir() else (found.st_ino, found.st_size, found.st_mtime_ns)


def _digest(path: Path) -> str:
    """SHA-256 of a file; of a directory's files by name and size."""
    if path.is_dir():
        names = sorted(
            (str(file.relative_to(path)), file.stat().st_size)
            for file in path.rglob("*")
            if file.is_file()
        )
        return hashlib.sha256(repr(names).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
