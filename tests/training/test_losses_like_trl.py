"""Value and gradient of the losses equal those of TRL's `GRPOTrainer._compute_loss`, which the
tests call on padded completions."""

import functools
from collections import defaultdict
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.spool.schema import RLLoss
from tandem.training import losses

pytestmark = pytest.mark.slow  # The import of TRL is slow.

LONGEST = 9  # Tokens of the longest completion. This number is also the constant of DrGRPO's loss.
SEQUENCES = 6


@functools.cache
def trainer_class() -> Any:
    """TRL's trainer of GRPO, imported without vLLM. The functions that these tests use don't need
    vLLM."""
    utils: Any = import_module("trl.import_utils")
    utils.is_vllm_available = lambda *_, **__: False
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


class Batch:
    """Random completions. Each trajectory is one sequence. TRL gets the completions padded, [B, T].
    Tandem gets the completions as flat items."""

    def __init__(self, seed: int, spread: float, advantages: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, LONGEST + 1, SEQUENCES)
        self.mask = torch.tensor(np.arange(LONGEST) < self.lengths[:, None])
        shape = (SEQUENCES, LONGEST)
        self.lp = torch.tensor(-rng.exponential(1.5, shape), requires_grad=True)
        # The log-probs of whole sequences drift too, not only those of single tokens.
        drift = spread * rng.normal(size=(SEQUENCES, 1))
        self.old = self.lp.detach() + torch.tensor(drift + spread * rng.normal(size=shape))
        self.ref = self.lp.detach() + torch.tensor(spread * rng.normal(size=shape))
        self.entropy = torch.tensor(rng.exponential(1.0, shape))
        self.adv = torch.tensor(rng.normal(size=SEQUENCES))

    def trl(self, loss_type: str, **settings: Any) -> tuple[float, torch.Tensor]:
        """TRL's loss and its gradient by the log-probs, from one micro-batch on one process."""
        args = {
            "delta": None,
            "use_bias_correction_kl": False,
            "steps_per_generation": 1,
            "sapo_temperature_pos": 1.0,
            "sapo_temperature_neg": 1.05,
        }
        trainer = {
            "loss_type": loss_type,
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "off_policy_mask_threshold": None,
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
            "max_completion_length": LONGEST,
            "current_gradient_accumulation_steps": 1,
        }
        for key, value in settings.items():
            (args if key in args else trainer)[key] = value
        one = SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            reduce=lambda x, reduction: x,
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
        )
        this = SimpleNamespace(
            **trainer,
            args=SimpleNamespace(**args),
            accelerator=one,
            model=SimpleNamespace(training=True),
            _metrics={"train": defaultdict(list)},
            get_off_policy_mask=trainer_class().get_off_policy_mask,
            _get_per_token_logps_and_entropies=lambda *_, **__: (self.lp, self.entropy, None),
        )
        ids = torch.zeros(SEQUENCES, LONGEST, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": self.mask.double(),
            "advantages": self.adv,
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.ref,
            "num_items_in_batch": self.mask.sum(),
        }
        loss = trainer_class()._compute_loss(this, None, inputs)
        (gradient,) = torch.autograd.grad(loss, self.lp)
        return loss.item(), gradient[self.mask]

    def tandem(self, spec: RLLoss) -> tuple[float, torch.Tensor]:
        own = np.repeat(self.lengths, self.lengths)
        weights, parts = losses.item_weights(spec.mean_over, own, own, spec.normalisation_constant)
        row = torch.arange(SEQUENCES)[:, None].expand(SEQUENCES, LONGEST)[self.mask]
        lp = self.lp.detach()[self.mask].requires_grad_()
        items = losses.Items(
            logprobs=lp,
            entropy=self.entropy[self.mask],
            weights=torch.tensor(weights / parts.sum()),
            advantages=self.adv[row],
            sequence=row,
            num_sequences=SEQUENCES,
            old_logprobs=self.old[self.mask],
            sampler_logprobs=self.old[self.mask],
            reference_logprobs=self.ref[self.mask],
        )
        loss = losses.rl_loss(items, spec).loss
        (gradient,) = torch.autograd.grad(loss, lp)
        return loss.item(), gradient


KL = {"kl_coef": 0.3, "kl_estimator": "k3"}
SEQUENCE = {"importance_sampling_level": "sequence"}
NARROW = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Name: (Tandem's settings, TRL's settings).
    "DAPO": ({"policy": "ppo"}, {"loss_type": "dapo"}),
    "BNPO": ({"policy": "ppo"}, {"loss_type": "bnpo"}),
    "GRPO": ({"policy": "ppo", "normalisation": "trajectory"}, {"loss_type": "grpo"}),
    "Dr. GRPO": (
        {"policy": "ppo", "normalisation": "constant", "normalisation_constant": float(LONGEST)},
        {"loss_type": "dr_grpo"},
    ),
    "CISPO": ({"policy": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "GSPO by its defaults": ({"policy": "gspo"}, {"loss_type": "grpo", **SEQUENCE, **NARROW}),
    "PPO, sequences' ratios": (
        {"policy": "ppo", "ratio_level": "sequence"},
        {"loss_type": "dapo", **SEQUENCE},
    ),
    "CISPO, sequences' ratios": (
        {"policy": "cispo", "ratio_level": "sequence"},
        {"loss_type": "cispo", "epsilon_high": 5.0, **SEQUENCE},
    ),
    # TRL holds the temperatures in fp32, in which 1.5 and 2 are exact.
    "SAPO": (
        {"policy": "sapo", "sapo_temperature_neg": 1.5},
        {"loss_type": "sapo", "sapo_temperature_neg": 1.5},
    ),
    "SAPO, sequences' ratios": (
        {"policy": "sapo", "ratio_level": "sequence", "sapo_temperature_neg": 2.0},
        {"loss_type": "sapo", "sapo_temperature_neg": 2.0, **SEQUENCE},
    ),
    "dual clip": ({"policy": "ppo", "dual_clip": 3.0}, {"loss_type": "dapo", "delta": 3.0}),
    "dual clip of GSPO": (
        {"policy": "gspo", "dual_clip": 2.0},
        {"loss_type": "grpo", "delta": 2.0, **SEQUENCE, **NARROW},
    ),
    "off-policy mask": (
        {"policy": "ppo", "off_policy_threshold": 0.1},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1},
    ),
    "off-policy mask of GSPO": (
        {"policy": "gspo", "off_policy_threshold": 0.1},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.1, **SEQUENCE, **NARROW},
    ),
    "KL": ({"policy": "ppo", **KL}, {"loss_type": "dapo", "beta": 0.3}),
    "KL per trajectory": (
        {"policy": "gspo", **KL},
        {"loss_type": "grpo", "beta": 0.3, **SEQUENCE, **NARROW},
    ),
    "corrected KL": (
        {"policy": "ppo", "kl_correction": True, **KL},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "corrected KL of CISPO": (
        {"policy": "cispo", "kl_correction": True, **KL},
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.3, "use_bias_correction_kl": True},
    ),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spread", [1e-4, 0.2, 1.0, 3.0])
def test_same_loss_and_gradient_as_trl(name, spread) -> None:
    ours, theirs = CASES[name]
    for seed in range(20):
        batch = Batch(seed, spread)
        loss, gradient = batch.tandem(RLLoss.model_validate(ours))
        expected, expected_gradient = batch.trl(**theirs)
        assert loss == pytest.approx(expected, rel=1e-11, abs=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-11, atol=1e-12)
