"""The settings of `tandem rl`, from a TOML file."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandem.client import sampling_options
from tandem.data.inputs import AdvantageSettings, PackingSettings
from tandem.errors import InvalidInput
from tandem.spool.schema import (
    LoraShape,
    OptimizerSettings,
    Record,
    RLLoss,
    RunName,
    Schedule,
    Serving,
    Trainable,
)


class RunSection(Record):
    """The run; it is created if it does not exist."""

    name: RunName
    trainable: Trainable = "lora"
    lora: LoraShape | None = None
    weights: Serving | None = None
    seed: int = Field(default=0, ge=0, lt=2**63, strict=True)


class EnvironmentSection(Record):
    """An environment. `use`: "module:name" of a class or a function, "verifiers:taskset" or
    "reasoning_gym:dataset". `weight`: the environment's share of the groups."""

    use: str = Field(pattern=r"^[\w.]+:\S+$")
    weight: float = Field(default=1.0, gt=0)
    arguments: dict[str, Any] = Field(default_factory=dict)


class DistillSection(Record):
    """On-policy distillation. The served model `model` scores the run's samples. `coef` times a
    token's part of the reverse KL is subtracted from the token's advantage. `rewards`: whether the
    advantages from the environment's rewards are trained too."""

    model: str = Field(min_length=1)
    coef: float = Field(default=1.0, gt=0)
    rewards: bool = False


class EvalSection(Record):
    """Evaluations at step 0, every `every` steps, and at the end. An evaluation has `samples`
    rollouts of each of the first `groups` tasks. If there are several sections, only the first
    section decides which step is the best, and only the first section may have `stop_after`."""

    name: str = Field(default="", pattern=r"^[\w.-]{0,64}$")
    every: int = Field(default=10, ge=1)
    groups: int = Field(default=8, ge=1)
    samples: int = Field(default=1, ge=1)
    environment: EnvironmentSection | None = None  # None: the first of [[rl.environment]]

    # Options of vLLM; each replaces the option of the same name in [rl.sampling].
    sampling: dict[str, Any] = Field(default_factory=dict)
    pass_at: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    passes: float = 1.0  # the lowest reward of an answer that passes

    # The training ends after `stop_after` evaluations in a row that are no better than an earlier
    # one.
    stop_after: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _samples_enough(self) -> Self:
        if self.pass_at and max(self.pass_at) > self.samples:
            raise ValueError(
                f"pass_at has {max(self.pass_at)}, samples is {self.samples}; raise samples"
            )
        _raise_if_set(self.sampling)
        return self


_SET_BY_THE_LOOP = {"model", "messages", "n", "stream", "logprobs", "return_token_ids"}
OF_JOBS = {
    "loss",
    "advantage",
    "optimizer",
    "packing",
    "deadline_seconds",
    "stall_seconds",
    "max_attempts",
}
"""Settings of `RLSection` that each job gets unchanged."""


class RLSection(Record):
    steps: int = Field(ge=1)
    groups_per_step: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    # Number of groups that roll out at the same time. None: as many groups as
    # `max_off_policy_steps` + 1 jobs need.
    groups_in_flight: int | None = Field(default=None, ge=1)
    max_off_policy_steps: int = Field(default=0, ge=0)
    dynamic_sampling: bool = True  # groups whose rewards are all equal are replaced
    on_stale: Literal["drop"] = "drop"
    # Whether all turns of a rollout sample from the same step: the step of the first turn.
    pin: bool = False
    retries: int = Field(default=2, ge=0)  # further tries of a rollout that raised an error
    rollout_seconds: float = Field(default=600.0, gt=0)
    sampling: dict[str, Any] = Field(default_factory=dict)
    loss: RLLoss = RLLoss()
    advantage: AdvantageSettings = AdvantageSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    packing: PackingSettings = PackingSettings()
    # `deadline_seconds`, `stall_seconds` and `max_attempts` limit each job.
    deadline_seconds: float = Field(default=3600.0, gt=0)
    stall_seconds: float = Field(default=600.0, gt=0)
    max_attempts: int = Field(default=3, ge=1, le=100)
    distill: DistillSection | None = None
    environment: list[EnvironmentSection] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _long_rollouts_are_cut_by_default(cls, given: Any) -> Any:
        """Sets the default of `too_long` to "truncate". A rollout that is longer than a row would
        fail under a job's own default, "refuse"."""
        if isinstance(given, dict) and isinstance(packing := given.get("packing", {}), dict):
            return {**given, "packing": {"too_long": "truncate", **packing}}
        return given

    @model_validator(mode="after")
    def _samples_what_it_trains(self) -> Self:
        _raise_if_set(self.sampling)
        if self.sampling.get("seed") is not None:
            raise ValueError(
                "sampling.seed makes all rollouts of a group the same text; leave it out"
            )
        try:
            sampling_options(**self.sampling)
        except InvalidInput as error:
            raise ValueError(f"sampling.{error}") from error
        sampled, trained = self.sampling.get("temperature", 1.0), self.loss.temperature
        if sampled != trained:
            raise ValueError(
                f"sampling.temperature is {sampled}, loss.temperature {trained}; make them equal"
            )
        if self.distill and trained != 1.0:
            raise ValueError(
                f"distill: the teacher's log-probs are of temperature 1, loss.temperature is"
                f" {trained}; set it and sampling.temperature to 1"
            )
        if self.optimizer.schedule != Schedule() and self.optimizer.batch_size is None:
            raise ValueError(
                "optimizer.schedule needs optimizer.batch_size (groups), which says how many steps"
                " a job has"
            )
        return self


def _raise_if_set(sampling: dict[str, Any]) -> None:
    if own := sampling.keys() & _SET_BY_THE_LOOP:
        raise ValueError(f"sampling.{min(own)} is set by the loop itself; remove it")


class Config(Record):
    run: RunSection
    rl: RLSection
    eval: list[EvalSection] = Field(default_factory=list)

    @field_validator("eval", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        """`[eval]` is one evaluation, `[[eval]]` several."""
        return [] if given is None else [given] if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [section.name for section in self.eval]
        if len(set(names)) < len(names):
            raise ValueError("eval: several evaluations need a name each, and other names")
        for section in self.eval[1:]:
            if section.stop_after is not None:
                raise ValueError(
                    f"eval: stop_after of {section.name!r} does nothing; give it to the first"
                    " evaluation"
                )
        return self
