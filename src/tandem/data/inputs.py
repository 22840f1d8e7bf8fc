"""The input of RL: trajectories as vLLM sampled them, and settings. The module imports no numpy and
no torch. The input of SFT and preference training is in `tandem.data.examples`.

The trainer trains on the sampled token ids and never tokenises the text again.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandem.errors import InvalidInput, from_validation_error
from tandem.spool.schema import Record

# vLLM's log-probs come from a float32 log-softmax. Rounding may give a token of probability 1 a
# log-prob slightly above 0.
LOGPROB_SLACK = 1e-4
# No sampler draws a token of a probability below e^-100. A log-prob below -100 would give a ratio
# that the loss clamps, so nothing would be learned. The OpenAI server of vLLM writes -9999 if the
# server has no log-prob for the sampled token.
LOWEST_LOGPROB = -100.0
# A weight below LOWEST_WEIGHT vanishes in float32, or the weight's gradient is negligible compared
# with Adam's eps.
LOWEST_WEIGHT = 1e-6
# Rewards of a group count as equal if they differ by at most EQUAL_REWARDS, because rounding in a
# sum may cause such a difference.
EQUAL_REWARDS = 1e-6
MAX_TOKEN_ID = 2**31 - 1  # ids are stored as int32

# The largest number of float32, and its smallest positive normal number.
MAX_FLOAT32, MIN_FLOAT32 = (2 - 2**-23) * 2.0**127, 2.0**-126

# Every list, dict and text of a request has an upper bound. Values that are copied into a record
# have a small bound.
MOST_ITEMS = 2**24
MOST_KEYS = 256
LONGEST_NAME = 256
LONGEST_TEXT = 2**28
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
AnyMessage = Annotated[dict[Name, Any], Field(max_length=MOST_KEYS)]


def _check_ids(ids: list[int]) -> list[int]:
    # min and max check millions of ids several times faster than a pydantic constraint on each id.
    for bad in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= bad <= MAX_TOKEN_ID:
            raise ValueError(f"token id {bad} at index {ids.index(bad)} is outside [0, 2^31)")
    return ids


def _as_float32(value: float) -> float:
    """The value, or 0 if its size is below float32's smallest normal number, as with exp(-90)."""
    if abs(value) > MAX_FLOAT32:
        raise ValueError(f"{value} does not fit float32; it may be {MAX_FLOAT32:.7g} at most")
    return value if abs(value) >= MIN_FLOAT32 else 0.0


StrictFloat = Annotated[float, Field(strict=True)]
StoredFloat = Annotated[StrictFloat, AfterValidator(_as_float32)]
# With `fail_fast`, pydantic stops at the first wrong item of a long list. Without `fail_fast`,
# pydantic makes an error for each wrong item, and an error takes hundreds of times the item's
# memory.
TokenIds = Annotated[
    list[Annotated[int, Field(strict=True)]],
    Field(fail_fast=True, max_length=MOST_ITEMS),
    AfterValidator(_check_ids),
]


class Turn(Record):
    """One sampled assistant message.

    Attributes:
        `prompt_token_ids`: the token ids of the whole context.
        `token_ids`: the token ids of the sampled tokens, with the end-of-turn token.
        `logprobs`: the log-prob of each sampled token, in nats, at the sampling temperature. If the
            temperature is not 1, vLLM must run with `--logprobs-mode processed_logprobs`.
        `policy_step`: the step of the checkpoint from which the turn was sampled.
        `routed_experts`: for a mixture of experts, the experts that vLLM's router chose for each
            token except the last token. Training uses the same experts as sampling. The form is
            base64 of a file in NumPy's format, integers [tokens - 1, layers, experts per token].
            With `--enable-return-routed-experts`, vLLM returns the experts in this form.
        `reward`: the reward of this turn, in addition to the trajectory's reward.
        `advantage`: replaces the computed advantage.
        `advantages`: for each sampled token a number that is added to the turn's advantage.
    """

    prompt_token_ids: TokenIds = Field(min_length=1)
    token_ids: TokenIds = Field(min_length=1)
    logprobs: Annotated[list[StrictFloat], Field(fail_fast=True, max_length=MOST_ITEMS)]
    policy_step: Annotated[int, Field(strict=True, ge=0)] | None = None
    routed_experts: Text | None = None
    reward: StoredFloat | None = None
    advantage: StoredFloat | None = None
    advantages: (
        Annotated[list[StoredFloat], Field(fail_fast=True, max_length=MOST_ITEMS)] | None
    ) = None

    @field_validator("advantages")
    @classmethod
    def _one_for_each_token(
        cls, given: list[float] | None, info: ValidationInfo
    ) -> list[float] | None:
        expected = len(info.data.get("token_ids", given or []))
        if given is not None and len(given) != expected:
            raise ValueError(f"{len(given)} advantages for {expected} sampled tokens")
        return given

    @field_validator("logprobs")
    @classmethod
    def _logprobs(cls, logprobs: list[float], info: ValidationInfo) -> list[float]:
        expected = len(info.data.get("token_ids", logprobs))
        if len(logprobs) != expected:
            raise ValueError(
                f"{len(logprobs)} log-probs for {expected} sampled tokens; there must be one for"
                " each"
            )
        if (highest := max(logprobs, default=0.0)) > LOGPROB_SLACK:
            raise ValueError(
                f"{highest} at index {logprobs.index(highest)} is above 0; give log-probs in nats"
            )
        if (lowest := min(logprobs, default=0.0)) < LOWEST_LOGPROB:
            problem = (
                f"{lowest} at index {logprobs.index(lowest)} is below {LOWEST_LOGPROB:g}, so it was"
                " not sampled"
            )
            raise ValueError(f"{problem}; vLLM writes -9999 for a log-prob that it did not compute")
        return logprobs


class Trajectory(Record):
    """One sampled conversation. `messages` and `metrics` are not used for training. `advantage`
    replaces the computed advantage.

    A turn continues the previous turn's sequence if its prompt starts with the previous turn's
    prompt and sampled tokens. Any other turn starts a new sequence of the trajectory. All turns
    have the same advantage, unless turns have their own rewards or advantages."""

    turns: list[Turn] = Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)
    reward: StoredFloat
    messages: Annotated[list[AnyMessage], Field(max_length=MOST_ITEMS)] | None = None
    advantage: StoredFloat | None = None
    metrics: dict[Name, StrictFloat] = Field(default_factory=dict, max_length=MOST_KEYS)

    @property
    def returns(self) -> list[float]:
        """Each turn's return: the trajectory's reward plus the rewards of this turn and of all
        later turns."""
        sums = list(accumulate(turn.reward or 0.0 for turn in reversed(self.turns)))
        return [self.reward + to_come for to_come in reversed(sums)]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest turn, including the turn's prompt."""
        return max(len(turn.prompt_token_ids) + len(turn.token_ids) for turn in self.turns)


class Group(Record):
    """All trajectories of one prompt, whose rewards are compared to compute advantages."""

    trajectories: list[Trajectory] = Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)


class AdvantageSettings(Record):
    """The settings by which rewards become advantages; `tandem.data.prepare.group_advantages` has
    the formulas. `scale` also accepts true, which means "group", and false, which means "none"."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    keep_zero_variance: bool = False

    @field_validator("scale", mode="before")
    @classmethod
    def _scale(cls, scale: Any) -> Any:
        return {True: "group", False: "none"}[scale] if isinstance(scale, bool) else scale

    @model_validator(mode="after")
    def _no_scale_without_baseline(self) -> Self:
        if self.baseline == "none" and self.scale != "none":
            raise ValueError(
                'baseline="none" goes with scale="none" only: a raw reward is not divided by the'
                " spread"
            )
        return self


class PackingSettings(Record):
    """The settings of packing. `sequence_length`: slots of a row. `too_long`: what happens to a
    sequence that is longer than a row:

    - refuse: refuse the whole input, naming the trajectory;
    - drop: leave the trajectory out, after computing advantages over its whole group;
    - truncate: cut off the sequence's end; drop a trajectory that then has no trained token.

    `PackedData` counts dropped and truncated trajectories."""

    sequence_length: Annotated[int, Field(strict=True)] = Field(default=2048, ge=2, le=2**20)
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"


def _as_dict(response: Any) -> Mapping[str, Any]:
    # The openai package does not validate responses. Its `model_dump` would warn, because vLLM's
    # nulls don't match the package's types.
    return response if isinstance(response, Mapping) else response.model_dump(warnings=False)


def turn_from_openai(response: Any, choice: int = 0) -> Turn:
    """The turn in the choice with index `choice` of a response of vLLM's OpenAI server.

    `response`: an object of the openai package, or the object as a dict. A chat completion has
    `prompt_token_ids` beside `choices`, and log-probs in `choices[i].logprobs.content[j].logprob`.
    A text completion has `prompt_token_ids` in the choice, and log-probs in
    `choices[i].logprobs.token_logprobs`. `response` may also be a single choice that was sampled
    through vLLM's path /rollout/v1. Raises InvalidInput (field: the path in the response) if data
    is missing.
    """
    data = _as_dict(response)
    choices, where = (
        (data["choices"] or [], f"choices.{choice}.") if "choices" in data else ([data], "")
    )
    if not 0 <= choice < len(choices):
        raise InvalidInput(
            f"the response has {len(choices)} choices, so no number {choice}", field="choices"
        )
    chosen = choices[choice]
    sampled = chosen.get("logprobs") or {}
    entries = sampled.get("content") or []
    tokens: Any = chosen.get("token_ids")
    if tokens is None:
        tokens = _named_ids(
            [entry.get("token") for entry in entries] or sampled.get("tokens") or []
        )
    prompt: Any = chosen.get("prompt_token_ids") or data.get("prompt_token_ids")
    for field, value in {"prompt_token_ids": prompt, f"{where}token_ids": tokens}.items():
        if value is None:
            advice = 'extra_body={"return_token_ids": True}, or through /rollout/v1'
            raise InvalidInput(f"missing: sample from vLLM with {advice}", field=field)
    if sampled.get("content") is not None:
        logprobs = [entry.get("logprob") for entry in entries]
    elif sampled.get("token_logprobs") is not None:
        logprobs = sampled["token_logprobs"]
    else:
        raise InvalidInput(
            "missing: sample with logprobs=True (completions: logprobs=0)", field=f"{where}logprobs"
        )
    try:
        return Turn(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=logprobs,
            policy_step=policy_step_of(data.get("model")),
            routed_experts=chosen.get("routed_experts"),
        )
    except ValidationError as exc:
        error = from_validation_error(exc)
        field = (
            error.field
            if error.field and error.field.startswith("prompt")
            else f"{where}{error.field}"
        )
        raise InvalidInput(error.message, field=field) from exc


def _named_ids(tokens: Sequence[Any]) -> list[int] | None:
    """The token ids in token names of the form `token_id:<n>`; None if the names have another form.
    With the option `return_tokens_as_token_ids`, vLLM writes `token_id:<n>`."""
    found = [re.fullmatch(r"token_id:(\d+)", str(token)) for token in tokens]
    return [int(match[1]) for match in found if match] if found and all(found) else None


def policy_step_of(model: Any) -> int | None:
    """The step in a model's name, `<run>@<step>`; None for other names."""
    _, _, step = model.rpartition("@") if isinstance(model, str) else ("", "", "")
    return int(step) if step.isdecimal() and step.isascii() else None


def _reasoning_text(message: Mapping[str, Any]) -> str | None:
    """The reasoning of an assistant message. The key of vLLM is `reasoning`; other servers and
    clients use `reasoning_content` or `thinking`."""
    names = ("reasoning", "reasoning_content", "thinking")
    texts = (message.get(name) for name in names)
    return next((text for text in texts if isinstance(text, str) and text), None)


class TrajectoryBuilder:
    """Builds a trajectory while its conversation is sampled. For each turn, send `messages` to
    vLLM, and pass the response to `add_response`. Pass each message of the user or of a tool to
    `add`. At the end, call `finish`."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = [dict(message) for message in messages]
        self._turns: list[Turn] = []

    def add(self, message: Mapping[str, Any]) -> None:
        """Adds a message that was not sampled, and is therefore context only."""
        self.messages.append(dict(message))

    def add_response(self, response: Any, choice: int = 0) -> dict[str, Any]:
        """Adds a chat completion, or a single choice of a chat completion (see `turn_from_openai`).
        Appends the sampled message, with its reasoning, to `messages`, and returns the message."""
        self._turns.append(turn_from_openai(response, choice))
        data = _as_dict(response)
        sampled = data.get("choices", [data])[choice]["message"]
        # A message with a tool call may lack content.
        message = {"role": sampled.get("role", "assistant"), "content": sampled.get("content")}
        if sampled.get("tool_calls") is not None:
            message["tool_calls"] = sampled["tool_calls"]
        # Chat templates write the reasoning into the next prompt. Without the reasoning, the next
        # turn would start a new sequence.
        if reasoning := _reasoning_text(sampled):
            message["reasoning"] = reasoning
        self.messages.append(message)
        return message

    def finish(
        self,
        reward: float,
        *,
        advantage: float | None = None,
        metrics: Mapping[str, float] | None = None,
        turn_rewards: Sequence[float] | None = None,
    ) -> Trajectory:
        """The trajectory. Raises InvalidInput if no response was added, or if the reward is NaN.

        Args:
            turn_rewards: the reward of each sampled turn, in addition to `reward`.
        """
        turns = self._turns
        if turn_rewards is not None:
            if len(turn_rewards) != len(turns):
                problem = f"{len(turn_rewards)} for {len(turns)} sampled turns; give one for each"
                raise InvalidInput(problem, field="turn_rewards")
            turns = [
                turn.model_copy(update={"reward": float(of)})
                for turn, of in zip(turns, turn_rewards, strict=True)
            ]
        try:
            more = {"messages": self.messages, "advantage": advantage, "metrics": metrics or {}}
            return Trajectory.model_validate({"turns": turns, "reward": reward, **more})
        except ValidationError as exc:
            raise from_validation_error(exc) from exc
