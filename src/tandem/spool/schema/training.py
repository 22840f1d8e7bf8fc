"""Records of what a job computes: its loss, its optimizer settings and its packed data."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tandem.spool.schema.base import Record


class RLLoss(Record):
    """The policy loss. Formulas and sources: `tandem.training.losses`."""

    policy: Literal["cispo", "ppo", "gspo"] = "cispo"
    # The ratio's bounds are [1 - clip_low, 1 + clip_high]; None: the policy's own default (see `clip_bounds`).
    clip_low: float | None = Field(default=None, ge=0)
    clip_high: float | None = Field(default=None, ge=0)
    # Weighted mean over items: weight 1 (token), 1/items of the trajectory, or 1/items of the group. `constant`
    # divides the plain sum by `normalisation_constant` times the number of trajectories (Dr. GRPO). None: the policy's
    # own default (see `mean_over`).
    normalisation: Literal["token", "trajectory", "group", "constant"] | None = None
    normalisation_constant: float | None = Field(default=None, gt=0)
    # The log-probs in the ratio's denominator: the sampler's, or the trainer's own from a pass before the first
    # optimizer step. Truncated importance sampling (`tis_cap`) needs the trainer's.
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    tis_cap: float | None = Field(default=None, gt=0)
    kl_coef: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # The reference: the base model with the adapter off, or a checkpoint (step) of the same run.
    kl_reference: Literal["base"] | int = "base"
    # Measure the KL to the reference even where kl_coef is 0 (costs one more forward pass without gradients).
    kl_metric: bool = False
    entropy_coef: float = Field(default=0.0, ge=0)
    # The trajectories' sampling temperature; logits are divided by it.
    temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tis_cap is not None and self.old_logprobs != "trainer":
            raise ValueError(
                'tis_cap needs old_logprobs="trainer": against the sampler\'s own log-probs the ratio '
                "already corrects the mismatch, and a second factor would apply it twice"
            )
        if (self.normalisation == "constant") != (self.normalisation_constant is not None):
            raise ValueError('normalisation_constant goes with normalisation="constant", and only with it')
        if isinstance(self.kl_reference, int) and self.kl_reference < 0:
            raise ValueError("kl_reference is 'base' or a checkpoint's step >= 0")
        return self

    @property
    def mean_over(self) -> Literal["token", "trajectory", "group", "constant"]:
        """`normalisation` after defaults: CISPO and PPO token, GSPO trajectory (their papers, and DAPO for PPO)."""
        return self.normalisation or ("trajectory" if self.policy == "gspo" else "token")

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """(low, high) bounds of the ratio after defaults: PPO [0.8, 1.28] (DAPO's clip-higher), CISPO [0, 5],
        GSPO [1 - 3e-4, 1 + 4e-4]."""
        low, high = {"ppo": (0.2, 0.28), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4)}[self.policy]
        low = low if self.clip_low is None else self.clip_low
        high = high if self.clip_high is None else self.clip_high
        return max(0.0, 1.0 - low), 1.0 + high


class SFTLoss(Record):
    """Cross-entropy on the items."""

    normalisation: Literal["token", "trajectory"] = "token"

    @property
    def mean_over(self) -> Literal["token", "trajectory"]:
        return self.normalisation


class OptimizerSettings(Record):
    """Adam with decoupled weight decay on fp32 master weights. The learning rate is constant within a job."""

    learning_rate: float = Field(default=1e-4, gt=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    # Packed rows per optimizer step over all data-parallel ranks. None: the data-parallel size (R19).
    grad_accumulation_sequences: int | None = Field(default=None, ge=1)
    # Passes over the job's rows, in an order drawn from the run's seed and the base step.
    epochs: int = Field(default=1, ge=1)


class PackedData(Record):
    """`jobs/data/<id>/`: memory-mapped arrays in the format of `tandem.data.packed_format`."""

    path: str
    num_rows: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    num_items: int = Field(ge=1)  # trained tokens, counted once per trajectory that trains them
    num_tokens: int = Field(ge=1)  # slots in use
    num_unshared_tokens: int = Field(ge=1)  # slots that would be in use without prefix sharing
    num_trajectories: int = Field(ge=1)
    num_groups: int = Field(ge=1)
    dropped_groups: int = Field(default=0, ge=0)  # no variance in their rewards
    dropped_trajectories: int = Field(default=0, ge=0)  # too long, or nothing trained left after truncation
    truncated_trajectories: int = Field(default=0, ge=0)  # cut to the length of a row
    reward_mean: float | None = None
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
