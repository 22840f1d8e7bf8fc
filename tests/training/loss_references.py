"""A second implementation of the losses, from their papers, in float64 NumPy. The implementation
computes each loss and its analytic gradient in plain loops, one token after the other.

This module shares no code with `tandem.training.losses`. `lp`, `old`, `sampler`, `ref`, `adv`,
`entropy` are float64 [n]. `sequences`, `trajectories`, `groups` are lists of index arrays. Each of
these lists partitions the n items.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parts = list[NDArray[np.int64]]


def policy(
    name: str,
    lp: Array,
    old: Array,
    adv: Array,
    low: float,
    high: float,
    sequences: Parts,
    weights: Array,
    *,
    level: str,
    dual: float,
    mask: bool,
    gate: tuple[float, float] = (1.0, 1.05),
) -> tuple[float, Array]:
    """The loss sum_i w_i value_i, and the loss's gradient by lp. The definition of value_i depends
    on `name`:

    - cispo: MiniMax-M1 equations 4-5, negated. The clipped ratio is a constant.
    - ppo: PPO equation 7, negated. The gradient is zero exactly where the clipped term is smaller
      than the unclipped term. Negative advantages have a second clip at `dual` (Ye et al.).
    - sapo: Gao et al., arXiv:2511.20347, negated. `gate` has two temperatures: for positive
      advantages, and for advantages of at most 0. With p = sigmoid(t (r - 1)), the derivative of
      4p/t by r is 4p(1 - p).
    - gspo: ppo with `level` "sequence" (GSPO equations 5-7). Every token of a sequence y has the
      ratio s of y."""
    total, grad = 0.0, np.zeros_like(lp)
    for members in sequences if level == "sequence" else [np.array([t]) for t in range(len(lp))]:
        r = math.exp(sum(lp[t] - old[t] for t in members) / len(members))
        slope = 0.0
        for t in members:
            if mask and (r < low or r > high):
                continue
            if name == "cispo":
                constant = min(max(r, low), high)
                total += weights[t] * -constant * adv[t] * lp[t]
                grad[t] = weights[t] * -constant * adv[t]
            elif name == "sapo":
                tau = gate[0] if adv[t] > 0 else gate[1]
                p = 1 / (1 + math.exp(-tau * (r - 1)))
                total += weights[t] * -4 / tau * p * adv[t]
                slope += weights[t] * -4 * p * (1 - p) * r * adv[t]
            elif adv[t] > 0 and r > high:
                total += weights[t] * -high * adv[t]
            elif adv[t] < 0 and r < low:
                total += weights[t] * -low * adv[t]
            elif adv[t] < 0 and r > dual:
                total += weights[t] * -dual * adv[t]
            else:
                total += weights[t] * -r * adv[t]
                slope += weights[t] * -r * adv[t]
        for t in members:
            grad[t] += slope / len(members)
    return total, grad


def importance(
    old: Array, sampler: Array, sequences: Parts, *, level: str, low: float, high: float, cap: float
) -> Array:
    """The ratio pi_old / pi_sampler of each token (IcePop, TIS) or of the token's whole sequence
    (MIS). Ratios above `cap` are truncated. Ratios outside of `low` to `high` count as 0. The
    limits apply after each ratio is clamped to the range from e^-20 to e^20."""
    weight = np.zeros_like(old)
    for members in sequences if level == "sequence" else [np.array([t]) for t in range(len(old))]:
        nats = sum(old[t] - sampler[t] for t in members)
        ratio = math.exp(min(max(nats, -20.0), 20.0))
        for t in members:
            weight[t] = min(ratio, cap) if low <= ratio <= high else 0.0
    return weight


def keeps(lp: Array, sampler: Array, adv: Array, sequences: Parts, threshold: float) -> Array:
    """The mask M of DeepSeek-V3.2 equation 9. M = 0 where A < 0 and the sequence's mean of
    log(pi_old / pi) is above the threshold. The policy pi_old is the sampler's policy."""
    kept = np.ones_like(lp)
    for members in sequences:
        mean = sum(sampler[t] - lp[t] for t in members) / len(members)
        for t in members:
            kept[t] = 0.0 if adv[t] < 0 and mean > threshold else 1.0
    return kept


def kl(lp: Array, ref: Array, estimator: str) -> tuple[Array, Array]:
    """Schulman's estimate k1, k2 or k3 of KL(policy || ref), and the gradient by which a loss
    minimises the KL. For k1 the gradient is the score-function gradient."""
    value, grad = np.zeros_like(lp), np.zeros_like(lp)
    for t in range(len(lp)):
        r = math.exp(ref[t] - lp[t])
        if estimator == "k1":
            value[t], grad[t] = -math.log(r), lp[t] - ref[t]
        elif estimator == "k2":
            value[t], grad[t] = 0.5 * math.log(r) ** 2, lp[t] - ref[t]
        else:
            value[t], grad[t] = (r - 1) - math.log(r), 1 - r
    return value, grad


def corrected_kl(lp: Array, old: Array, ref: Array, estimator: str) -> tuple[Array, Array]:
    """DeepSeek-V3.2 equation 7: r times the estimate of the KL, with r = pi / pi_old. For tokens of
    the old policy, the KL's gradient is r log(pi / pi_ref) grad lp."""
    ratio = np.exp(lp - old)
    return ratio * kl(lp, ref, estimator)[0], ratio * (lp - ref)


def normalised(
    values: Array, kind: str, trajectories: Parts, groups: Parts, constant: float
) -> float:
    """The mean of `values` over whole trajectories and groups, as each paper defines it."""
    if kind == "token":
        return float(values.sum() / len(values))
    if kind == "trajectory":
        return float(np.mean([values[t].mean() for t in trajectories]))
    if kind == "group":
        return float(np.mean([values[g].mean() for g in groups]))
    return float(np.mean([values[t].sum() / constant for t in trajectories]))
