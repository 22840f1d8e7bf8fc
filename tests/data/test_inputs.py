"""Validation of input. The answers of vLLM become turns. The refusal of wrong input names the wrong
field."""

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
from tandem.data.inputs import Group, PackingSettings, turn_from_openai
from tandem.errors import InvalidInput, from_validation_error

# `CHAT` and `COMPLETION` are answers in the form of vLLM 0.32
# (vllm/entrypoints/openai/chat_completion/protocol.py and completion/protocol.py).
CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "run@3",
    "prompt_token_ids": [7, 8, 9],
    "choices": [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "reasoning": None},
            "token_ids": ids,
            "logprobs": {
                "content": [
                    {"token": "x", "logprob": p, "bytes": None, "top_logprobs": []}
                    for p in logprobs
                ]
            },
            "finish_reason": "stop",
            "stop_reason": None,
        }
        for index, (text, ids, logprobs) in enumerate(
            [("yes", [1, 2], [-0.5, 0.0]), ("no", [3, 2], [-1.5, -0.25])]
        )
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}
COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "run@3",
    "choices": [
        {
            "index": 0,
            "text": "yes",
            "finish_reason": "length",
            "token_ids": [4],
            "prompt_token_ids": [7, 8],
            "logprobs": {
                "text_offset": [0],
                "token_logprobs": [-0.5],
                "tokens": ["yes"],
                "top_logprobs": [None],
            },
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
}


def changed(path: str, value: object, of: dict[str, Any]) -> Any:
    copy = at = json.loads(json.dumps(of))
    *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parts:
        at = at[part]
    at[last] = value
    return copy


# The first choice of a chat completion that was streamed through the rollout door and then joined.
CHOICE: dict[str, Any] = {
    **CHAT["choices"][0],
    "token_ids": None,
    "prompt_token_ids": [7, 8, 9],
    "model": "run@3",
    "logprobs": {
        "content": [
            {"token": "token_id:1", "logprob": -0.5},
            {"token": "token_id:2", "logprob": 0.0},
        ]
    },
}


@pytest.mark.parametrize("as_object", [False, True])
def test_turn_from_openai(as_object: bool) -> None:
    def given(kind: Any, value: dict[str, Any]) -> Any:
        """The answer as an object of the openai client, or as a dict. The client's objects keep
        extra keys and validate nothing."""
        return construct_type(type_=kind, value=value) if as_object else value

    chat, completion = given(ChatCompletion, CHAT), given(Completion, COMPLETION)
    # pytest's mark `filterwarnings` would also count warnings about other tests' objects that are
    # garbage-collected.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turns = [
            turn_from_openai(chat, 1),
            turn_from_openai(completion),
            turn_from_openai(given(Choice, CHOICE)),
        ]
    assert [(turn.prompt_token_ids, turn.token_ids, turn.logprobs) for turn in turns] == [
        ([7, 8, 9], [3, 2], [-1.5, -0.25]),
        ([7, 8], [4], [-0.5]),
        ([7, 8, 9], [1, 2], [-0.5, 0.0]),
    ]
    assert [turn.policy_step for turn in turns] == [3, 3, 3]


@pytest.mark.parametrize(
    ("of", "path", "value", "field", "message"),
    [
        # In vLLM's answer to a request with `echo` the first token has no log-prob.
        (
            COMPLETION,
            "choices.0.logprobs.token_logprobs",
            [None],
            "choices.0.logprobs.0",
            "valid number",
        ),
        (CHAT, "choices", [], "choices", "0 choices"),
        (CHAT, "prompt_token_ids", None, "prompt_token_ids", "return_token_ids"),
        (CHAT, "prompt_token_ids", [], "prompt_token_ids", "at least 1 item"),
        (CHAT, "choices.0.token_ids", None, "choices.0.token_ids", "return_token_ids"),
        (CHAT, "choices.0.token_ids", [], "choices.0.token_ids", "at least 1 item"),
        (
            CHAT,
            "choices.0.token_ids",
            [1, 2, 3],
            "choices.0.logprobs",
            "2 log-probs for 3 sampled tokens",
        ),
        (CHAT, "choices.0.logprobs", None, "choices.0.logprobs", "logprobs=True"),
        (CHAT, "choices.0.logprobs.content", None, "choices.0.logprobs", "logprobs=True"),
        (
            CHAT,
            "choices.0.logprobs.content.1.logprob",
            -9999.0,
            "choices.0.logprobs",
            "did not compute",
        ),
        # "12" is a text that the model has sampled. Without the prefix `token_id:`, a text names no
        # token id.
        (CHOICE, "logprobs.content.1.token", "12", "token_ids", "rollout"),
        (CHOICE, "logprobs.content.1.token", "token_id:", "token_ids", "rollout"),
        (CHOICE, "logprobs.content.1.token", "token_id:1x", "token_ids", "rollout"),
        (CHOICE, "prompt_token_ids", None, "prompt_token_ids", "rollout"),
    ],
)
def test_incomplete_answers_are_refused(
    of: dict[str, Any], path: str, value: object, field: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        turn_from_openai(changed(path, value, of))
    assert refused.value.field == field


def test_builder() -> None:
    builder = inputs.TrajectoryBuilder([{"role": "user", "content": "?"}])
    assert builder.add_response(CHOICE) == {"role": "assistant", "content": "yes"}
    builder.add({"role": "user", "content": "sure?"})
    builder.add_response(CHAT, 1)
    assert [message["content"] for message in builder.messages] == ["?", "yes", "sure?", "no"]
    trajectory = builder.finish(0.5, metrics={"turns": 2})
    assert [turn.token_ids for turn in trajectory.turns] == [[1, 2], [3, 2]]
    assert (trajectory.reward, trajectory.metrics, trajectory.messages) == (
        0.5,
        {"turns": 2},
        builder.messages,
    )
    with pytest.raises(InvalidInput, match="finite") as refused:
        builder.finish(math.nan)
    assert refused.value.field == "reward"
    with pytest.raises(InvalidInput, match="at least 1") as refused:
        inputs.TrajectoryBuilder([]).finish(1.0)
    assert refused.value.field == "turns"


def test_a_message_has_its_content_also_beside_a_tool_call() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
    made = inputs.TrajectoryBuilder([]).add_response(changed("message", message, CHOICE))
    assert made == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_a_message_keeps_its_reasoning_in_the_name_that_vllm_reads(name: str) -> None:
    """Chat templates write the reasoning into the next prompt. Without the reasoning the next
    prompt would not continue the turn."""
    message = {"role": "assistant", "content": "4", name: "2 + 2"}
    builder = inputs.TrajectoryBuilder([])
    made = builder.add_response(changed("message", message, CHOICE))
    assert made == {"role": "assistant", "content": "4", "reasoning": "2 + 2"}
    assert builder.messages == [made]


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"reward": math.nan}, "reward", "finite"),
        ({"reward": "1"}, "reward", "valid number"),
        ({"reward": True}, "reward", "valid number"),
        ({"reward": 3.5e38}, "reward", "3.5e.38 does not fit float32"),
        ({"advantage": -1e39}, "advantage", "float32"),
        ({"advantage": math.nan}, "advantage", "finite"),
        ({"metrics": {"a": math.nan}}, "metrics.a", "finite"),
        ({"turns": []}, "turns", "at least 1"),
        ({"rewards": 1}, "rewards", "no such key"),
        ({"prompt_token_ids": []}, "turns.0.prompt_token_ids", "at least 1"),
        ({"token_ids": []}, "turns.0.token_ids", "at least 1"),
        ({"token_ids": [1, -1]}, "turns.0.token_ids", "id -1 at index 1"),
        ({"token_ids": [1, 2**31]}, "turns.0.token_ids", "id 2147483648 at index 1"),
        ({"token_ids": [1, 10**30]}, "turns.0.token_ids", "id 10+ at index 1"),
        ({"token_ids": [1, 1.0]}, "turns.0.token_ids.1", "valid integer"),
        ({"token_ids": [1, True]}, "turns.0.token_ids.1", "valid integer"),
        ({"logprobs": [-1.0]}, "turns.0.logprobs", "1 log-probs for 2"),
        ({"logprobs": [-1.0, 0.01]}, "turns.0.logprobs", "0.01 at index 1 is above 0"),
        ({"logprobs": [-1.0, math.nan]}, "turns.0.logprobs.1", "finite"),
        ({"logprobs": [-1.0, None]}, "turns.0.logprobs.1", "valid number"),
        # A log-prob that is above 0 by rounding is accepted.
        ({"logprobs": [5e-5, 0.0], "reward": 3}, None, ""),
    ],
)
def test_bad_groups(changes: dict[str, Any], field: str | None, message: str) -> None:
    turn: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": [-0.5, -0.5],
    }
    trajectory: dict[str, Any] = {"turns": [turn], "reward": 1.0}
    for key, value in changes.items():
        (turn if key in turn else trajectory)[key] = value
    groups = TypeAdapter(list[Group])
    if field is None:
        groups.validate_python([{"trajectories": [trajectory]}])
        return
    with pytest.raises(ValidationError) as raised:
        groups.validate_python([{"trajectories": [trajectory]}])
    error = from_validation_error(raised.value)
    assert error.field == f"0.trajectories.0.{field}"
    assert re.search(message, error.message), error.message


def test_many_wrong_items_are_one_error() -> None:
    """A refusal has a single error. Errors about all wrong items would take hundreds of times the
    memory of the request."""
    turn = {"prompt_token_ids": [1], "token_ids": [2] * 1000, "logprobs": [math.nan] * 1000}
    for value in (
        {"trajectories": [{"turns": [turn] * 5, "reward": 1.0}] * 5},
        {"trajectories": [1] * 1000},
    ):
        with pytest.raises(ValidationError) as raised:
            Group.model_validate(value)
        assert raised.value.error_count() == 1


@pytest.mark.parametrize(
    ("model", "value", "field", "message"),
    [
        (SFTExample, {}, None, "either messages"),
        (
            SFTExample,
            {"text": "a", "token_ids": [1, 2], "trainable": [False, True]},
            None,
            "either messages",
        ),
        (SFTExample, {"text": "a", "trainable": [False, True]}, None, "either messages"),
        (Group, {"trajectories": []}, "trajectories", "at least 1"),
        *(
            (PackingSettings, {"sequence_length": length}, "sequence_length", "")
            for length in (1, 2**21, 2.0, "2048")
        ),
        (
            PackingSettings,
            {"sequence_length": 1, "too_long": "split", "rows": 3},
            "sequence_length",
            r"^Input should be greater than or equal to 2 \(got 1\); and 2 more errors$",
        ),
        (inputs.AdvantageSettings, {"baseline": "median"}, "baseline", r"\(got 'median'\)$"),
        (inputs.AdvantageSettings, {"baseline": "none"}, None, 'scale="none" only'),
        *((inputs.AdvantageSettings, {"scale": scale}, "scale", "") for scale in ("true", 1, None)),
    ],
)
def test_bad_values(model: Any, value: dict[str, Any], field: str | None, message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(value)
    error = from_validation_error(raised.value)
    assert error.field == field
    assert re.search(message, error.message), error.message


def test_what_float32_would_lose_digits_of_is_0() -> None:
    turn = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.5]}
    trajectory = inputs.Trajectory.model_validate(
        {"turns": [turn], "reward": math.exp(-90), "advantage": -1e-40}
    )
    assert (trajectory.reward, trajectory.advantage) == (0, 0)
    assert inputs.Trajectory.model_validate({"turns": [turn], "reward": 2e-38}).reward == 2e-38
