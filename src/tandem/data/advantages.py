"""Turns the rewards of a group into advantages."""

import numpy as np
from numpy.typing import NDArray

from tandem.data.inputs import AdvantageSettings

STD_EPS = 1e-6


def group_advantages(rewards: NDArray[np.float64], settings: AdvantageSettings) -> NDArray[np.float64]:
    """Advantages [n] of one group's rewards [n], float64.

    With m the mean of all n rewards and s their population standard deviation, sqrt(sum (r_i - m)^2 / n):

    - `baseline="mean"`, `scale=True`: (r_i - m) / (s + 1e-6), GRPO (Shao et al., 2024, arXiv:2402.03300);
    - `baseline="mean"`, `scale=False`: r_i - m, Dr. GRPO (Liu et al., 2025, arXiv:2503.20783), which leaves out the
      division because it gives more weight to questions whose rewards differ little;
    - `baseline="leave_one_out"`: r_i minus the mean of the other n - 1 rewards, which is n / (n - 1) (r_i - m),
      RLOO (Ahmadian et al., 2024, arXiv:2402.14740); `scale=True` divides that by s + 1e-6, s over all n rewards;
    - `baseline="none"`: r_i.

    With a baseline, the advantages of a group with equal rewards (as a group of one) are exactly 0.
    """
    if settings.baseline == "none":
        return rewards.copy()
    if (rewards == rewards[0]).all():
        # The mean of n equal floats may differ from them in the last bit.
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    spread = float(np.sqrt(np.mean(centred**2))) + STD_EPS if settings.scale else 1.0
    others = len(rewards) / (len(rewards) - 1) if settings.baseline == "leave_one_out" else 1.0
    advantages: NDArray[np.float64] = centred * (others / spread)
    return advantages
