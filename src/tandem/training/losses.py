"""The losses of RL and SFT, as pure functions of per-item tensors. One item is one trained token of
one trajectory. `preference_loss.py` has the losses of pairs.

A loss is the weighted mean over the items of one optimizer step, on *all* data-parallel ranks:

    L = sum_i w_i l_i / D,    l_i = c_i * policy_i + kl_coef * kl_i - entropy_coef * H_i

`w` and `D` come from `item_weights`. Each loss function returns one row's part of the sum. All
items of a sequence are in one row. Notation: `lp` is the trainer's log-prob of the item's token.
`old` is the log-prob in the ratio's denominator. `ref` is the reference's log-prob. `A` is the
advantage, `r = exp(lp - old)`, `x = lp - ref`, and `sg` stops the gradient. An item that a mask
leaves out of the sum still counts in D.

Sources:
CISPO: MiniMax-M1, arXiv:2506.13585, equations 4 and 5. PPO: arXiv:1707.06347, equation 7.
Separate bounds (clip-higher) and token-level mean: DAPO, arXiv:2503.14476, equation 8.
GSPO: arXiv:2507.18071, equations 5 and 7.
GSPO-token: arXiv:2507.18071, equations 13 and 14, and Tinker's documentation (tinker/losses/gspo),
  where the ratio covers only some tokens of a sequence.
SAPO: Gao et al., 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347, section 3.
Dual clip: Ye et al., 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement
  Learning", arXiv:1912.09729; equal to the two-sided clipping of INTELLECT-2, arXiv:2505.07291.
Mask of tokens by ratio: IcePop, in Ring-1T, arXiv:2510.18855.
Mask of sequences by ratio: Liu, Li et al., 2025, "When Speed Kills Stability: Demystifying RL
  Collapse from the Training-Inference Mismatch".
Mask for negative advantages far off the policy: DeepSeek-V3.2, arXiv:2512.02556, equation 9.
Normalisation: GRPO (arXiv:2402.03300, equation 3) averages per trajectory, DAPO averages over a
  group's tokens, and arXiv:2503.20783 (Dr. GRPO) divides by a constant.
Truncated importance sampling: Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You
  Off-Policy RL Training".
KL estimators k1, k2, k3: Schulman, 2020, "Approximating KL Divergence"
  (joschu.net/blog/kl-approx.html); arXiv:2506.09477 explains why the derivative of k1 is useless.
Correction of the KL by the ratio: DeepSeek-V3.2, arXiv:2512.02556, equation 7.
KL in the advantage: Ziegler et al., 2019, arXiv:1909.08593, equation 2. OpenPipe's ART and Tinker's
  cookbook also subtract the mean of the KL."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.spool.schema import RLLoss

# The largest argument of exp() in nats, so that no single token makes a loss or a gradient infinite
# in float32.
MAX_NATS = 20.0

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


@dataclass
class Items:
    """The items of one row. Tensors are [items], of the same floating dtype unless noted.
    Log-probs are in nats."""

    logprobs: Tensor  # Log-probs of the policy being trained; carry gradients.
    # Entropy of the distribution from which each token was drawn, in nats; carries gradients.
    entropy: Tensor
    weights: Tensor  # `w`; 0 in a row that is computed only so that collectives match
    sequence: Tensor  # int64: index of the item's sequence in the row, 0 .. num_sequences - 1
    num_sequences: int
    advantages: Tensor | None = None  # needed by RL
    old_logprobs: Tensor | None = None  # log-probs in the ratio's denominator; needed by RL
    sampler_logprobs: Tensor | None = None  # log-probs reported by the sampler (vLLM); needed by RL
    reference_logprobs: Tensor | None = None
    # Mean of old - reference over the job's items, in nats; needed by `kl_in="advantage"`.
    mean_kl: float = 0.0
    pair: Tensor | None = None  # int64: index of the item's pair in the row; needed for pairs
    # bool: whether the item belongs to its pair's rejected answer; needed for pairs
    rejected: Tensor | None = None
    # int64: the job's base step minus the step that sampled the token; negative if the token's step
    # is unknown.
    steps_behind: Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """A row's loss, and statistics over its items as detached float64 scalars."""

    loss: Tensor  # scalar, the row's part of `sum_i w_i l_i`
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def item_weights(
    normalisation: str, trajectory_items: Ints, group_items: Ints, constant: float | None = None
) -> tuple[Floats, Floats]:
    """`(w, d)`, both float64 [items]: each item's weight, and each item's part of the denominator
    `D = sum d`.

    `token` (DAPO's mean over tokens, but over the tokens of the whole batch): w = d = 1.
    `trajectory` (GRPO: mean within a trajectory, then over trajectories): w = d = 1 /
      trajectory_items.
    `group` (DAPO: mean over the tokens of a group, then over groups): w = d = 1 / group_items.
    `sum`: w = d = 1; the caller takes D = 1.
    `constant` (sum of a trajectory over a constant, then mean over trajectories, as in Dr. GRPO):
      w = 1, d = constant / trajectory_items. A trajectory's parts of D sum to the constant.

    Args:
        trajectory_items: the number of items of each item's trajectory, [items].
        group_items: the number of items of each item's group, [items].
    """
    ones = np.ones(len(trajectory_items))
    if normalisation in ("token", "sum"):
        return ones, ones
    if normalisation == "constant":
        assert constant is not None
        return ones, constant / trajectory_items
    items = trajectory_items if normalisation == "trajectory" else group_items
    return ones / items, ones / items


def bounded_exp(x: Tensor) -> Tensor:
    """`exp(x)`, with x clamped to +-MAX_NATS. The derivative equals the value everywhere, even
    beyond the bounds. The gradient of a token with a far too large or small ratio never vanishes.
    `x` is in nats and has any shape."""
    return (x + (x.clamp(-MAX_NATS, MAX_NATS) - x).detach()).exp()


def sequence_sum(values: Tensor, items: Items) -> Tensor:
    """Sum of `values` [items] over each item's sequence, [items]."""
    return values.new_zeros(items.num_sequences).index_add(0, items.sequence, values)[
        items.sequence
    ]


def sequence_mean(values: Tensor, items: Items) -> Tensor:
    """Mean of `values` [items] over each item's sequence, [items]. The mean of log-ratios is the
    log of GSPO's `s = (pi(y|x) / pi_old(y|x))^(1/|y|)`."""
    return sequence_sum(values, items) / sequence_sum(torch.ones_like(values), items)


def known_mean(values: Tensor, items: Items) -> Tensor:
    """Mean of `values` [items] over each item's sequence, without values that are NaN, [items]. The
    mean is NaN if all values of the sequence are NaN."""
    known = ~values.isnan()
    count = sequence_sum(known.to(values.dtype), items)
    return sequence_sum(values.where(known, 0.0), items) / count


def policy_terms(items: Items, loss: RLLoss) -> tuple[Tensor, Tensor, Tensor]:
    """`(policy_i, ratio_i, clipped_i)`, each [items]. `clipped` is True for items whose gradient
    the bounds changed; for dro and sapo, `clipped` is True for items with r outside [lo, hi].

    [lo, hi] = `loss.clip_bounds`. r is the ratio of the token or, with `loss.level` "sequence", of
    its sequence:

    - cispo: -sg(clip(r, lo, hi)) A lp
    - ppo:   -min(r A, clip(r, lo, hi) A); with dual clip and A < 0: -max(min(r A, clip(r, lo, hi)
             A), dual_clip A)
    - gspo:  like ppo, with the sequence's ratio. Each token of a sequence gets the gradient
             r A / |y|. The objective is the GSPO paper's if each trajectory is one sequence and the
             normalisation is GSPO's default.

    - gspo_token: like ppo, with r_i = sg(s) exp(lp_i - sg(lp_i)) and s = exp(mean(lp - old)). The
             mean leaves out items of the sequence whose `old` is NaN. Each token has its own
             advantage and its own gradient, r A.

    - dro:   -(A lp - beta / 2 (log r)^2), without bounds (Richemond et al., 2024,
             arXiv:2405.19107, with the advantage in place of reward minus value)

    - sapo:  -4 / t sigmoid(t (r - 1)) A (Gao et al., 2025, arXiv:2511.20347). The first of
             `loss.sapo_temperatures` is t for A > 0, the second is t for A <= 0. The gradient
             equals PPO's at r = 1, and shrinks relative to PPO's as r moves away from 1.

    With `beyond_bounds="mask"`, the term of an item with r outside [lo, hi] is 0, and the terms of
    other items are not clipped.
    """
    assert items.old_logprobs is not None
    assert items.advantages is not None
    low, high = loss.clip_bounds
    log_r, advantages = items.logprobs - items.old_logprobs, items.advantages
    if loss.policy == "gspo_token":
        log_r = known_mean(log_r.detach(), items) + items.logprobs - items.logprobs.detach()
    elif loss.level == "sequence":
        log_r = sequence_mean(log_r, items)
    ratio = bounded_exp(log_r)
    outside = (ratio < low) | (ratio > high)
    if loss.dro_beta is not None:
        terms = advantages * items.logprobs - 0.5 * loss.dro_beta * log_r.square()
        return -terms, ratio.detach(), outside
    if loss.policy == "sapo":
        positive, negative = loss.sapo_temperatures
        t = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
        return -4 / t * (t * (ratio - 1)).sigmoid() * advantages, ratio.detach(), outside
    if loss.policy == "cispo":
        ratio = ratio.detach()
        terms, clipped = ratio.clamp(low, high) * advantages * items.logprobs, outside
    else:
        free, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
        terms = torch.minimum(free, bounded)
        if loss.dual_clip is not None:
            terms = torch.where(
                advantages < 0, torch.maximum(terms, loss.dual_clip * advantages), terms
            )
        clipped = terms != free
    if loss.beyond_bounds == "mask":
        terms, clipped = terms.masked_fill(outside, 0.0), outside
    return -terms, ratio.detach(), clipped


def importance_weights(items: Items, loss: RLLoss) -> Tensor | None:
    """`c`, the factor of each item's policy term, [items], without gradient; None: all 1.

    c = exp(old - sampler) corrects the weight of tokens that another engine drew. With
    `tis_level="sequence"`, c is the product of exp(old - sampler) over the token's sequence. `c` is
    set to 0 outside [tis_mask_low, tis_mask_high], and is at most tis_cap. With
    `off_policy_threshold`, c is 0 if A < 0 and the sequence's mean of sampler - lp exceeds the
    threshold.
    """
    assert items.sampler_logprobs is not None
    assert items.old_logprobs is not None
    assert items.advantages is not None
    weights = None
    if loss.weighs_sampler:
        difference = items.old_logprobs - items.sampler_logprobs
        weights = bounded_exp(
            sequence_sum(difference, items) if loss.tis_level == "sequence" else difference
        )
        low, high = loss.tis_mask_low or 0.0, loss.tis_mask_high or torch.inf
        weights = weights.masked_fill((weights < low) | (weights > high), 0.0).clamp(
            max=loss.tis_cap or torch.inf
        )
    if loss.off_policy_threshold is not None:
        fell = (
            sequence_mean(items.sampler_logprobs - items.logprobs, items)
            > loss.off_policy_threshold
        )
        ones = torch.ones_like(items.advantages) if weights is None else weights
        weights = ones.masked_fill(fell & (items.advantages < 0), 0.0)
    return weights


def kl_estimate(
    logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Estimate of KL(policy || reference) per item, [items], in nats, from tokens that were drawn
    from the policy.

    With x = log policy - log reference: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. The gradient of
    k2, x grad lp, is an unbiased estimate of the KL's gradient. GRPO uses the gradient of k3. The
    gradient of k1 would be grad lp, whose mean is zero for any reference. `kl_estimate` gives k1
    the KL's score-function gradient, x grad lp.

    Args:
        logprobs: log-probs under the policy, [items], in nats; carry gradients.
        reference: log-probs under the reference, [items], in nats.
        estimator: "k1", "k2" or "k3".
    """
    x = logprobs - reference
    if estimator == "k3":
        return bounded_exp(-x) - 1 + x
    square = 0.5 * x * x
    return square if estimator == "k2" else square + (x - square).detach()


def kl_penalty(items: Items, loss: RLLoss, estimate: Tensor) -> Tensor:
    """`kl_i`, [items]: the items' `estimate` of the KL. With `kl_correction`, the estimate is
    multiplied by the ratio: r k3, sg(r) k1 or sg(r) k2. Each product has the gradient r x grad lp.
    The mean of r x grad lp over tokens drawn from the policy of `old` is the gradient of the KL.

    Args:
        estimate: the items' `kl_estimate`, [items], in nats.
    """
    if not loss.kl_correction:
        return estimate
    assert items.old_logprobs is not None
    ratio = bounded_exp(items.logprobs - items.old_logprobs)
    return estimate * (ratio if loss.kl_estimator == "k3" else ratio.detach())


def with_kl_in_advantages(items: Items, loss: RLLoss) -> Items:
    """`items` with the advantages A_i + kl_coef * (mean_kl - (old - ref)). The log-ratio old - ref
    acts as a negative reward. The mean of old - ref over the job's items, `mean_kl`, is subtracted,
    so that the mean of the advantages stays the same."""
    assert items.old_logprobs is not None
    assert items.reference_logprobs is not None
    assert items.advantages is not None
    reward = items.mean_kl - (items.old_logprobs - items.reference_logprobs)
    return replace(items, advantages=items.advantages + loss.kl_coef * reward)


def rl_loss(items: Items, loss: RLLoss) -> LossOutput:
    """Returns the loss of one row (policy terms, KL penalty and entropy bonus), and statistics.

    The sum `kl_sampler` is k3 of KL(sampler || trainer) in nats. The sum `logprob_difference`
    is |trainer - sampler| in nats. The sum `masked` counts importance weights that are 0. The
    suffix `_fresh` marks sums over items that the job's base step sampled. The suffix `_stale`
    marks sums over items that older steps sampled. The maximum `above_sampler` is the largest
    trainer - sampler in nats.
    """
    if loss.kl_in == "advantage":
        items = with_kl_in_advantages(items, loss)
    assert items.sampler_logprobs is not None
    assert items.advantages is not None
    per_item, ratio, clipped = policy_terms(items, loss)
    detached = items.logprobs.detach()
    sums = {"ratio": ratio, "clipped": clipped, "advantage": items.advantages}
    sums["advantage_square"] = items.advantages.double().square()
    sums["kl_sampler"] = kl_estimate(items.sampler_logprobs, detached, "k3")
    sums["logprob_difference"] = (detached - items.sampler_logprobs).abs()
    if (behind := items.steps_behind) is not None:
        for age, of_age in (("fresh", behind == 0), ("stale", behind > 0)):
            sums[f"items_{age}"] = of_age
            for name in ("kl_sampler", "logprob_difference"):
                sums[f"{name}_{age}"] = sums[name].where(of_age, 0.0)
    if (weights := importance_weights(items, loss)) is not None:
        sums |= {"importance": weights, "masked": weights == 0}
        per_item = weights * per_item
    if items.reference_logprobs is not None:
        sums["kl_reference"] = kl_estimate(
            items.logprobs, items.reference_logprobs, loss.kl_estimator
        )
        if loss.kl_coef and loss.kl_in == "loss":
            per_item = per_item + loss.kl_coef * kl_penalty(items, loss, sums["kl_reference"])
    if loss.entropy_coef:
        per_item = per_item - loss.entropy_coef * items.entropy
    above_sampler = (detached - items.sampler_logprobs).max()
    return loss_output(
        items,
        per_item,
        sums,
        {"ratio": ratio.max().double(), "above_sampler": above_sampler.double()},
    )


def sft_loss(items: Items) -> LossOutput:
    """The cross-entropy of one row: l_i = -lp_i."""
    return loss_output(items, -items.logprobs, {}, {})


def loss_output(
    items: Items, per_item: Tensor, sums: dict[str, Tensor], maxima: dict[str, Tensor]
) -> LossOutput:
    """The `LossOutput` of one row.

    Args:
        per_item: the loss l_i of each item, [items].
        sums: further statistics by name, [items] or [pairs]; the output has their sums.
        maxima: statistics by name whose maximum over rows is kept, scalars.
    """
    total = (items.weights * per_item).sum()
    sums = {
        "items": torch.ones_like(items.weights),
        "entropy": items.entropy,
        **sums,
        "loss": total,
    }
    return LossOutput(
        total, {name: value.detach().double().sum() for name, value in sums.items()}, maxima
    )
