"""Advantages equal those of a second implementation, which computes sums in exact fractions."""

from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.data.inputs import EQUAL_REWARDS, AdvantageSettings, Group
from tandem.data.prepare import group_advantages, spread, turn_advantages

rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


def deviation(rewards: list[float]) -> float:
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    return sqrt(sum((reward - mean) ** 2 for reward in exact) / len(exact)) + 1e-6


def differ(rewards: list[float]) -> bool:
    return max(rewards) - min(rewards) > EQUAL_REWARDS


def independent(rewards: list[float], batch: list[float], baseline: str, scale: str) -> list[float]:
    if not differ(rewards):
        return [0.0] * len(rewards)
    exact = [Fraction(reward) for reward in rewards]
    n = len(exact)
    if baseline == "mean" or n == 1:
        centred = [reward - sum(exact) / n for reward in exact]
    else:
        centred = [exact[i] - sum(exact[:i] + exact[i + 1 :]) / (n - 1) for i in range(n)]
    divisor = {"group": deviation(rewards), "batch": deviation(batch), "none": 1.0}[scale]
    return [float(value) / divisor for value in centred]


@settings(deadline=None)
@given(
    rewards_of_a_group,
    rewards_of_a_group,
    st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from(["group", "batch", "none"]),
)
@example([0.0, 1e-38], [], "mean", "group")  # The rewards 0 and 1e-38 count as equal.
@example([0.1] * 3, [], "mean", "group")  # In floats, (0.1 + 0.1 + 0.1) / 3 != 0.1.
def test_formulas(rewards: list[float], others: list[float], baseline: str, scale: str) -> None:
    of_case = AdvantageSettings.model_validate({"baseline": baseline, "scale": scale})
    batch = rewards + others
    found = group_advantages(np.array(rewards), of_case, batch_spread=spread(np.array(batch)))
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx(
        independent(rewards, batch, baseline, scale), rel=1e-9, abs=1e-7
    )
    assert found.any() == differ(rewards)


def test_literal_values() -> None:
    def advantages(**settings: str) -> np.ndarray:
        rewards = np.array([0.0, 0.0, 1.0, 1.0])
        return group_advantages(
            rewards, AdvantageSettings.model_validate(settings), batch_spread=2.0
        )

    assert advantages() == pytest.approx([-1, -1, 1, 1], abs=1e-5)
    assert advantages(scale="batch").tolist() == [-0.25, -0.25, 0.25, 0.25]
    assert advantages(scale="none").tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert advantages(baseline="leave_one_out", scale="none") == pytest.approx(
        [-2 / 3, -2 / 3, 2 / 3, 2 / 3]
    )
    assert advantages(baseline="none", scale="none").tolist() == [0.0, 0.0, 1.0, 1.0]


def test_scale_may_be_true_or_false() -> None:
    assert [
        AdvantageSettings.model_validate({"scale": scale}).scale for scale in (True, False)
    ] == ["group", "none"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_within_a_millionth_are_equal(scale: Any) -> None:
    settings = AdvantageSettings(scale=scale)
    for rewards, equal in (([0.3, 0.1 + 0.2, 0.3 + 9e-7], True), ([0.3, 0.3, 0.3 + 2e-6], False)):
        found = group_advantages(np.array(rewards), settings, batch_spread=1.0)
        assert (found == 0).all() == equal


def turn(length: int, **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1], "token_ids": [2] * length, "logprobs": [-1.0] * length, **more}


def of_turns(settings: AdvantageSettings, *trajectories: dict[str, Any]) -> list[list[list[float]]]:
    group = Group.model_validate({"trajectories": trajectories})
    found = turn_advantages(group, settings, batch_spread=2.0)
    return [[turn.tolist() for turn in turns] for turns in found]


def test_turns_compare_their_returns_with_the_others_at_the_same_turn() -> None:
    settings = AdvantageSettings(scale="none")
    first = {"turns": [turn(1, reward=1.0), turn(2, reward=0.5), turn(1, reward=2.0)], "reward": 1}
    second = {"turns": [turn(1), turn(1, reward=-0.5)], "reward": 0.0}
    # The returns of the first trajectory's turns are 4.5, 3.5, 3. The returns of the second
    # trajectory's turns are -0.5, -0.5. Only the first trajectory has a third turn, so this turn
    # gets the advantage of the trajectory's first turn.
    assert of_turns(settings, first, second) == [[[2.5], [2.0, 2.0], [2.5]], [[-2.5], [-2.0]]]
    batch = AdvantageSettings(scale="batch")
    assert of_turns(batch, first, second)[0][:2] == [[1.25], [1.0, 1.0]]
    raw = AdvantageSettings(baseline="none", scale="none")
    assert of_turns(raw, first, second) == [[[4.5], [3.5, 3.5], [3.0]], [[-0.5], [-0.5]]]


def test_a_turns_own_advantage_replaces_and_its_tokens_are_added() -> None:
    settings = AdvantageSettings(scale="none")
    first = {"turns": [turn(1), turn(2, advantages=[0.25, -0.25])], "reward": 1.0}
    second = {"turns": [turn(2, advantage=0.0, advantages=[3.0, 4.0]), turn(1)], "reward": 0.0}
    third = {"turns": [turn(1, advantage=7.0), turn(1)], "reward": 0.5, "advantage": 9.0}
    assert of_turns(settings, first, second, third) == [
        [[0.5], [0.75, 0.25]],
        [[3.0, 4.0], [-0.5]],
        [[7.0], [9.0]],
    ]


def test_without_turn_rewards_every_token_has_its_trajectorys_advantage() -> None:
    settings = AdvantageSettings()
    rewards = [0.0, 1.0, 0.5]
    whole = group_advantages(np.array(rewards), settings, batch_spread=2.0)
    group = [{"turns": [turn(1), turn(3)], "reward": reward} for reward in rewards]
    assert of_turns(settings, *group) == [[[a], [a] * 3] for a in whole.tolist()]
