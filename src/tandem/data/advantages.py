"""Turns the rewards of a group into advantages."""

import numpy as np
from numpy.typing import NDArray

from tandem.data.inputs import AdvantageSettings

STD_EPS = 1e-6


def spread(rewards: NDArray[np.float64]) -> float:
    """What rewards are divided by: their population standard deviation, sqrt(sum (r_i - m)^2 / n), and 1e-6."""
    return float(rewards.std()) + STD_EPS


def group_advantages(
    rewards: NDArray[np.float64], settings: AdvantageSettings, *, batch_spread: float
) -> NDArray[np.float64]:
    """Advantages [n] of one group's rewards [n], float64; `batch_spread`: `spread` of all groups' rewards.

    With m the mean of the group's n rewards and s their `spread`:

    - `baseline="mean"`, `scale="group"`: (r_i - m) / s, GRPO (Shao et al., 2024, arXiv:2402.03300);
    - `baseline="mean"`, `scale="batch"`: (r_i - m) / batch_spread, Lite PPO (Liu et al., 2025, arXiv:2508.08221), which
      is steadier where a group's rewards differ little;
    - `baseline="mean"`, `scale="none"`: r_i - m, Dr. GRPO (Liu et al., 2025, arXiv:2503.20783), which leaves out the
      division because it gives more weight to questions whose rewards differ little;
    - `baseline="leave_one_out"`: r_i minus the mean of the other n - 1 rewards, which is n / (n - 1) (r_i - m),
      RLOO (Ahmadian et al., 2024, arXiv:2402.14740); `scale` divides that by the same as above;
    - `baseline="none"`: r_i.

    With a baseline, the advantages of a group with equal rewards (as a group of one) are exactly 0.
    """
    if settings.baseline == "none":
        return rewards.copy()
    if (rewards == rewards[0]).all():
        # The mean of n equal floats may differ from them in the last bit.
        return np.zeros_like(rewards)
    divisor = {"none": 1.0, "group": spread(rewards), "batch": batch_spread}[settings.scale]
    others = len(rewards) / (len(rewards) - 1) if settings.baseline == "leave_one_out" else 1.0
    advantages: NDArray[np.float64] = (rewards - rewards.mean()) * (others / divisor)
    return advantages
