"""Value and gradient of every loss equal those of an independent float64 implementation of the
loss's paper."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tandem.client.rl.config import RLSection
from tandem.controller.schemas import RLRequest
from tandem.spool.schema import PreferenceLoss, RLLoss
from tandem.training import losses
from tandem.training.preference_loss import preference_loss
from training import loss_references as reference

CONSTANT = 17.0


class Case:
    """Random items. Items belong to sequences, sequences to trajectories, and trajectories to
    groups."""

    def __init__(self, seed: int, spread: float) -> None:
        rng = np.random.default_rng(seed)

        def owners(n: int, most: int) -> np.ndarray:
            """The owner of each member, for n owners with 1 to `most` members each."""
            return np.arange(n).repeat(rng.integers(1, most + 1, n))

        group = owners(rng.integers(1, 4), 3)  # The group of each trajectory.
        trajectory = owners(len(group), 2)  # The trajectory of each sequence.
        self.sequence = owners(len(trajectory), 6)  # The sequence of each item.
        of_item = {
            "trajectory": trajectory[self.sequence],
            "group": group[trajectory[self.sequence]],
        }
        self.sequences, self.trajectories, self.groups = (
            [np.flatnonzero(owner == i) for i in range(owner[-1] + 1)]
            for owner in (self.sequence, *of_item.values())
        )
        self.sizes = [np.bincount(owner)[owner] for owner in of_item.values()]
        self.n = n = len(self.sequence)
        self.lp = -rng.exponential(1.5, n)
        self.old = self.lp + spread * rng.normal(size=n)
        self.sampler = self.old + 0.5 * spread * rng.normal(size=n)
        self.ref = self.lp + spread * rng.normal(size=n)
        self.entropy = rng.exponential(1.0, n)
        self.behind = rng.integers(-1, 3, n)
        self.adv = rng.normal(size=len(trajectory))[of_item["trajectory"]]

    def weights(self, kind: str) -> tuple[np.ndarray, float]:
        w, d = losses.item_weights(kind, self.sizes[0], self.sizes[1], CONSTANT)
        return w, float(d.sum())

    def items(self, weights: np.ndarray) -> losses.Items:
        return losses.Items(
            logprobs=torch.tensor(self.lp, requires_grad=True),
            entropy=torch.tensor(self.entropy, requires_grad=True),
            weights=torch.tensor(weights),
            advantages=torch.tensor(self.adv),
            sequence=torch.tensor(self.sequence),
            num_sequences=len(self.sequences),
            old_logprobs=torch.tensor(self.old),
            sampler_logprobs=torch.tensor(self.sampler),
            steps_behind=torch.tensor(self.behind),
            reference_logprobs=torch.tensor(self.ref),
        )


cases = st.builds(Case, st.integers(0, 2**32 - 1), st.sampled_from([1e-4, 0.1, 1.0, 3.0]))


def close(got: torch.Tensor | np.ndarray | float | None, want: np.ndarray | float) -> None:
    assert got is not None
    value = got.detach().numpy() if isinstance(got, torch.Tensor) else got
    np.testing.assert_allclose(value, want, rtol=1e-10, atol=1e-11)


BOUNDS = {
    "cispo": (0.0, 5.0),
    "ppo": (0.8, 1.28),
    "gspo": (1 - 3e-4, 1 + 4e-4),
    "sapo": (0.0, np.inf),
}


@st.composite
def losses_of_every_kind(draw: st.DrawFn) -> RLLoss:
    """Random settings that can be combined. Each setting is off in about half of the draws."""

    def either(*values: object) -> object:
        return draw(st.sampled_from([None] * len(values) + list(values)))

    policy = draw(st.sampled_from(["cispo", "ppo", "gspo", "sapo"]))
    kind = draw(st.sampled_from(["token", "trajectory", "group", "constant"]))
    bounds = draw(st.sampled_from([(None, None), (0.2, 0.28), (0.5, 4.0), (1e-5, 2e-5)]))
    bounded = policy != "sapo"
    tis = {
        "tis_cap": either(0.7, 2.0),
        "tis_mask_low": either(0.0, 0.5),
        "tis_mask_high": either(0.9, 5.0),
    }
    if any(value is not None for value in tis.values()):
        tis["tis_level"] = draw(st.sampled_from(["token", "sequence"]))
    kl_coef = draw(st.sampled_from([0.0, 0.3]))
    chosen = {
        "clip_low": bounds[0] if bounded else None,
        "clip_high": bounds[1] if bounded else None,
        "sapo_temperature_pos": None if bounded else either(0.5, 2.0),
        "sapo_temperature_neg": None if bounded else either(0.5, 2.0),
        **tis,
        "ratio_level": None if policy == "gspo" else either("token", "sequence"),
        "dual_clip": either(5.01, 20.0) if policy in ("ppo", "gspo") else None,
        "off_policy_threshold": either(1e-5, 0.5),
        "normalisation_constant": CONSTANT if kind == "constant" else None,
        "kl_in": (either("loss", "advantage") or "loss") if kl_coef else "loss",
    }
    return RLLoss(
        policy=policy,
        normalisation=kind,
        old_logprobs="trainer",
        kl_coef=kl_coef,
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        entropy_coef=draw(st.sampled_from([0.0, 0.05])),
        kl_correction=bool(kl_coef and chosen["kl_in"] == "loss" and draw(st.booleans())),
        beyond_bounds=(
            draw(st.sampled_from(["clip", "mask"]))
            if bounded and not chosen["dual_clip"]
            else "clip"
        ),
        **chosen,
    )


def in_float64(
    case: Case, spec: RLLoss, w: np.ndarray
) -> tuple[float, np.ndarray, dict[str, np.ndarray]]:
    """The results of `loss_references`: the loss with normalised weights `w`, the loss's gradient
    by the log-probs, and statistics of each item."""
    low, high = BOUNDS[spec.policy]
    if spec.clip_low is not None and spec.clip_high is not None:
        low, high = 1 - spec.clip_low, 1 + spec.clip_high
    adv = case.adv
    if spec.kl_in == "advantage":
        reward = case.old - case.ref
        adv = adv + spec.kl_coef * (reward.mean() - reward)
    c = (
        reference.importance(
            case.old,
            case.sampler,
            case.sequences,
            level=spec.tis_level,
            low=spec.tis_mask_low or 0.0,
            high=spec.tis_mask_high or np.inf,
            cap=spec.tis_cap or np.inf,
        )
        if spec.tis_cap or spec.tis_mask_high or spec.tis_mask_low is not None
        else np.ones(case.n)
    )
    c = c * reference.keeps(
        case.lp, case.sampler, adv, case.sequences, spec.off_policy_threshold or np.inf
    )
    value, grad = reference.policy(
        spec.policy,
        case.lp,
        case.old,
        adv,
        low,
        high,
        case.sequences,
        w * c,
        level=spec.ratio_level or ("sequence" if spec.policy == "gspo" else "token"),
        dual=spec.dual_clip or np.inf,
        mask=spec.beyond_bounds == "mask",
        gate=(spec.sapo_temperature_pos or 1.0, spec.sapo_temperature_neg or 1.05),
    )
    estimate = plain = reference.kl(case.lp, case.ref, spec.kl_estimator)
    if spec.kl_correction:
        estimate = reference.corrected_kl(case.lp, case.old, case.ref, spec.kl_estimator)
    if spec.kl_in == "loss":
        value += spec.kl_coef * float((w * estimate[0]).sum())
        grad = grad + w * spec.kl_coef * estimate[1]
    value -= spec.entropy_coef * float((w * case.entropy).sum())
    return (
        value,
        grad,
        {"kl_reference": plain[0], "advantage": adv, "importance": c, "masked": c == 0},
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(case=cases, spec=losses_of_every_kind())
def test_rl_loss_equals_the_papers(case, spec) -> None:
    weights, denominator = case.weights(spec.mean_over)
    items = case.items(weights)
    items.mean_kl = float((case.old - case.ref).mean())
    out = losses.rl_loss(items, spec)
    (out.loss / denominator).backward()
    w = weights / denominator
    value, grad, statistics = in_float64(case, spec, w)
    close(out.loss / denominator, value)
    close(items.logprobs.grad, grad)
    if spec.entropy_coef:
        close(items.entropy.grad, -w * spec.entropy_coef)
    for name, values in statistics.items():
        if name in out.sums:
            close(out.sums[name], values.sum())
    close(out.sums["entropy"], case.entropy.sum())
    ahead = case.lp - case.sampler
    close(out.sums["kl_sampler"], (np.exp(ahead) - 1 - ahead).sum())
    close(out.sums["logprob_difference"], np.abs(ahead).sum())
    close(out.maxima["above_sampler"], ahead.max())
    for age, of_age in (("fresh", case.behind == 0), ("stale", case.behind > 0)):
        close(out.sums[f"items_{age}"], of_age.sum())
        close(out.sums[f"kl_sampler_{age}"], (np.exp(ahead) - 1 - ahead)[of_age].sum())
        close(out.sums[f"logprob_difference_{age}"], np.abs(ahead)[of_age].sum())


@settings(max_examples=50, deadline=None)
@given(case=cases, beta=st.sampled_from([0.0, 0.05, 3.0]))
def test_dro_is_its_papers(case, beta) -> None:
    """The loss `dro` is the sum over tokens of equation 4 of Richemond et al., arXiv:2405.19107,
    with the advantage in place of reward and value."""
    items = case.items(np.ones(case.n))
    out = losses.rl_loss(items, RLLoss(policy="dro", dro_beta=beta, normalisation="sum"))
    out.loss.backward()
    x = case.lp - case.old
    close(out.loss, sum(-case.lp[i] * case.adv[i] + beta / 2 * x[i] ** 2 for i in range(case.n)))
    close(items.logprobs.grad, [-case.adv[i] + beta * x[i] for i in range(case.n)])
    assert out.sums["clipped"] == 0


@settings(max_examples=100, deadline=None)
@given(
    case=cases,
    bounds=st.sampled_from([(None, None), (0.5, 4.0), (1e-5, 2e-5)]),
    everywhere=st.booleans(),
)
def test_gspo_token_is_its_papers(case, bounds, everywhere) -> None:
    """The loss `gspo_token` is the sum over tokens of equations 13 and 14 of Zheng et al.,
    arXiv:2507.18071. Each token has its own advantage and gradient. Tinker's mask selects the
    tokens whose log-ratios are averaged into the ratio of the sequence."""
    spec = RLLoss(policy="gspo_token", clip_low=bounds[0], clip_high=bounds[1], normalisation="sum")
    low, high = BOUNDS["gspo"] if bounds[0] is None else (1 - bounds[0], 1 + bounds[1])
    rng = np.random.default_rng(case.n)
    items, adv = case.items(np.ones(case.n)), rng.normal(size=case.n)
    masked = np.zeros(case.n, bool)
    if not everywhere:
        for members in case.sequences:
            masked[rng.permutation(members)[1:][: len(members) // 2]] = True
    items.advantages = torch.tensor(adv)
    items.old_logprobs = torch.tensor(np.where(masked, np.nan, case.old))
    out = losses.rl_loss(items, spec)
    out.loss.backward()
    value, grad = 0.0, np.zeros(case.n)
    for members in case.sequences:
        of_ratio = [t for t in members if not masked[t]]
        s = np.exp(sum(case.lp[t] - case.old[t] for t in of_ratio) / len(of_ratio))
        for t in members:
            bounded = min(max(s, low), high) * adv[t]
            value -= min(s * adv[t], bounded)
            grad[t] = 0.0 if bounded < s * adv[t] else -s * adv[t]
    close(out.loss, value)
    close(items.logprobs.grad, grad)


@settings(max_examples=50, deadline=None)
@given(case=cases, kind=st.sampled_from(["token", "trajectory", "group", "constant"]))
def test_weights_are_the_means_of_the_papers(case, kind) -> None:
    w, denominator = case.weights(kind)
    values = np.random.default_rng(0).normal(size=case.n)
    want = reference.normalised(values, kind, case.trajectories, case.groups, CONSTANT)
    close(float((w * values).sum() / denominator), want)


def test_each_policys_own_normalisation_is_its_papers() -> None:
    """CISPO (equation 4 of its paper) and DAPO's PPO (equation 8 of its paper) average over tokens.
    GSPO (equation 5 of its paper) and SAPO average over sequences."""
    policies = ("cispo", "ppo", "gspo", "gspo_token", "sapo")
    found = [RLLoss(policy=policy).mean_over for policy in policies]
    assert found == ["token", "token", "trajectory", "trajectory", "trajectory"]


@settings(max_examples=30, deadline=None)
@given(case=cases, kind=st.sampled_from(["token", "trajectory"]))
def test_sft_is_cross_entropy(case, kind) -> None:
    weights, denominator = case.weights(kind)
    items = case.items(weights / denominator)
    out = losses.sft_loss(items)
    out.loss.backward()
    close(out.loss, reference.normalised(-case.lp, kind, case.trajectories, case.groups, CONSTANT))
    close(items.logprobs.grad, -weights / denominator)


def gradient(case: Case, spec: RLLoss, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The gradient of the loss by the log-probs, with all weights 1."""
    items = case.items(np.ones(case.n))
    for field in dataclasses.fields(items):
        if (
            isinstance(value := getattr(items, field.name), torch.Tensor)
            and value.is_floating_point()
        ):
            setattr(items, field.name, value.detach().to(dtype).requires_grad_(value.requires_grad))
    out = losses.rl_loss(items, spec)
    assert torch.isfinite(out.loss)
    (found,) = torch.autograd.grad(out.loss, items.logprobs)
    assert torch.isfinite(found).all()
    return found.numpy()


# For any log-ratio, the gradient is at most e^20 times the advantage.
@pytest.mark.parametrize("nats", [19.0, 21.0, 60.0, 500.0, 9998.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_token_that_is_far_off_does_not_vanish(nats, dtype) -> None:
    most = np.exp(min(nats, 20.0))
    case = Case(3, 0.1)
    case.adv = -np.abs(case.adv)
    case.old = case.lp - nats  # The policy has moved towards tokens that should become rarer.
    for policy in ("ppo", "gspo"):
        np.testing.assert_allclose(
            gradient(case, RLLoss(policy=policy), dtype), -case.adv * most, rtol=1e-2
        )
    case = Case(3, 0.1)
    case.adv[:] = 0.0
    for sign in (1, -1):
        case.ref = case.lp - sign * nats
        for estimator in ("k1", "k2", "k3"):
            spec = RLLoss(policy="ppo", kl_coef=1.0, kl_estimator=estimator)
            want = (
                sign * nats if estimator != "k3" else (1 - np.exp(-nats) if sign > 0 else 1 - most)
            )
            np.testing.assert_allclose(
                gradient(case, spec, dtype), np.full(case.n, want), rtol=1e-2
            )
            items = case.items(np.ones(case.n))
            if estimator == "k1":
                close(losses.rl_loss(items, spec).sums["kl_reference"], sign * nats * case.n)


def test_gspo_bounds_a_sequences_mean_and_not_each_token() -> None:
    """The log-ratios of 30, -30 and 0 nats have the mean 0, so the sequence's ratio is 1. With a
    log-ratio of 45 nats in place of 30 nats the mean is 5 nats."""
    case = Case(0, 0.0)
    case.n, case.sequence, case.sequences = 3, np.zeros(3, int), [np.arange(3)]
    case.lp, case.adv, case.entropy = np.array([-1.0, -35.0, -2.0]), np.full(3, -1.0), np.ones(3)
    case.sampler, case.ref, case.behind = case.lp, case.lp, np.zeros(3, int)
    for log_ratios in ([30.0, -30.0, 0.0], [45.0, -30.0, 0.0], [-29.0, 29.0, 0.1]):
        case.old = case.lp - np.array(log_ratios)
        spec = RLLoss(policy="gspo", clip_low=0.2, clip_high=0.2)
        value, grad, _ = in_float64(case, spec, np.ones(3))
        close(losses.rl_loss(case.items(np.ones(3)), spec).loss, value)
        close(gradient(case, spec), grad)


def test_clip_fraction_counts_where_clipping_took_the_gradient() -> None:
    lp = torch.log(torch.tensor([0.5, 0.9, 1.1, 2.0] * 2, dtype=torch.float64)).requires_grad_()
    adv = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    zeros, ones = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    items = losses.Items(
        logprobs=lp,
        entropy=ones,
        weights=ones,
        advantages=adv,
        sequence=torch.arange(8),
        num_sequences=8,
        old_logprobs=zeros,
        sampler_logprobs=zeros,
    )
    out = losses.rl_loss(items, RLLoss(policy="ppo"))
    # Two tokens are clipped: the ratio 2 with a positive advantage, and the ratio 0.5 with a
    # negative advantage.
    assert out.sums["clipped"] == 2
    (gradient,) = torch.autograd.grad(out.loss, lp)
    assert (gradient == 0).tolist() == [False, False, False, True, True, False, False, False]
    assert out.maxima["ratio"].item() == pytest.approx(2.0)
    # With "mask", each of the four tokens with a ratio beyond the bounds counts.
    assert losses.rl_loss(items, RLLoss(policy="ppo", beyond_bounds="mask")).sums["clipped"] == 4


def test_rewards_of_a_pair_are_sums_and_simpos_are_means() -> None:
    """In DPO and IPO, the reward of an answer is a sum over tokens. In SimPO, the reward is a mean
    over tokens. The chosen answer has two tokens, the rejected answer has one token."""
    lp, ones = torch.tensor([-1.0, -2.0, -4.0]), torch.ones(3)
    items = losses.Items(
        lp,
        ones,
        ones / 3,
        torch.tensor([0, 0, 1]),
        2,
        reference_logprobs=0 * lp,
        pair=torch.zeros(3, dtype=torch.int64),
        rejected=torch.tensor([False, False, True]),
    )
    for kind, chosen in (("dpo", -0.3), ("ipo", -0.3), ("simpo", -0.15)):
        sums = preference_loss(items, PreferenceLoss(kind=kind, beta=0.1)).sums
        assert (sums["chosen_reward"].item(), sums["rejected_reward"].item()) == pytest.approx(
            (chosen, -0.4)
        )
    # If both answers have the same reward, the accuracy is 0.
    start = dataclasses.replace(items, logprobs=0 * lp)
    assert preference_loss(start, PreferenceLoss()).sums["accuracy"] == 0
    for margin, want in ((None, 0.25 - 0.5), (0.0, 0.25)):
        out = preference_loss(items, PreferenceLoss(kind="simpo", beta=0.1, margin=margin))
        assert out.loss.item() == pytest.approx(np.log1p(np.exp(-want)))


def test_the_corrected_penalty_has_the_kls_gradient_with_tokens_of_another_policy() -> None:
    """The test computes the exact expectation of each estimator's gradient. The policy `old` draws
    the token from a vocabulary of 5 tokens. With correction this expectation is the KL's gradient.
    Without correction this expectation differs from the KL's gradient. If the policy itself draws
    the tokens, k1 and k2 have the KL's gradient without correction too."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old, ref = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - ref)).sum(), logits)
    ones, index = torch.ones(5, dtype=torch.float64), torch.arange(5)
    for estimator in ("k1", "k2", "k3"):
        for correction in (True, False):
            policy = logits.log_softmax(0)
            items = losses.Items(policy, ones, old.exp(), index, 5, 0 * ones, old, old, ref)
            spec = RLLoss(
                policy="ppo", kl_coef=1.0, kl_estimator=estimator, kl_correction=correction
            )
            (got,) = torch.autograd.grad(losses.rl_loss(items, spec).loss, logits)
            assert torch.allclose(got, want) is correction
        policy = logits.log_softmax(0)
        own = (policy.exp().detach() * losses.kl_estimate(policy, ref, estimator)).sum()
        assert torch.allclose(torch.autograd.grad(own, logits)[0], want) is (estimator != "k3")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"policy": "ppo", "dual_clip": 3.0, "beyond_bounds": "mask"},
            'goes with beyond_bounds="clip"',
        ),
        ({"kl_reference": 3}, "goes with kl_coef > 0 or kl_metric"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, object], says: str) -> None:
    turn = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.1]}
    groups = [{"trajectories": [{"turns": [turn], "reward": 1.0}]}]
    for kind, content in (
        (RLRequest, {"groups": groups}),
        (RLSection, {"steps": 1, "environment": [{"use": "a:b"}]}),
    ):
        kind.model_validate(content)
        with pytest.raises(ValidationError, match=says):
            kind.model_validate({**content, "loss": settings})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tis_cap": 2.0}, "old_logprobs"),
        ({"tis_mask_high": 2.0}, "old_logprobs"),
        ({"tis_level": "sequence", "old_logprobs": "trainer"}, "goes with tis_cap"),
        (
            {"tis_mask_low": 2.0, "tis_mask_high": 1.0, "old_logprobs": "trainer"},
            "below tis_mask_high",
        ),
        ({"policy": "gspo", "ratio_level": "token"}, "sequence's"),
        ({"policy": "gspo_token", "ratio_level": "token"}, "sequence's"),
        ({"policy": "cispo", "dual_clip": 9.0}, "PPO and GSPO"),
        ({"policy": "ppo", "dual_clip": 1.28}, "upper bound"),
        ({"policy": "dro"}, "dro_beta goes with"),
        ({"policy": "ppo", "dro_beta": 0.1}, "dro_beta goes with"),
        ({"policy": "dro", "dro_beta": 0.1, "clip_low": 0.2}, "do not bound"),
        ({"policy": "dro", "dro_beta": 0.1, "beyond_bounds": "mask"}, "do not bound"),
        ({"policy": "dro", "dro_beta": 0.1, "ratio_level": "token"}, "no ratio"),
        ({"policy": "sapo", "dual_clip": 3.0}, "do not bound"),
        ({"policy": "ppo", "sapo_temperature_neg": 1.1}, 'go with policy="sapo"'),
        ({"kl_correction": True}, "kl_coef"),
        ({"kl_reference": True, "kl_coef": 0.1}, "valid integer"),
        ({"kl_reference": "3", "kl_coef": 0.1}, "valid integer"),
        ({"kl_in": "advantage"}, "kl_coef"),
        ({"kl_in": "advantage", "kl_correction": True, "kl_coef": 0.1}, "kl_correction is for"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, says) -> None:
    with pytest.raises(ValidationError, match=says):
        RLLoss.model_validate(settings)
