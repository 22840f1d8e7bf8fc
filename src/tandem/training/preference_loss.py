"""The losses of pairs of a chosen and a rejected answer, in the notation of `losses.py`.

Sources:
DPO: Rafailov et al., 2023, arXiv:2305.18290, equation 7.
Label smoothing: Mitchell, 2023, "A note on DPO with noisy preferences".
IPO: Azar et al., 2023, arXiv:2310.12036, equation 17, with means over tokens as in TRL, because
  sums depend on length. SimPO: Meng et al., 2024, arXiv:2405.14734, equation 6."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tandem.spool.schema import PreferenceLoss
from tandem.training.losses import Items, LossOutput, loss_output


def preference_loss(items: Items, loss: PreferenceLoss) -> LossOutput:
    """The loss of one row's pairs.

    Notation: h = lp - ref (SimPO: h = lp). S is the sum of h over an answer's items, and M the
    mean. `b` is `loss.strength`, and `e` is the label smoothing. DPO has s = b (S_chosen -
    S_rejected). SimPO has s = b (M_chosen - M_rejected) - margin. The losses of a pair:

    - dpo, simpo: -(1 - e) log sigmoid(s) - e log sigmoid(-s)
    - ipo: (M_chosen - M_rejected - 1 / (2 b))^2

    An answer's reward is b S (SimPO: b M). The sum `accuracy` counts the pairs in which the chosen
    answer has the larger reward.
    """
    assert items.pair is not None
    assert items.rejected is not None
    h = items.logprobs
    if loss.kind != "simpo":
        assert items.reference_logprobs is not None
        h = h - items.reference_logprobs
    pairs = int(items.pair.max()) + 1
    answer = 2 * items.pair + items.rejected

    def per_answer(values: Tensor) -> Tensor:
        """Sums of `values` [items] over each answer, [pairs, 2]."""
        return values.new_zeros(2 * pairs).index_add(0, answer, values).view(pairs, 2)

    total = per_answer(h)
    means = total / per_answer(torch.ones_like(h))
    rewards = loss.strength * (means if loss.kind == "simpo" else total)
    if loss.kind == "ipo":
        losses = (means[:, 0] - means[:, 1] - 1 / (2 * loss.strength)).square()
    else:
        margin = loss.margin if loss.margin is not None else 0.5
        s = rewards[:, 0] - rewards[:, 1] - (margin if loss.kind == "simpo" else 0.0)
        smoothing = loss.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(s) - smoothing * logsigmoid(-s)
    chosen, rejected = rewards.detach().double().unbind(1)
    sums = {
        "pairs": torch.ones_like(chosen),
        "accuracy": chosen > rejected,
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    # The weights of a pair's items add up to the weight of the pair.
    return loss_output(items, losses[items.pair], sums, {})
