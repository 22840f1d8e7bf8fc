"""Value and gradient of the losses of pairs equal those of TRL. The tests call
`DPOTrainer._compute_loss` (DPO, IPO) and `CPOTrainer.cpo_loss` (SimPO, and label smoothing) on
padded completions."""

from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.spool.schema import PreferenceLoss
from tandem.training.losses import Items, item_weights
from tandem.training.preference_loss import preference_loss

pytestmark = pytest.mark.slow  # The import of TRL is slow.

LONGEST, PAIRS = 9, 5


class Batch:
    """Random answers. TRL gets the answers padded, [2 PAIRS, T], with the chosen answers first.
    Tandem gets the answers as flat items, with the pairs in random order."""

    def __init__(self, seed: int, scale: float) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, LONGEST + 1, 2 * PAIRS)
        self.mask = torch.tensor(np.arange(LONGEST) < self.lengths[:, None])
        self.lp = torch.tensor(-rng.exponential(1.5, self.mask.shape), requires_grad=True)
        self.ref = self.lp.detach() + torch.tensor(scale * rng.normal(size=self.mask.shape))
        self.order = rng.permutation(PAIRS)

    def trl_dpo(self, kind: str, beta: float) -> torch.Tensor:
        """The loss by `DPOTrainer._compute_loss`, with models that return the batch's log-probs."""
        utils: Any = import_module("trl.import_utils")
        utils.is_vllm_available = lambda *_, **__: False
        from trl.trainer.dpo_trainer import DPOTrainer

        def model(values: torch.Tensor) -> Any:
            zeros = torch.zeros(self.mask.shape)
            outputs = {
                "log_probs": values * self.mask,
                "entropy": zeros,
                "mean_logits": zeros,
                "is_top1": self.mask,
            }
            return lambda **_: SimpleNamespace(**outputs)

        one = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
        module = torch.nn.Identity()
        module.is_gradient_checkpointing = False
        args = SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None)
        this = SimpleNamespace(
            loss_types=[kind],
            loss_weights=[1.0],
            beta=beta,
            label_smoothing=0.0,
            accelerator=one,
            args=args,
            model=module,
            ref_model=model(self.ref),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=False,
            f_divergence_type="reverse_kl",
            use_weighting=False,
            rpo_alpha=None,
            _metrics={"train": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
        )
        prompt = torch.ones(2 * PAIRS, 1, dtype=torch.int64)
        inputs = {
            "input_ids": torch.cat([prompt, self.mask.long()], 1),
            "attention_mask": torch.cat([prompt, self.mask], 1),
            "completion_mask": torch.cat([0 * prompt, self.mask.long()], 1),
        }
        return DPOTrainer._compute_loss(this, model(self.lp), inputs, return_outputs=False)

    def trl_cpo(self, kind: str, beta: float, smoothing: float, margin: float) -> torch.Tensor:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        values = (self.lp if kind == "simpo" else self.lp - self.ref) * self.mask
        of_answer = values.sum(1) / (torch.tensor(self.lengths) if kind == "simpo" else 1)
        this = SimpleNamespace(
            alpha=0.0,
            loss_type=kind,
            beta=beta,
            simpo_gamma=margin,
            label_smoothing=smoothing,
            accelerator=SimpleNamespace(device="cpu"),
        )
        return CPOTrainer.cpo_loss(this, *of_answer.chunk(2))[0].mean()

    def tandem(self, loss: PreferenceLoss) -> tuple[float, torch.Tensor]:
        """The loss by Tandem, and its gradient by the padded log-probs."""
        answers = np.array([answer for pair in self.order for answer in (pair, pair + PAIRS)])
        where = [np.arange(self.lengths[answer]) for answer in answers]
        rows, columns = np.repeat(answers, self.lengths[answers]), np.concatenate(where)
        pair = np.repeat(np.arange(2 * PAIRS) // 2, self.lengths[answers])
        of_pair = np.bincount(pair)[pair]
        weights, parts = item_weights(loss.mean_over, of_pair, of_pair)
        lp = self.lp.detach().clone().requires_grad_()
        items = Items(
            lp[rows, columns],
            torch.zeros(len(rows)),
            torch.tensor(weights / parts.sum()),
            torch.tensor(pair),
            num_sequences=2 * PAIRS,
            reference_logprobs=self.ref[rows, columns],
            pair=torch.tensor(pair),
            rejected=torch.tensor(rows >= PAIRS),
        )
        output = preference_loss(items, loss)
        output.loss.backward()
        assert output.sums["pairs"] == PAIRS
        return output.loss.item(), lp.grad


@pytest.mark.sample(8)
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("beta", [0.05, 0.5])
@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "smooth dpo", "smooth simpo"])
def test_same_loss_and_gradient_as_trl(kind: str, beta: float, scale: float) -> None:
    for seed in range(10):
        batch = Batch(seed, scale)
        smoothing, kind_of = (0.2 if "smooth" in kind else 0.0), kind.split()[-1]
        if kind == "dpo" or kind == "ipo":
            theirs = batch.trl_dpo({"dpo": "sigmoid"}.get(kind, kind), beta)
        else:
            theirs = batch.trl_cpo(
                {"dpo": "sigmoid"}.get(kind_of, kind_of), beta, smoothing, margin=0.7
            )
        (gradient,) = torch.autograd.grad(theirs, batch.lp)
        settings = {"margin": 0.7} if kind_of == "simpo" else {}
        loss, own = batch.tandem(
            PreferenceLoss(kind=kind_of, beta=beta, label_smoothing=smoothing, **settings)
        )
        assert loss == pytest.approx(theirs.item(), rel=1e-12)
        torch.testing.assert_close(own * batch.mask, gradient * batch.mask, rtol=1e-10, atol=1e-14)
