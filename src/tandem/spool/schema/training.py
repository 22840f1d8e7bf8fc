"""Records of what a job computes: its loss, its optimizer settings and its packed data."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from tandem.spool.schema.base import Record

Step = Annotated[int, Field(strict=True)]
"""The number of a step. The type is strict, so that `true`, `false` and strings are not converted
to numbers."""


class _Own(NamedTuple):
    """A policy's default settings, as in the policy's paper."""

    level: Literal["token", "sequence"]
    mean_over: Literal["token", "trajectory"]
    clip_low: float
    clip_high: float


_OWN = {
    "cispo": _Own("token", "token", 1.0, 4.0),
    "ppo": _Own("token", "token", 0.2, 0.28),  # DAPO's mean and raised upper bound
    "gspo": _Own("sequence", "trajectory", 3e-4, 4e-4),
    "gspo_token": _Own("sequence", "trajectory", 3e-4, 4e-4),
    "dro": _Own("token", "token", 1.0, math.inf),  # no bounds
    "sapo": _Own("token", "trajectory", 1.0, math.inf),  # no bounds
}
"""The defaults of each policy of `RLLoss`. A policy without bounds has the values 1.0 and inf: all
ratios are between 1 - 1.0 and inf. A new policy needs a line in this table, its name in
`RLLoss.policy`, and its term in `tandem.training.losses.policy_terms`."""


class RLLoss(Record):
    """The settings of the policy loss. `tandem.training.losses` has the formulas and their
    sources."""

    reference_field: ClassVar[str] = "loss.kl_reference"
    policy: Literal["cispo", "ppo", "gspo", "gspo_token", "dro", "sapo"] = "cispo"
    # The ratio's bounds are [1 - clip_low, 1 + clip_high]. A bound that is None has the policy's
    # own default (see `clip_bounds`).
    clip_low: float | None = Field(default=None, ge=0)
    clip_high: float | None = Field(default=None, ge=0)
    # The level of the ratio: the token's own ratio, or the ratio of the token's sequence (exp of
    # the mean log-ratio). If `ratio_level` is None, the policy's own default is used (see `level`).
    ratio_level: Literal["token", "sequence"] | None = None
    # The treatment of an item whose ratio is beyond the bounds: `clip` clips the ratio in the way
    # of the policy, and `mask` leaves the item out.
    beyond_bounds: Literal["clip", "mask"] = "clip"
    # PPO and GSPO: an upper bound on the ratio of items with a negative advantage.
    dual_clip: float | None = Field(default=None, gt=1)
    # DRO: the weight of the squared log-ratio.
    dro_beta: float | None = Field(default=None, ge=0)
    # SAPO: the temperatures of the sigmoid gate for positive and for other advantages. As the ratio
    # moves away from 1, a higher temperature closes the gate faster. The default temperatures are 1
    # for positive advantages and 1.05 for other advantages.
    sapo_temperature_pos: float | None = Field(default=None, gt=0)
    sapo_temperature_neg: float | None = Field(default=None, gt=0)
    # A sequence with a negative advantage is left out if its log-probs fell by more than this many
    # nats per token on average.
    off_policy_threshold: float | None = Field(default=None, gt=0)
    # The weight of an item in the weighted mean: 1 for `token`, 1/items of the trajectory for
    # `trajectory`, and 1/items of the group for `group`. `constant` divides the plain sum by
    # `normalisation_constant` times the number of trajectories (Liu et al., 2025,
    # arXiv:2503.20783). `sum` is the plain sum. If `normalisation` is None, the policy's own
    # default is used (see `mean_over`).
    normalisation: Literal["token", "trajectory", "group", "constant", "sum"] | None = None
    normalisation_constant: float | None = Field(default=None, gt=0)
    # The log-probs in the denominator of the ratio. The denominator's log-probs come from the
    # sampler, or from a pass of the trainer before the first optimizer step. Importance weights
    # between trainer and sampler (`tis_*`) need the trainer's log-probs.
    old_logprobs: Literal["sampler", "trainer"] = "sampler"
    # The importance weight of an item: the weight of the token, or the product of the weights of
    # the token's sequence. The weight is truncated at `tis_cap`, and is 0 below `tis_mask_low` or
    # above `tis_mask_high`.
    tis_level: Literal["token", "sequence"] = "token"
    tis_cap: float | None = Field(default=None, gt=0)
    tis_mask_low: float | None = Field(default=None, ge=0)
    tis_mask_high: float | None = Field(default=None, gt=0)
    # `mean_abs` divides each advantage by the mean |advantage| of the job's items.
    advantage_scale: Literal["none", "mean_abs"] = "none"
    kl_coef: float = Field(default=0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    # The KL is a penalty in the loss, or a part of each token's advantage. In the advantage, the KL
    # is always the log-ratio, and `kl_estimator` has no effect.
    kl_in: Literal["loss", "advantage"] = "loss"
    # If `kl_correction` is true, the KL penalty is multiplied by the token's ratio. The
    # multiplication makes the penalty's gradient unbiased for tokens that an older policy sampled.
    kl_correction: bool = False
    # The reference policy: the base model with the adapter off, or a checkpoint (step) of the same
    # run.
    kl_reference: Literal["base"] | Step = "base"
    # If `kl_metric` is true, the KL is measured even if kl_coef is 0. Measuring the KL costs one
    # more forward pass without gradients.
    kl_metric: bool = False
    entropy_coef: float = Field(default=0.0, ge=0)
    # The sampling temperature of the trajectories, by which the trainer divides the logits.
    temperature: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.weighs_sampler and self.old_logprobs != "trainer":
            raise ValueError(
                'tis_cap and tis_mask_* need old_logprobs="trainer": against the sampler\'s own'
                " log-probs the ratio already corrects the mismatch, and a second factor would"
                " apply it twice"
            )
        if self.tis_level == "sequence" and not self.weighs_sampler:
            raise ValueError(
                'tis_level="sequence" goes with tis_cap, tis_mask_low or tis_mask_high'
            )
        if (self.tis_mask_low or 0.0) >= (self.tis_mask_high or float("inf")):
            raise ValueError("tis_mask_low must be below tis_mask_high")
        if _OWN[self.policy].level == "sequence" and self.ratio_level == "token":
            raise ValueError("GSPO's ratio is the sequence's; policy=\"ppo\" has the token's")
        if (self.policy == "dro") != (self.dro_beta is not None):
            raise ValueError('dro_beta goes with policy="dro", and only with it')
        bounds = (self.clip_low, self.clip_high, self.dual_clip)
        if self.policy in ("dro", "sapo") and (
            set(bounds) != {None} or self.beyond_bounds == "mask"
        ):
            raise ValueError(
                "DRO and SAPO do not bound the ratio; leave clip_low, clip_high, dual_clip and"
                " beyond_bounds out"
            )
        if self.policy == "dro" and self.ratio_level is not None:
            raise ValueError("DRO has no ratio in its loss; leave ratio_level out")
        temperatures = (self.sapo_temperature_pos, self.sapo_temperature_neg)
        if self.policy != "sapo" and set(temperatures) != {None}:
            raise ValueError(
                'sapo_temperature_pos and _neg go with policy="sapo", and only with it'
            )
        if self.dual_clip is not None and (
            self.policy == "cispo" or self.dual_clip <= self.clip_bounds[1]
        ):
            raise ValueError(
                "dual_clip is for PPO and GSPO, and above their upper bound"
                f" ({self.clip_bounds[1]:g})"
            )
        if self.dual_clip is not None and self.beyond_bounds == "mask":
            raise ValueError(
                'dual_clip goes with beyond_bounds="clip": where it acts, "mask" leaves the token'
                " out"
            )
        if (self.kl_in == "advantage" or self.kl_correction) and not self.kl_coef:
            raise ValueError("kl_in and kl_correction go with kl_coef > 0")
        if self.kl_in == "advantage" and self.kl_correction:
            raise ValueError(
                'kl_correction is for kl_in="loss": in the advantage, the ratio already weighs'
                " the KL"
            )
        if (self.normalisation == "constant") != (self.normalisation_constant is not None):
            raise ValueError(
                'normalisation_constant goes with normalisation="constant", and only with it'
            )
        if isinstance(self.kl_reference, int) and self.kl_reference < 0:
            raise ValueError("kl_reference is 'base' or a checkpoint's step >= 0")
        if self.kl_reference != "base" and not (self.kl_coef or self.kl_metric):
            raise ValueError("kl_reference goes with kl_coef > 0 or kl_metric")
        return self

    @property
    def reference_step(self) -> int | None:
        """The step of the checkpoint that the job needs in addition to its base step."""
        return self.kl_reference if isinstance(self.kl_reference, int) else None

    @property
    def weighs_sampler(self) -> bool:
        """Whether items have importance weights between trainer and sampler."""
        return any(
            value is not None for value in (self.tis_cap, self.tis_mask_low, self.tis_mask_high)
        )

    @property
    def level(self) -> Literal["token", "sequence"]:
        """The value of `ratio_level`; the policy's own default if `ratio_level` is None."""
        return self.ratio_level or _OWN[self.policy].level

    @property
    def mean_over(self) -> Literal["token", "trajectory", "group", "constant", "sum"]:
        """The value of `normalisation`; the policy's own default if `normalisation` is None."""
        return self.normalisation or _OWN[self.policy].mean_over

    @property
    def sapo_temperatures(self) -> tuple[float, float]:
        """`(sapo_temperature_pos, sapo_temperature_neg)`, with the paper's values as defaults."""
        return self.sapo_temperature_pos or 1.0, self.sapo_temperature_neg or 1.05

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The (low, high) bounds of the ratio, with the policy's own defaults: PPO [0.8, 1.28],
        CISPO [0, 5]."""
        own = _OWN[self.policy]
        low = own.clip_low if self.clip_low is None else self.clip_low
        high = own.clip_high if self.clip_high is None else self.clip_high
        return max(0.0, 1.0 - low), 1.0 + high


class SFTLoss(Record):
    """Cross-entropy on the items. The loss is the weighted mean; with `normalisation="sum"`, it is
    the weighted sum over an optimizer step. If weights of both signs occur, only `sum` is possible,
    because a mean divides by the sum of the weights, which may be 0."""

    reference_field: ClassVar[str] = ""
    normalisation: Literal["token", "trajectory", "sum"] = "token"

    @property
    def mean_over(self) -> Literal["token", "trajectory", "sum"]:
        return self.normalisation

    @property
    def reference_step(self) -> None:
        return None


class PreferenceLoss(Record):
    """The loss of pairs of a chosen and a rejected answer. Formulas and sources:
    `tandem.training.losses`."""

    reference_field: ClassVar[str] = "loss.reference"
    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    beta: float | None = Field(default=None, gt=0)  # By default 0.1 for DPO and IPO, 2 for SimPO.
    # DPO and SimPO: the assumed share of pairs whose preference is wrong.
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    # SimPO: the margin by which the reward of the chosen answer should exceed the reward of the
    # rejected answer. None: 0.5.
    margin: float | None = Field(default=None, ge=0)
    # DPO and IPO: the reference policy. "start" is the checkpoint that the job starts from.
    reference: Literal["start", "base"] | Step = "start"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "simpo" and self.reference != "start":
            raise ValueError("SimPO has no reference; leave loss.reference out")
        if self.kind != "simpo" and self.margin is not None:
            raise ValueError('margin goes with kind="simpo"')
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError('label_smoothing goes with kind="dpo" or "simpo"')
        if isinstance(self.reference, int) and self.reference < 0:
            raise ValueError("reference is 'start', 'base' or a checkpoint's step >= 0")
        return self

    @property
    def strength(self) -> float:
        """The value of `beta`; the default of the loss if `beta` is None."""
        return self.beta or (2.0 if self.kind == "simpo" else 0.1)

    @property
    def mean_over(self) -> Literal["group"]:
        return "group"  # for the packer, each pair is a group

    @property
    def reference_step(self) -> int | None:
        return self.reference if isinstance(self.reference, int) else None


Loss = RLLoss | SFTLoss | PreferenceLoss


class Schedule(Record):
    """The change of the learning rate over optimizer steps, across all jobs of one training.

    Step k (0, 1, ...) of `total` has the factor (k + 1) / (warmup + 1) while k < warmup. For later
    steps, let x = (k - warmup) / (total - warmup). The factor is 1 (constant), floor + (1 - floor)
    (1 - x) (linear), or floor + (1 - floor) (1 + cos(pi x)) / 2 (cosine; Loshchilov and Hutter,
    2016, arXiv:1608.03983, equation 5).
    """

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    total: int | None = Field(default=None, ge=1)
    # number of this job's first optimizer step within the training
    start: int = Field(default=0, ge=0)
    floor: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.shape != "constant" and self.total is None:
            raise ValueError(
                f"shape={self.shape!r} needs total, the optimizer steps of the whole training"
            )
        if self.total is not None and self.total <= self.warmup:
            raise ValueError("total must be above warmup")
        return self

    def factor(self, step: int) -> float:
        """The factor on `learning_rate` in the job's optimizer step number `step` (from 0)."""
        k = self.start + step
        if k < self.warmup:
            return (k + 1) / (self.warmup + 1)
        if self.total is None or self.shape == "constant":
            return 1.0
        x = min(1.0, (k - self.warmup) / (self.total - self.warmup))
        return self.floor + (1 - self.floor) * (
            1 - x if self.shape == "linear" else (1 + math.cos(math.pi * x)) / 2
        )


class OptimizerSettings(Record):
    """Adam with decoupled weight decay on fp32 master weights."""

    learning_rate: float = Field(default=1e-4, gt=0)
    schedule: Schedule = Schedule()
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    # The number of packed rows in an optimizer step, summed over all data-parallel ranks. None: the
    # data-parallel size.
    grad_accumulation_sequences: int | None = Field(default=None, ge=1)
    # The size of an optimizer step, counted in examples, pairs or groups instead of rows. If
    # `batch_size` is set, the packer fills each row with samples of one optimizer step only.
    batch_size: int | None = Field(default=None, ge=1)
    epochs: int = Field(default=1, ge=1)  # passes over the job's rows, each in a different order

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.batch_size is not None and self.grad_accumulation_sequences is not None:
            raise ValueError("give batch_size or grad_accumulation_sequences, not both")
        return self

    def rate(self, step: int) -> float:
        """The learning rate of the job's optimizer step number `step` (from 0)."""
        return self.learning_rate * self.schedule.factor(step)


class PackedData(Record):
    """A job's directory `data`: a file of arrays in the format of `tandem.data.packed_format`."""

    path: str
    sha256: str  # SHA-256 of the file
    num_rows: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    num_items: int = Field(ge=1)  # trained tokens, counted once per trajectory that trains them
    num_tokens: int = Field(ge=1)  # slots in use
    num_unshared_tokens: int = Field(ge=1)  # slots that would be in use without prefix sharing
    num_trajectories: int = Field(ge=1)
    num_groups: int = Field(ge=1)
    # Number of groups that are left out because all rewards of the group are equal.
    dropped_groups: int = Field(default=0, ge=0)
    # Number of trajectories that are left out because they are too long, or because they have no
    # trained token after truncation.
    dropped_trajectories: int = Field(default=0, ge=0)
    # Number of trajectories that are cut to a row's length.
    truncated_trajectories: int = Field(default=0, ge=0)
    # The number of examples or pairs that are only evaluated. The counts dropped_trajectories and
    # truncated_trajectories include evaluated examples; the other counts, such as num_rows, do not.
    num_held_out: int = Field(default=0, ge=0)
    # Reinforcement learning: the step of the oldest checkpoint that sampled a turn; None if this
    # step is unknown.
    policy_step_min: int | None = None
    policy_step_mean: float | None = None  # mean over turns
    reward_mean: float | None = None
    reward_std: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
