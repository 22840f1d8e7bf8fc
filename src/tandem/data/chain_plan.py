"""Cuts a file of examples or pairs into a chain of jobs. Chooses the records of each job and their
order, and makes the job's request. Only the records of one job are in memory at a time. The module
imports no numpy and no torch."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tandem.data.examples import JsonObject, PreferencePair, SFTExample
from tandem.data.formats import Examples
from tandem.data.inputs import PackingSettings
from tandem.errors import InvalidInput
from tandem.spool.schema import (
    LoraShape,
    OptimizerSettings,
    PreferenceLoss,
    Record,
    RunName,
    Schedule,
    SFTLoss,
    Trainable,
)

LIMITS = {"deadline_seconds", "stall_seconds", "max_attempts"}
RATES = {"sft": 2e-4, "dpo": 2e-5}
"""The learning rate if the training sets none."""


class TrainingConfig(Record):
    """The options of `tandem train sft` and `tandem train dpo`, on the command line or as keys of a
    TOML file."""

    run: RunName
    data: str  # a file of examples or pairs; docs/data.md lists the formats
    format: str = "auto"
    # Held-out records, whose loss is computed but which are not trained: a file, or a fraction of
    # `data`.
    held_out: float | str | None = Field(default=None, union_mode="left_to_right")
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)  # examples or pairs per optimizer step
    learning_rate: float | None = Field(default=None, gt=0)  # default: 2e-4 for SFT, 2e-5 for pairs
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    # Optimizer steps of the warmup; a number below 1 is a fraction of all steps.
    warmup: float = Field(default=0.03, ge=0)
    floor: float = Field(default=0.0, ge=0, le=1)  # last learning rate / highest learning rate
    checkpoint_every: int = Field(default=100, ge=1)  # optimizer steps of each job
    evaluate_every: int = Field(default=1, ge=1)  # number of jobs per held-out loss
    sequence_length: int = PackingSettings.model_fields["sequence_length"].default
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    trainable: Trainable = "lora"  # the run is created with `trainable` and `lora`
    lora: LoraShape | None = None
    optimizer: OptimizerSettings = OptimizerSettings()  # Adam's other settings

    # The chat template's variables for all records; a record's own variables override them.
    chat_template_kwargs: JsonObject = Field(default_factory=dict)
    seed: int = Field(default=0, strict=True)  # seed of the examples' order

    # `deadline_seconds`, `stall_seconds` and `max_attempts` limit each job.
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
    """A job of the chain: optimizer steps [first, last) of the whole training. A job has a part of
    one epoch, or one or several whole epochs. The trainer visits the job's batches in another order
    in each epoch."""

    number: int
    first: int
    last: int


class ChainPlan:
    """The jobs of one training. Raises InvalidInput (field: the setting, or the file) if the
    training's data can't be opened or is too small."""

    def __init__(self, config: SFTTraining | DPOTraining) -> None:
        self.config = config
        self._key = "pairs" if config.kind == "dpo" else "examples"
        self._data = _checked(config.data, config)
        self._held_out_file: Examples | None = None
        self._held_out: list[tuple[str, dict[str, Any]]] = []  # (place in the file, record)
        indices = list(range(len(self._data)))
        if isinstance(config.held_out, float):
            random.Random(f"{config.seed} held out").shuffle(indices)
            size = max(1, round(config.held_out * len(indices)))
            self._held_out = [self._data[index] for index in indices[:size]]
            indices = sorted(indices[size:])
        elif config.held_out is not None:
            self._held_out_file = others = _checked(config.held_out, config)
            self._held_out = [others[index] for index in range(len(others))]
        if not indices:
            raise InvalidInput(f"{config.data} has nothing to train", field="data")
        self._indices = indices
        self.examples = len(indices)
        self._per_epoch = math.ceil(len(indices) / config.batch_size)
        self.total = config.epochs * self._per_epoch
        self.slices = slices(self.total, self._per_epoch, config.checkpoint_every)
        warmup = round(config.warmup * self.total) if config.warmup < 1 else round(config.warmup)
        warmup = min(warmup, self.total - 1)
        self._schedule = Schedule(
            shape=config.schedule, total=self.total, warmup=warmup, floor=config.floor
        )

    def parsed(self) -> Iterator[tuple[str, SFTExample | PreferencePair]]:
        """The place and the content of each record of the file, then of the held-out file."""
        for data in filter(None, (self._data, self._held_out_file)):
            for index in range(len(data)):
                yield data.parse(index)

    def request(
        self, part: Slice, name: str, start: int | None, labels: Mapping[str, str]
    ) -> dict[str, Any]:
        """The request for the job with the id `name`, which trains the slice `part`.

        Args:
            start: the step that the chain's first job starts from, if known.
        """
        config, loss = self.config, self.config.loss
        follows = start is not None
        if (
            follows
            and config.kind == "dpo"
            and config.loss.kind != "simpo"
            and config.loss.reference == "start"
        ):
            # All jobs of the chain have the same reference: the step before the first job.
            loss = config.loss.model_copy(update={"reference": start})
        rate = config.learning_rate or RATES[config.kind]
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
            "labels": {**labels, "part": f"{part.number + 1}/{len(self.slices)}"},
            **config.model_dump(include=LIMITS),
        }

    def as_given(self, error: InvalidInput, part: Slice) -> InvalidInput:
        """Rewrites the error with which the controller refused a request. The index in a field such
        as `examples.17.messages` becomes the record's place in the file. A setting's name becomes
        the name in `TrainingConfig`, such as `too_long` for `packing.too_long`."""
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
        """The indices of a job's records, in an order that the seed and the epoch decide."""
        epoch, step = divmod(part.first, self._per_epoch)
        order = list(self._indices)
        random.Random(f"{self.config.seed} {epoch}").shuffle(order)
        size = self.config.batch_size
        # A job of several epochs has every record, because the end index lies beyond the list.
        return order[step * size : (step + part.last - part.first) * size]


def slices(total: int, per_epoch: int, most: int) -> list[Slice]:
    """The jobs of a training. A job has as many whole epochs as fit into `most` steps. If not even
    one epoch fits, a job has a part of one epoch.

    Args:
        total: optimizer steps of all jobs together.
        per_epoch: optimizer steps of an epoch.
        most: the most optimizer steps of a job.
    """
    block = max(1, most // per_epoch) * per_epoch
    firsts = [
        first
        for start in range(0, total, block)
        for first in range(start, min(start + block, total), most)
    ]
    return [Slice(number, *steps) for number, steps in enumerate(pairwise([*firsts, total]))]


def _checked(path: str, config: SFTTraining | DPOTraining) -> Examples:
    """The opened file. Every record is validated first, so that no record is refused in the middle
    of the training."""
    examples = Examples(path, config.format, config.kind, config.chat_template_kwargs)
    for index in range(len(examples)):
        examples.parse(index)
    return examples
