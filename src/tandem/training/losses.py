"""The losses, as pure functions of per-item tensors. One item is one trained token of one trajectory.

A loss is the weighted mean over the items of one optimizer step, on *all* data-parallel ranks:

    L = sum_i w_i l_i / D,    l_i = tis_i * policy_i + kl_coef * kl_i - entropy_coef * H_i

`w` and `D` come from `item_weights`. The functions here return one row's part of the sum; the items of a sequence are
never split over rows. Notation: `lp` is the trainer's log-prob of the item's token, `old` the log-prob in the ratio's
denominator, `A` the advantage, `r = exp(lp - old)`.

Sources:
- CISPO: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
- PPO: arXiv:1707.06347, eq. 7; separate bounds (clip-higher) and token-level mean: DAPO, arXiv:2503.14476, eq. 8.
- GSPO: arXiv:2507.18071, eq. 5 and 7.
- Normalisation: GRPO (arXiv:2402.03300, eq. 3) averages per trajectory, DAPO over a group's tokens, Dr. GRPO
  (arXiv:2503.20783) divides by a constant.
- Truncated importance sampling: Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training".
- KL estimators k1, k2, k3: Schulman, 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); why the
  derivative of k1 is of no use: arXiv:2506.09477.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.spool.schema import RLLoss

# exp() takes no more than this many nats, so that no single token makes a loss or a gradient infinite in float32.
MAX_NATS = 20.0

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


@dataclass
class Items:
    """The items of one row. Tensors are [items], of one floating dtype (`sequence`: int64); log-probs are in nats."""

    logprobs: Tensor  # of the policy being trained; carries gradients
    entropy: Tensor  # of the distribution that each token was drawn from, in nats; carries gradients
    weights: Tensor  # `w`; 0 in a row that is computed only to match collectives
    advantages: Tensor
    sequence: Tensor  # index of the item's sequence within the row, 0 .. num_sequences - 1
    num_sequences: int
    old_logprobs: Tensor | None = None  # denominator of the ratio; needed by RL
    sampler_logprobs: Tensor | None = None  # reported by the sampler (vLLM); needed by RL
    reference_logprobs: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A row's loss, and statistics over its items as detached float64 scalars."""

    loss: Tensor  # scalar, the row's part of `sum_i w_i l_i`
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def item_weights(
    normalisation: str, trajectory_items: Ints, group_items: Ints, constant: float | None = None
) -> tuple[Floats, Floats]:
    """`(w, d)`, both float64 [items]: each item's weight, and its part of the denominator `D = sum d`.

    `trajectory_items`, `group_items`: [items], the number of items of the item's trajectory and of its group.

    - token (DAPO's mean over tokens, here of the whole batch): w = d = 1
    - trajectory (GRPO: mean within a trajectory, then over trajectories): w = d = 1 / trajectory_items
    - group (DAPO: mean over the tokens of a group, then over groups): w = d = 1 / group_items
    - constant (Dr. GRPO: sum of a trajectory over a constant, then mean over trajectories): w = 1,
      d = constant / trajectory_items, so that a trajectory's parts of D sum to the constant
    """
    ones = np.ones(len(trajectory_items))
    if normalisation == "token":
        return ones, ones
    if normalisation == "constant":
        assert constant is not None
        return ones, constant / trajectory_items
    items = trajectory_items if normalisation == "trajectory" else group_items
    return ones / items, ones / items


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)`, of which x beyond +-MAX_NATS gets the value at that bound. The derivative is the value everywhere: it
    never vanishes, as a plain clamp's would, so a token that is far off is still pulled back."""
    return (x + (x.clamp(-MAX_NATS, MAX_NATS) - x).detach()).exp()


def sequence_mean(values: Tensor, sequence: Tensor, num_sequences: int) -> Tensor:
    """Mean of `values` [items] over each item's sequence, [items]. Of log-ratios it is the log of GSPO's
    `s = (pi(y|x) / pi_old(y|x))^(1/|y|)`."""
    zeros = values.new_zeros(num_sequences)
    total = zeros.index_add(0, sequence, values)
    count = zeros.index_add(0, sequence, torch.ones_like(values))
    return (total / count)[sequence]


def policy_terms(items: Items, loss: RLLoss) -> tuple[Tensor, Tensor, Tensor]:
    """`(policy_i, ratio_i, clipped_i)`, each [items]; `clipped` is True where clipping changed the gradient.

    With [lo, hi] = `loss.clip_bounds` and sg = stop-gradient:

    - cispo: -sg(clip(r, lo, hi)) A lp
    - ppo:   -min(r A, clip(r, lo, hi) A)
    - gspo:  -min(s A, clip(s, lo, hi) A), where `s` is the sequence's ratio. Each token of a sequence gets the gradient
      s A / |y|. With one sequence per trajectory and GSPO's default normalisation this is the paper's objective.
    """
    assert items.old_logprobs is not None
    low, high = loss.clip_bounds
    log_r = items.logprobs - items.old_logprobs
    if loss.policy == "cispo":
        ratio = bounded_exp(log_r.detach())
        clipped = (ratio < low) | (ratio > high)
        return -ratio.clamp(low, high) * items.advantages * items.logprobs, ratio, clipped
    if loss.policy == "gspo":
        log_r = sequence_mean(log_r, items.sequence, items.num_sequences)
    ratio = bounded_exp(log_r)
    free, bounded = ratio * items.advantages, ratio.clamp(low, high) * items.advantages
    return -torch.minimum(free, bounded), ratio.detach(), bounded.detach() < free.detach()


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-item estimate of KL(policy || reference) from tokens drawn from the policy, [items], in nats.

    With x = log policy - log reference: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. k2's gradient, x grad lp, is an
    unbiased estimate of the KL's; k3's is GRPO's. The gradient of k1 alone would be grad lp, which has zero mean for
    any reference, so k1 takes the KL's score-function gradient instead, x grad lp.
    """
    x = logprobs - reference
    if estimator == "k3":
        return bounded_exp(-x) - 1 + x
    square = 0.5 * x * x
    return square if estimator == "k2" else square + (x - square).detach()


def rl_loss(items: Items, loss: RLLoss) -> LossOutput:
    """Policy loss, KL penalty and entropy bonus of one row, and its statistics.

    Sums: `loss` (weighted), `items`, `ratio`, `clipped`, `entropy`, `advantage`, `advantage_square`, `kl_sampler` (k3
    of KL(sampler || trainer), nats), `logprob_difference` (|trainer - sampler|, nats), `kl_reference` (if there is a
    reference), `tis` (if it has a cap). Maxima: `ratio`, `above_sampler` (trainer - sampler, nats).
    """
    assert items.sampler_logprobs is not None
    assert items.old_logprobs is not None
    assert items.reference_logprobs is not None or not loss.kl_coef
    per_item, ratio, clipped = policy_terms(items, loss)
    detached = items.logprobs.detach()
    sums = {"ratio": ratio, "clipped": clipped, "advantage": items.advantages}
    sums["advantage_square"] = items.advantages.double().square()
    sums["kl_sampler"] = kl_estimate(items.sampler_logprobs, detached, "k3")
    sums["logprob_difference"] = (detached - items.sampler_logprobs).abs()
    if loss.tis_cap is not None:
        # min(exp(old - sampler), cap): corrects for tokens having been drawn by another engine.
        sums["tis"] = bounded_exp(items.old_logprobs - items.sampler_logprobs).clamp(max=loss.tis_cap).detach()
        per_item = sums["tis"] * per_item
    if items.reference_logprobs is not None:
        sums["kl_reference"] = kl_estimate(items.logprobs, items.reference_logprobs, loss.kl_estimator)
        if loss.kl_coef:
            per_item = per_item + loss.kl_coef * sums["kl_reference"]
    if loss.entropy_coef:
        per_item = per_item - loss.entropy_coef * items.entropy
    above_sampler = (detached - items.sampler_logprobs).max()
    return _output(items, per_item, sums, {"ratio": ratio.max().double(), "above_sampler": above_sampler.double()})


def sft_loss(items: Items) -> LossOutput:
    """Cross-entropy, l_i = -lp_i. Sums: `loss` (weighted), `items`, `entropy`."""
    return _output(items, -items.logprobs, {}, {})


def _output(items: Items, per_item: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> LossOutput:
    total = (items.weights * per_item).sum()
    sums = {"items": torch.ones_like(items.weights), "entropy": items.entropy, **sums, "loss": total}
    return LossOutput(total, {name: value.detach().double().sum() for name, value in sums.items()}, maxima)
