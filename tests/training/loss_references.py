"""The losses again, from their papers, in float64 NumPy: value and analytic gradient, token by token in plain loops.

Nothing here is shared with `tandem.training.losses`. `lp`, `old`, `sampler`, `ref`, `adv`, `entropy` are float64 [n],
`sequences`, `trajectories`, `groups` are lists of index arrays that partition the items.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parts = list[NDArray[np.int64]]


def cispo(lp: Array, old: Array, adv: Array, low: float, high: float) -> tuple[Array, Array]:
    """MiniMax-M1 eq. 4-5, negated: per-token values and d value / d lp; the clipped IS weight is a constant."""
    value, grad = np.zeros_like(lp), np.zeros_like(lp)
    for t in range(len(lp)):
        weight = min(max(math.exp(lp[t] - old[t]), low), high)
        value[t] = -weight * adv[t] * lp[t]
        grad[t] = -weight * adv[t]
    return value, grad


def ppo(lp: Array, old: Array, adv: Array, low: float, high: float) -> tuple[Array, Array]:
    """PPO eq. 7, negated: the gradient is zero exactly where the pessimistic bound is the clipped one."""
    value, grad = np.zeros_like(lp), np.zeros_like(lp)
    for t in range(len(lp)):
        r = math.exp(lp[t] - old[t])
        if adv[t] > 0 and r > high:
            value[t] = -high * adv[t]
        elif adv[t] < 0 and r < low:
            value[t] = -low * adv[t]
        else:
            value[t] = -r * adv[t]
            grad[t] = -r * adv[t]
    return value, grad


def gspo_weighted(
    lp: Array, old: Array, adv: Array, low: float, high: float, sequences: Parts, weights: Array
) -> tuple[float, Array]:
    """GSPO eq. 5-7, negated: sum_i w_i value_i and its gradient; every token of y has value -min(s A, clip(s) A)."""
    total, grad = 0.0, np.zeros_like(lp)
    for members in sequences:
        s = math.exp(sum(lp[t] - old[t] for t in members) / len(members))
        slope = 0.0
        for t in members:
            if (adv[t] > 0 and s > high) or (adv[t] < 0 and s < low):
                total += weights[t] * -(high if adv[t] > 0 else low) * adv[t]
            else:
                total += weights[t] * -s * adv[t]
                slope += weights[t] * -s * adv[t]
        for t in members:
            grad[t] = slope / len(members)
    return total, grad


def kl(lp: Array, ref: Array, estimator: str) -> tuple[Array, Array]:
    """Schulman's k1, k2, k3 of KL(policy || ref), and the gradient that minimises it (k1: the score function's)."""
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


def normalised(values: Array, kind: str, trajectories: Parts, groups: Parts, constant: float) -> float:
    """The mean that each paper writes down, over whole trajectories and groups."""
    if kind == "token":
        return float(values.sum() / len(values))
    if kind == "trajectory":
        return float(np.mean([values[t].mean() for t in trajectories]))
    if kind == "group":
        return float(np.mean([values[g].mean() for g in groups]))
    return float(np.mean([values[t].sum() / constant for t in trajectories]))
