"""Advantages against sums written out in exact fractions."""

from fractions import Fraction
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.data.inputs import AdvantageSettings
from tandem.data.prepare import group_advantages, spread

rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


def deviation(rewards: list[float]) -> float:
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    return sqrt(sum((reward - mean) ** 2 for reward in exact) / len(exact)) + 1e-6


def independent(rewards: list[float], batch: list[float], baseline: str, scale: str) -> list[float]:
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
@example([0.1] * 3, [], "mean", "group")  # (0.1 + 0.1 + 0.1) / 3 != 0.1
def test_formulas(rewards: list[float], others: list[float], baseline: str, scale: str) -> None:
    of_case = AdvantageSettings.model_validate({"baseline": baseline, "scale": scale})
    batch = rewards + others
    found = group_advantages(np.array(rewards), of_case, batch_spread=spread(np.array(batch)))
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx(
        independent(rewards, batch, baseline, scale), rel=1e-9, abs=1e-7
    )
    assert found.any() == (len(set(rewards)) > 1)


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
