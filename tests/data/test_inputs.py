"""Input at the door: what vLLM answers becomes turns; what is wrong is refused naming the field."""

import json
import math
import re
import warnings
from typing import Any

import pytest
from openai._models import construct_type
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice
from pydantic import TypeAdapter, ValidationError

from tandem.data import inputs
from tandem.data.examples import SFTExample
from tandem.data.inputs import Group, PackingSettings, from_validation_error, turn_from_openai
from tandem.errors import InvalidInput

# The shapes of vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py, vLLM 0.32.
CHAT: dict[str, Any] = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "run@3", "prompt_token_ids": [7, 8, 9],
    "choices": [
        {
            "index": index, "message": {"role": "assistant", "content": text, "reasoning": None}, "token_ids": ids,
            "logprobs": {
                "content": [{"token": "x", "logprob": p, "bytes": None, "top_logprobs": []} for p in logprobs]
            },
            "finish_reason": "stop", "stop_reason": None,
        }
        for index, (text, ids, logprobs) in enumerate([("yes", [1, 2], [-0.5, 0.0]), ("no", [3, 2], [-1.5, -0.25])])
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "run@3",
    "choices": [
        {
            "index": 0, "text": "yes", "finish_reason": "length", "token_ids": [4], "prompt_token_ids": [7, 8],
            "logprobs": {"text_offset": [0], "token_logprobs": [-0.5], "tokens": ["yes"], "top_logprobs": [None]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("as_object", [False, True])
def test_turn_from_openai(as_object: bool) -> None:
    # The openai client builds its objects this way: extra keys are kept and nothing is validated.
    chat = construct_type(type_=ChatCompletion, value=CHAT) if as_object else CHAT
    completion = construct_type(type_=Completion, value=COMPLETION) if as_object else COMPLETION
    with warnings.catch_warnings():  # not pytest's mark: garbage of other tests may warn meanwhile
        warnings.simplefilter("error")
        turns = [turn_from_openai(chat), turn_from_openai(chat, 1), turn_from_openai(completion)]
    assert [(turn.prompt_token_ids, turn.token_ids, turn.logprobs) for turn in turns] == [
        ([7, 8, 9], [1, 2], [-0.5, 0.0]), ([7, 8, 9], [3, 2], [-1.5, -0.25]), ([7, 8], [4], [-0.5])
    ]  # fmt: skip


def changed(path: str, value: object, of: dict[str, Any]) -> Any:
    copy = at = json.loads(json.dumps(of))
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        at = at[part]
    at[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "field", "message"),
    [
        # With `echo` the first token has no log-prob.
        ("choices.0.logprobs.token_logprobs", [None], "choices.0.logprobs.0", "valid number"),
        ("choices", [], "choices", "0 choices"),
        ("prompt_token_ids", None, "prompt_token_ids", "return_token_ids"),
        ("prompt_token_ids", [], "prompt_token_ids", "at least 1 item"),
        ("choices.0.token_ids", None, "choices.0.token_ids", "return_token_ids"),
        ("choices.0.token_ids", [], "choices.0.token_ids", "at least 1 item"),
        ("choices.0.token_ids", [1, 2, 3], "choices.0.logprobs", "2 log-probs for 3 sampled tokens"),
        ("choices.0.logprobs", None, "choices.0.logprobs", "logprobs=True"),
        ("choices.0.logprobs.content", None, "choices.0.logprobs", "logprobs=True"),
        ("choices.0.logprobs.content.1.logprob", -9999.0, "choices.0.logprobs", "did not compute"),
    ],
)
def test_incomplete_answers_are_refused(path: str, value: object, field: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        turn_from_openai(changed(path, value, COMPLETION if "token_logprobs" in path else CHAT))
    assert refused.value.field == field


def through_the_door() -> dict[str, Any]:
    """The first choice of a chat completion that came through the rollout door and whose stream was put together."""
    choice = changed("choices.0.token_ids", None, CHAT)["choices"][0]
    for entry, token in zip(choice["logprobs"]["content"], ("token_id:1", "token_id:2"), strict=True):
        entry["token"] = token
    return {**choice, "prompt_token_ids": [7, 8, 9], "model": "run@3"}


@pytest.mark.parametrize("as_object", [False, True])
def test_a_choice_alone_is_a_turn(as_object: bool) -> None:
    choice = through_the_door()
    turn = turn_from_openai(construct_type(type_=Choice, value=choice) if as_object else choice)
    assert (turn.prompt_token_ids, turn.token_ids, turn.logprobs) == ([7, 8, 9], [1, 2], [-0.5, 0.0])
    assert turn.policy_step == 3
    builder = inputs.TrajectoryBuilder([])
    builder.add_response(choice)
    assert builder.finish(1.0).turns == [turn]
    for token in ("12", "token_id:", "token_id:1x"):  # a text of the model's, not a name of an id
        with pytest.raises(InvalidInput, match="rollout") as refused:
            turn_from_openai(changed("logprobs.content.1.token", token, choice))
        assert refused.value.field == "token_ids"
    with pytest.raises(InvalidInput, match="rollout") as refused:
        turn_from_openai({**choice, "prompt_token_ids": None})
    assert refused.value.field == "prompt_token_ids"


def test_builder() -> None:
    builder = inputs.TrajectoryBuilder([{"role": "user", "content": "?"}])
    assert builder.add_response(CHAT) == {"role": "assistant", "content": "yes"}
    builder.add({"role": "user", "content": "sure?"})
    builder.add_response(CHAT, 1)
    assert [message["content"] for message in builder.messages] == ["?", "yes", "sure?", "no"]
    trajectory = builder.finish(0.5, metrics={"turns": 2})
    assert [turn.token_ids for turn in trajectory.turns] == [[1, 2], [3, 2]]
    assert (trajectory.reward, trajectory.metrics, trajectory.messages) == (0.5, {"turns": 2}, builder.messages)
    with pytest.raises(InvalidInput, match="finite") as refused:
        builder.finish(math.nan)
    assert refused.value.field == "reward"
    with pytest.raises(InvalidInput) as refused:
        inputs.TrajectoryBuilder([]).finish(1.0)
    assert refused.value.field == "turns"


def rl(**changes: object) -> list[dict[str, Any]]:
    turn = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.5]}
    trajectory = {"turns": [turn], "reward": 1.0}
    for key, value in changes.items():
        (turn if key in turn else trajectory)[key] = value
    return [{"trajectories": [trajectory]}]


TRAJECTORY = "0.trajectories.0"


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        (rl(reward=math.nan), f"{TRAJECTORY}.reward", "finite"),
        (rl(reward="1"), f"{TRAJECTORY}.reward", "valid number"),
        (rl(reward=True), f"{TRAJECTORY}.reward", "valid number"),
        (rl(advantage=math.nan), f"{TRAJECTORY}.advantage", "finite"),
        (rl(metrics={"a": math.nan}), f"{TRAJECTORY}.metrics.a", "finite"),
        (rl(turns=[]), f"{TRAJECTORY}.turns", "at least 1"),
        (rl(rewards=1), f"{TRAJECTORY}.rewards", "[Ee]xtra"),
        ([{"trajectories": []}], "0.trajectories", "at least 1"),
        (rl(prompt_token_ids=[]), f"{TRAJECTORY}.turns.0.prompt_token_ids", "at least 1"),
        (rl(token_ids=[]), f"{TRAJECTORY}.turns.0.token_ids", "at least 1"),
        (rl(token_ids=[1, -1]), f"{TRAJECTORY}.turns.0.token_ids", "id -1 at index 1"),
        (rl(token_ids=[1, 2**31]), f"{TRAJECTORY}.turns.0.token_ids", "id 2147483648 at index 1"),
        (rl(token_ids=[1, 10**30]), f"{TRAJECTORY}.turns.0.token_ids", "id 10+ at index 1"),
        (rl(token_ids=[1, 1.0]), f"{TRAJECTORY}.turns.0.token_ids.1", "valid integer"),
        (rl(token_ids=[1, True]), f"{TRAJECTORY}.turns.0.token_ids.1", "valid integer"),
        (rl(logprobs=[-1.0]), f"{TRAJECTORY}.turns.0.logprobs", "1 log-probs for 2"),
        (rl(logprobs=[-1.0, 0.01]), f"{TRAJECTORY}.turns.0.logprobs", "0.01 at index 1 is above 0"),
        (rl(logprobs=[-1.0, math.nan]), f"{TRAJECTORY}.turns.0.logprobs.1", "finite"),
        (rl(logprobs=[-1.0, None]), f"{TRAJECTORY}.turns.0.logprobs.1", "valid number"),
    ],
)
def test_bad_groups(value: object, field: str, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(list[Group]).validate_python(value)
    error = from_validation_error(raised.value)
    assert error.field == field
    assert re.search(message, error.message), error.message


def test_rounding_above_zero_is_accepted() -> None:
    group = TypeAdapter(list[Group]).validate_python(rl(logprobs=[5e-5, 0.0], reward=3))
    assert group[0].trajectories[0].turns[0].logprobs == [5e-5, 0.0]


ASK = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ({}, None, "either messages"),
        ({"messages": [ASK, ANSWER], "token_ids": [1, 2], "trainable": [False, True]}, None, "either messages"),
        ({"messages": [ASK, ANSWER], "trainable": [False, True]}, None, "either messages"),
        ({"token_ids": [1, 2]}, None, "either messages"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [ASK]}, "messages", "no assistant message"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content", "required"),
        ({"token_ids": [1, 2], "trainable": [False]}, "trainable", "1 flags for 2"),
        ({"token_ids": [1, 2], "trainable": [False, False]}, "trainable", "no token"),
        ({"token_ids": [1, 2], "trainable": [True, True]}, "trainable", "first token"),
        ({"token_ids": [1, 2], "trainable": [0, 1]}, "trainable.0", "valid boolean"),
        ({"token_ids": [1], "trainable": [False]}, "token_ids", "at least 2"),
        ({"token_ids": [1, -2], "trainable": [False, True]}, "token_ids", "id -2 at index 1"),
        ({"messages": [ASK, ANSWER], "weight": 0.0}, "weight", "greater than or equal"),
        ({"messages": [ASK, ANSWER], "weight": 1e-50}, "weight", "greater than or equal"),
        ({"messages": [ASK, ANSWER], "weight": math.nan}, "weight", "finite"),
    ],
)
def test_bad_examples(value: object, field: str | None, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        SFTExample.model_validate(value)
    assert from_validation_error(raised.value).field == field


@pytest.mark.parametrize("length", [1, 0, -5, 2**21, 2.0, "2048"])
def test_bad_row_length(length: object) -> None:
    with pytest.raises(ValidationError) as raised:
        PackingSettings.model_validate({"sequence_length": length})
    assert from_validation_error(raised.value).field == "sequence_length"


def test_error_counts_the_others() -> None:
    with pytest.raises(ValidationError) as raised:
        PackingSettings.model_validate({"sequence_length": 1, "too_long": "split", "rows": 3})
    error = from_validation_error(raised.value)
    assert error.field == "sequence_length"
    assert error.message == "Input should be greater than or equal to 2 (got 1); and 2 more errors"
    with pytest.raises(ValidationError) as raised:
        inputs.AdvantageSettings.model_validate({"baseline": "median"})
    assert from_validation_error(raised.value).message.endswith("(got 'median')")
