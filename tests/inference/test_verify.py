"""The log-probs that pass the publisher's verification. Right weights pass with any noise. Wrong
weights pass only if noise hides their difference from the right weights."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from tandem.inference.publisher.verify import (
    MARGIN,
    MOVED_SHARE,
    ROUNDING,
    Tolerance,
    WrongWeights,
    movement,
    verify,
)
from tandem.spool.schema import LongProbe, Probe

RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(0, 200, 65).tolist() for _ in range(4)]
PREVIOUS = RNG.normal(-3.0, 0.5, (4, 64))
LONG = RNG.integers(200, 300, 1000).tolist()
BASE = RNG.normal(-3.0, 0.5, (4, 64))


class Scorer:
    """A vLLM that answers requests for one adapter. If `base` is given, this vLLM also answers
    requests for the base model."""

    def __init__(
        self,
        served: np.ndarray,
        long: Sequence[float] = (),
        longest: int = 4095,
        base: np.ndarray | None = None,
    ) -> None:
        self.values = {"run@1": served} | ({} if base is None else {"base": base})
        self.long, self.longest = long, longest

    def longest_prompt(self) -> int:
        return self.longest

    def prompt_logprobs(self, model: str, *prompts: Sequence[int]) -> list[list[float]]:
        return [self._of(model, tokens) for tokens in prompts]

    def _of(self, model: str, tokens: Sequence[int]) -> list[float]:
        assert len(tokens) <= self.longest
        if list(tokens) == LONG[: len(tokens)]:
            return list(self.long[: len(tokens) - 1])
        (row,) = (
            index for index, known in enumerate(TOKENS) if known[: len(tokens)] == list(tokens)
        )
        return self.values[model][row, : len(tokens) - 1].tolist()


def probe(new: np.ndarray, previous: np.ndarray = PREVIOUS, base: np.ndarray = BASE) -> Probe:
    return Probe(
        tokens=TOKENS, logprobs=new.tolist(), previous=previous.tolist(), base=base.tolist()
    )


def within(limit: float) -> Tolerance:
    """A tolerance whose bound is `limit` for every measured rounding."""
    return Tolerance(math.inf, limit)


def refusal(served: np.ndarray, of_trainer: Probe, tolerance: float = 0.02) -> str:
    """The reason for which verification refuses the log-probs `served`. The result is empty if the
    log-probs pass."""
    try:
        verify(Scorer(served), "run@1", of_trainer, tolerance=within(tolerance))
    except WrongWeights as error:
        return str(error)
    return ""


def noise(size: float) -> np.ndarray:
    return RNG.normal(0.0, size, (4, 64))


def flat(*arrays: np.ndarray) -> tuple[list[float], ...]:
    return tuple(array.ravel().tolist() for array in arrays)


@pytest.mark.parametrize("step", [1.0, 1e-2, 1e-3, 0.0])
@pytest.mark.parametrize("error", [1e-6, 1e-4, 1e-2])
def test_right_weights_pass_whatever_the_step_and_the_noise(step: float, error: float) -> None:
    for _ in range(30):
        new = PREVIOUS + noise(step)
        result = verify(Scorer(new + noise(error)), "run@1", probe(new), tolerance=within(0.02))
    assert result.tokens == 256
    assert result.error == pytest.approx(error * math.sqrt(2 / math.pi), rel=0.2)


@pytest.mark.parametrize("step", [0.0, 0.1, 0.5, 2.0])
def test_right_weights_pass_where_trainer_and_vllm_differ_by_more_than_the_step(
    step: float,
) -> None:
    """The trainer's kernels and vLLM's kernels round differently. Each program has nearly the same
    rounding errors with and without the adapter. So after a small step, vLLM's log-probs of the
    checkpoint are nearer to vLLM's log-probs of the base model than to the trainer's log-probs of
    the checkpoint.
    """
    size = 2e-2
    for _ in range(300):
        between = noise(size)
        new = BASE + noise(step * size)
        served = new + between + noise(size / 4)
        if step == 0.5:
            coefficient, error = movement(*flat(served, new, BASE + between), contexts=range(256))
            assert coefficient + MARGIN * error < 0.5
        assert not refusal(served, probe(new, BASE, BASE), 0.05)


@pytest.mark.parametrize("step", [0.0, 0.3, 1.0, 3.0])
def test_right_weights_pass_where_the_trainers_own_log_probs_are_as_noisy(step: float) -> None:
    """The trainer and vLLM both round to bfloat16, so the log-probs of two steps differ mostly by
    rounding."""
    size = 2e-2
    for _ in range(300):
        true = PREVIOUS + noise(step * size)
        of_trainer = probe(true + noise(size), PREVIOUS + noise(size), BASE + noise(size))
        assert not refusal(true + noise(size), of_trainer, 0.05)
        if step == 3.0:
            assert "the checkpoint before it" in refusal(
                PREVIOUS + noise(size / 4), of_trainer, 0.5
            )


@pytest.mark.parametrize(("step", "error"), [(1.0, 1e-2), (1e-2, 1e-2), (1e-3, 1e-4), (1e-4, 1e-6)])
def test_the_previous_weights_fail_where_noise_lets_them_be_told_apart(
    step: float, error: float
) -> None:
    assert refusal(PREVIOUS + noise(error), probe(PREVIOUS + noise(step)))


def test_right_weights_pass_where_rounding_moves_all_copies_of_a_prompt_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequences of a task such as "What is 47 + 38?" share most words, so rounding moves the
    log-probs of these sequences in the same direction. The log-probs of right weights should lie
    near those of the checkpoint. On an H100, the log-probs of right merged weights lay at only 0.19
    of the way from the previous step to the checkpoint. The standard error of the value 0.19 is
    0.06 if each token counts separately.
    """
    monkeypatch.setitem(globals(), "TOKENS", [[200 + i, *TOKENS[0][1:]] for i in range(4)])

    random = np.random.default_rng(0)

    def alike(size: float) -> np.ndarray:
        return np.tile(random.normal(0.0, size, 64), (4, 1))

    refused = 0
    for _ in range(100):
        true = PREVIOUS + alike(5e-3)
        served, new, before = true + alike(2e-2), true + alike(2e-2), PREVIOUS + alike(2e-2)
        a, error = movement(*flat(served, new, before), contexts=range(256)) or (0.5, 0.0)
        refused += a + MARGIN * error < 0.5
        assert not refusal(served, probe(new, before, before), 0.1)
    assert refused > 0
    old, new = PREVIOUS + alike(2e-2), PREVIOUS + alike(0.3)
    assert "the checkpoint before it" in refusal(PREVIOUS + alike(2e-2), probe(new, old, BASE), 0.5)


@pytest.mark.parametrize(("share", "passes"), [(0.09, True), (0.2, False)])
def test_a_few_tokens_may_be_off_by_any_amount(share: float, passes: bool) -> None:
    """Rounding sends some tokens of a mixture of experts to other experts."""
    new = PREVIOUS + noise(0.3)
    off = np.zeros(256)
    off[: round(share * 256)] = -8.0
    reason = refusal(new + RNG.permutation(off).reshape(4, 64), probe(new))
    told = "over the closest 90% of 256 tokens (allowed: 0.02; median 0, largest 8)"
    assert (reason == "") == passes == (told not in reason)


@pytest.mark.parametrize(("step", "refused"), [(0.0, 0), (0.03, 0), (0.1, 45), (0.3, 50)])
def test_a_mixtures_tokens_that_go_to_other_experts_decide_nothing(
    step: float, refused: int
) -> None:
    """Each computation of a mixture of experts sends a few of 100 tokens to other experts. These
    tokens differ between computations. `refused`: the minimum number of refusals of the old weights
    in 50 tries."""

    def computed(values: np.ndarray) -> np.ndarray:
        return values + noise(0.03) + noise(1.0) * (RNG.random(values.shape) < 0.04)

    told = 0
    for _ in range(50):
        true = PREVIOUS + noise(step)
        of_trainer = probe(computed(true), computed(PREVIOUS), computed(BASE))
        assert not refusal(computed(true), of_trainer, 0.05)
        told += "the checkpoint before it" in refusal(computed(PREVIOUS), of_trainer, 0.5)
    assert told >= refused


def test_an_error_above_the_tolerance_fails() -> None:
    new = PREVIOUS + noise(1.0)
    assert not refusal(new + 0.0199, probe(new))
    assert "differ from the trainer's by 0.0201" in refusal(new + 0.0201, probe(new))
    for value in (math.nan, math.inf, -math.inf):
        served = new.copy()
        served[2, 3] = value
        assert "not all finite" in refusal(served, probe(new))
    small = BASE + noise(5e-3)
    assert "base model" in refusal(BASE + noise(1e-4), probe(small)), "it is within the tolerance"


def test_malformed_probes_fail() -> None:
    good = probe(PREVIOUS)
    short = ({field: getattr(good, field)[:-1]} for field in ("logprobs", "previous", "base"))
    for update in (*short, {"tokens": [], "logprobs": []}):
        assert "malformed" in refusal(PREVIOUS, good.model_copy(update=update))


def test_movement_is_the_share_of_the_way() -> None:
    new = PREVIOUS + noise(1.0)
    for share in (0.0, 0.3, 1.0, 1.4):
        moved = movement(
            *flat(PREVIOUS + share * (new - PREVIOUS), new, PREVIOUS), contexts=range(256)
        )
        assert moved == pytest.approx((share, 0.0), abs=1e-9)
    assert movement([1.0], [2.0], [2.0], [0]) is None


@pytest.mark.parametrize(
    ("differs_from", "longest", "refused"),
    [
        (1000, 4095, False),
        (700, 4095, True),
        (700, 999, True),
        (700, 600, False),
        (200, 300, True),
        (700, 20, False),
    ],
)
def test_what_differs_only_after_many_tokens_is_refused_where_vllm_takes_so_many(
    differs_from: int, longest: int, refused: bool
) -> None:
    positions = [position for end in (250, 500, 750, 1000) for position in range(end - 16, end)]
    values = RNG.normal(-3.0, 0.5, 999)
    of_trainer = probe(PREVIOUS).model_copy(
        update={
            "long": LongProbe(
                tokens=LONG, positions=positions, logprobs=[values[p - 1] for p in positions]
            )
        }
    )
    served = values + np.where(np.arange(999) >= differs_from, 1.0, 1e-4)
    with pytest.raises(WrongWeights, match="in a sequence of") if refused else nullcontext():
        result = verify(
            Scorer(PREVIOUS, served, longest), "run@1", of_trainer, tolerance=within(0.02)
        )
    if longest > 64 and not refused:
        assert result.tokens == 256 + sum(position < longest for position in positions)


def test_a_server_with_short_prompts_is_compared_on_the_beginnings() -> None:
    new = PREVIOUS + noise(0.1)
    result = verify(Scorer(new, longest=15), "run@1", probe(new), tolerance=within(0.02))
    assert result.tokens == 4 * 14
    with pytest.raises(WrongWeights, match="before it"):
        verify(Scorer(PREVIOUS, longest=15), "run@1", probe(new), tolerance=within(1.0))


@pytest.mark.parametrize("moved", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("base_error", [0.0, 0.03, 0.3])
def test_the_bound_grows_with_the_measured_rounding_and_with_the_way(
    moved: float, base_error: float
) -> None:
    """`moved` is the distance from the base model's log-probs to the checkpoint's log-probs. After
    a real model moved by 0.8 nats, the log-probs of right weights in vLLM and in the trainer
    differed by 0.12 nats. With an FP8 base model, vLLM's and the trainer's log-probs differ by 0.33
    nats from the first step on."""
    new, base = BASE + moved, BASE + base_error
    bound = max(ROUNDING["bfloat16"], 4 * base_error) + MOVED_SHARE * moved
    rule = Tolerance(ROUNDING["bfloat16"])
    for error, passes in ((0.99 * bound, True), (1.01 * bound, False)):
        scorer = Scorer(new + error, base=base)
        with nullcontext() if passes else pytest.raises(WrongWeights, match="differ from the"):
            result = verify(scorer, "run@1", probe(new, new - 1.0), tolerance=rule, beside="base")
            assert result.allowed == pytest.approx(bound)


def test_weights_that_are_not_in_use_are_refused_however_far_they_are() -> None:
    """vLLM may hold the adapter's tensors but compute its answers without them."""
    rule = Tolerance(ROUNDING["bfloat16"])
    for way in (0.05, 0.3, 3.0, 30.0):
        new = BASE + noise(way)
        with pytest.raises(WrongWeights):
            verify(
                Scorer(BASE + noise(1e-3), base=BASE),
                "run@1",
                probe(new),
                tolerance=rule,
                beside="base",
            )


def test_a_limit_of_the_setting_is_an_upper_bound() -> None:
    new = BASE + 1.0
    rule = Tolerance(ROUNDING["bfloat16"], limit=0.1)
    assert verify(Scorer(new + 0.09), "run@1", probe(new), tolerance=rule).allowed == 0.1
    with pytest.raises(WrongWeights, match=r"allowed: 0\.1;"):
        verify(Scorer(new + 0.11), "run@1", probe(new), tolerance=rule)
