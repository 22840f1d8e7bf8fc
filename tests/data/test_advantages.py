"""Advantages against sums written out in exact fractions."""

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.data.advantages import group_advantages
from tandem.data.inputs import AdvantageSettings

rewards_of_a_group = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12)


def independent(rewards: list[float], baseline: str, scale: bool) -> list[float]:
    exact = [Fraction(reward) for reward in rewards]
    n = len(exact)
    mean = sum(exact) / n
    if baseline == "mean" or n == 1:
        centred = [reward - mean for reward in exact]
    else:
        centred = [exact[i] - sum(exact[:i] + exact[i + 1 :]) / (n - 1) for i in range(n)]
    spread = sqrt(sum((reward - mean) ** 2 for reward in exact) / n) + 1e-6 if scale else 1.0
    return [float(value) / spread for value in centred]


@given(rewards_of_a_group, st.sampled_from(["mean", "leave_one_out"]), st.booleans())
@example([0.1] * 3, "mean", True)  # (0.1 + 0.1 + 0.1) / 3 != 0.1
def test_formulas(rewards: list[float], baseline: str, scale: bool) -> None:
    settings = AdvantageSettings.model_validate({"baseline": baseline, "scale": scale})
    found = group_advantages(np.array(rewards), settings)
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx(independent(rewards, baseline, scale), rel=1e-9, abs=1e-7)
    assert found.any() == (len(set(rewards)) > 1)


def test_without_a_baseline_rewards_are_the_advantages() -> None:
    rewards = np.array([0.0, 0.0, 1.0, 1.0])
    raw = AdvantageSettings(baseline="none", scale=False)
    assert group_advantages(rewards, raw).tolist() == rewards.tolist()


def test_scale_without_baseline_is_refused() -> None:
    with pytest.raises(ValidationError, match="scale=false only"):
        AdvantageSettings(baseline="none")
