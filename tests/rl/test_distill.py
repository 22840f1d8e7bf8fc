"""The tests of on-policy distillation compare the advantages of tokens with the reverse KL in
float64, and run the loop with a teacher."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rl.fake_stack import Environment, FakeStack, config, make_loop
from rl.mock_vllm import URL, MockVllm
from tandem.client import Trajectory
from tandem.client.rl.config import Config, DistillSection
from tandem.client.rl.distill import KEY_VARIABLE, VARIABLE, Teacher, open_teacher, reverse_kl
from tandem.errors import InvalidInput

VOCABULARY = 7


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def test_the_advantages_give_the_gradient_of_the_reverse_kl() -> None:
    """The expectation over the policy is a sum over the vocabulary. The reference is a difference
    quotient of KL(p || q). The sum and the quotient are in float64."""
    random = np.random.default_rng(0)
    logits, teacher = random.normal(size=(2, VOCABULARY))
    lp, lq = log_softmax(logits), log_softmax(teacher)
    p = np.exp(lp)
    advantages = -np.array(reverse_kl(lp.tolist(), lq.tolist()))
    scores = np.eye(VOCABULARY) - p  # row t is the gradient of log p(t) by the logits
    gradient = (p * advantages) @ scores  # the gradient of the objective, which the policy ascends

    def divergence(at: np.ndarray) -> float:
        l = log_softmax(at)  # noqa: E741
        return float((np.exp(l) * (l - lq)).sum())

    assert -(p * advantages).sum() == pytest.approx(divergence(logits), rel=1e-12)
    h = 1e-6
    by_difference = [
        (divergence(logits + h * unit) - divergence(logits - h * unit)) / (2 * h)
        for unit in np.eye(VOCABULARY)
    ]
    np.testing.assert_allclose(-gradient, by_difference, atol=1e-9)


TABLE = log_softmax(np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)))


class FakeTeacher:
    """A bigram model: the log-prob of a token depends only on the token before it."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.away = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "teacher"}]})
        body = json.loads(request.content)
        if self.away:
            self.away -= 1
            return httpx.Response(503, text="starting")
        assert body["model"] == "teacher"
        tokens = body["prompt"]
        self.asked.append(tokens)
        entries = [None] + [
            {str(b): {"logprob": None if b == 6 else TABLE[a, b]}, "99": {"logprob": -0.1}}
            for a, b in pairwise(tokens)
        ]
        return httpx.Response(200, json={"choices": [{"prompt_logprobs": entries}]})


def scored(trajectory: dict[str, Any], teacher: FakeTeacher, **settings: Any) -> Trajectory:
    section = DistillSection(model="teacher", **settings)
    return asyncio.run(
        Teacher(section, MockVllm(teacher.answer)).scored(Trajectory.model_validate(trajectory))
    )


TURNS = [
    {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.5, -0.25]},
    {"prompt_token_ids": [1, 2, 3, 4, 5], "token_ids": [1], "logprobs": [-2.0]},
    # this turn is a sequence of its own
    {"prompt_token_ids": [2], "token_ids": [6], "logprobs": [-1.0]},
]


def test_each_token_gets_its_part_of_the_reverse_kl() -> None:
    teacher = FakeTeacher()
    made = scored({"turns": TURNS, "reward": 1.0, "metrics": {"own": 2.0}}, teacher, coef=0.5)
    expected = [-0.5 - TABLE[2, 3], -0.25 - TABLE[3, 4], -2.0 - TABLE[5, 1], -1.0 + 100.0]
    found = [each for turn in made.turns for each in turn.advantages or []]
    np.testing.assert_allclose(found, -0.5 * np.array(expected), rtol=1e-12)
    assert [turn.advantage for turn in made.turns] == [0.0] * 3
    assert made.metrics == {"own": 2.0, "reverse_kl": pytest.approx(np.mean(expected))}
    # A turn that a later turn continues is not sent to the teacher again.
    assert teacher.asked == [[2, 6], [1, 2, 3, 4, 5, 1]]
    with_rewards = scored({"turns": TURNS, "reward": 1.0}, FakeTeacher(), rewards=True)
    assert [turn.advantage for turn in with_rewards.turns] == [None] * 3


def test_the_loop_trains_groups_of_equal_rewards_by_a_teacher(tmp_path: Path) -> None:
    stack, teacher = FakeStack(), FakeTeacher()
    teacher.away = 1
    settings = config(steps=2, distill={"model": "teacher"}, group_size=1)
    loop = make_loop(
        settings,
        stack,
        Environment(stack, equal=range(50)),
        tmp_path,
        teacher=Teacher(DistillSection(model="teacher"), MockVllm(teacher.answer)),
    )
    # The fake controller knows only rewards.
    varied, accept = {"trajectories": [{"reward": 0}, {"reward": 1}]}, stack._accept

    def accept_varied(request: dict[str, Any]) -> None:
        accept({**request, "groups": [*request["groups"], varied]})

    stack._accept = accept_varied  # type: ignore[method-assign]
    asyncio.run(loop.run())
    turns = [
        turn
        for job in stack.trained
        for group in job.request["groups"][:-1]
        for one in group["trajectories"]
        for turn in one["turns"]
    ]
    assert len(turns) == 2 * 3 * 2
    for turn in turns:
        assert turn["advantage"] == 0.0
        assert turn["advantages"] == [pytest.approx(TABLE[2, 5] + 0.5)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all("reverse_kl" in line["metrics"] for line in lines)


def test_a_teacher_that_is_not_served_or_not_comparable_is_refused() -> None:
    teacher = Teacher(DistillSection(model="another"), MockVllm(FakeTeacher().answer))
    with pytest.raises(InvalidInput, match=rf"{URL}/models lists \['teacher'\], without 'another'"):
        asyncio.run(teacher.raise_unless_served())
    with pytest.raises(ValueError, match=r"the teacher's log-probs are of temperature 1"):
        config(
            distill={"model": "teacher"},
            sampling={"temperature": 0.7},
            loss={"temperature": 0.7},
        )
    assert Config.model_validate(config().model_dump()).rl.distill is None


def test_tandems_key_goes_to_no_teacher_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "stack-key")
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "http://stack:8000")
    assert open_teacher().url == "http://stack:8000/v1"
    assert open_teacher()._headers["Authorization"] == "Bearer stack-key"
    monkeypatch.setenv(VARIABLE, "http://elsewhere:8000/v1")
    assert open_teacher().url == "http://elsewhere:8000/v1"
    assert "Authorization" not in open_teacher()._headers
    monkeypatch.setenv(KEY_VARIABLE, "theirs")
    assert open_teacher()._headers["Authorization"] == "Bearer theirs"
