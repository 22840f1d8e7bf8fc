"""Rollouts of verifiers as trajectories, without the package."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.client.verifiers import outputs_to_groups, trace_to_trajectory
from tandem.data.inputs import Trajectory
from tandem.errors import InvalidInput


def branch(ids: list[int], sampled: list[int], *, trainable: bool = True) -> SimpleNamespace:
    mask = [position in sampled for position in range(len(ids))]
    logprobs = [-position / 8 if on else 0.0 for position, on in enumerate(mask)]
    return SimpleNamespace(index=0, trainable=trainable, token_ids=ids, sampled_mask=mask, logprobs=logprobs)


def trace(*branches: SimpleNamespace, **changed: Any) -> SimpleNamespace:
    usual = {"has_error": False, "agent": SimpleNamespace(trainable=True), "calls": [SimpleNamespace(model="run@4")],
             "branches": branches, "metrics": {"length": 2.0, "missing": None}, "reward": 1.5}  # fmt: skip
    return SimpleNamespace(**{**usual, **changed})


def test_each_sampled_span_is_a_turn() -> None:
    made = trace_to_trajectory(trace(branch([1, 2, 3, 4, 5, 6], [2, 3, 5])))
    assert made == {
        "turns": [
            {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "logprobs": [-0.25, -0.375], "policy_step": 4},
            {"prompt_token_ids": [1, 2, 3, 4, 5], "token_ids": [6], "logprobs": [-0.625], "policy_step": 4},
        ],
        "reward": 1.5, "metrics": {"length": 2.0},
    }  # fmt: skip
    Trajectory.model_validate(made)


def test_what_branches_share_is_trained_once_and_what_is_not_trained_is_left_out() -> None:
    made = trace_to_trajectory(
        trace(branch([1, 2, 3, 4], [1, 3]), branch([1, 2, 7, 8], [1, 3]), branch([9, 9], [1], trainable=False))
    )
    assert made is not None
    assert [turn["token_ids"] for turn in made["turns"]] == [[2], [4], [8]]
    assert trace_to_trajectory(trace(branch([1, 2], [1]), has_error=True)) is None
    assert trace_to_trajectory(trace(branch([1, 2], [1]), agent=SimpleNamespace(trainable=False))) is None
    assert trace_to_trajectory(trace(branch([1, 2], []))) is None
    with pytest.raises(InvalidInput, match="TrainClientConfig"):
        trace_to_trajectory(trace(branch([], [])))


def output(example: int, reward: float, **changed: Any) -> dict[str, Any]:
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3], "completion_mask": [1], "completion_logprobs": [-0.5]}
    return {"example_id": example, "reward": reward, "trajectory": [{"tokens": tokens}], "metrics": {}, **changed}


def test_outputs_of_one_example_are_a_group() -> None:
    outputs = [output(7, 1.0), output(8, 0.0), output(7, 0.5), output(8, 0.0, error={"error": "timeout"})]
    groups = outputs_to_groups({"outputs": outputs, "metadata": {}}, 4)
    assert [[t["reward"] for t in group["trajectories"]] for group in groups] == [[1.0, 0.5], [0.0]]
    turn = {"prompt_token_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5], "policy_step": 4}
    assert groups[0]["trajectories"][0]["turns"] == [turn]
    for wrong in ({"trajectory": [{"tokens": None}]}, {"trajectory": None}):
        with pytest.raises(InvalidInput, match="rollout") as refused:
            outputs_to_groups([output(7, 1.0), output(7, 0.0, **wrong)])
        assert refused.value.field == "outputs.1.trajectory.0.tokens"
