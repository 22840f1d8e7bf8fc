from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.inference.publisher.verify import movement, verify
from tandem.spool.schema import Probe

RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(0, 200, 65).tolist() for _ in range(4)]
PREVIOUS = RNG.normal(-3.0, 0.5, (4, 64))
BASE = RNG.normal(-3.0, 0.5, (4, 64))


class Scorer:
    """vLLM with one adapter. What it would say of the base model is of no use for a checkpoint of a job."""

    def __init__(self, served: np.ndarray) -> None:
        self.values = {"run@1": served}

    def prompt_logprobs(self, model: str, tokens: Sequence[int]) -> list[float]:
        return self.values[model][TOKENS.index(list(tokens))].tolist()


def probe(new: np.ndarray) -> Probe:
    return told(new, PREVIOUS, BASE)


def told(new: np.ndarray, previous: np.ndarray, base: np.ndarray) -> Probe:
    return Probe(tokens=TOKENS, logprobs=new.tolist(), previous=previous.tolist(), base=base.tolist())


def noise(size: float) -> np.ndarray:
    return RNG.normal(0.0, size, (4, 64))


@pytest.mark.parametrize("moved", [1.0, 1e-2, 1e-3, 0.0])
@pytest.mark.parametrize("error", [1e-6, 1e-4, 1e-2])
def test_right_weights_pass_whatever_the_step_and_the_noise(moved: float, error: float) -> None:
    for _ in range(30):
        new = PREVIOUS + noise(moved)
        result = verify(Scorer(new + noise(error)), "run@1", probe(new), tolerance=0.02)
        assert result.ok, result.reason
    assert result.tokens == 256
    assert result.error == pytest.approx(error * math.sqrt(2 / math.pi), rel=0.2)


@pytest.mark.parametrize("moved", [0.0, 0.3, 1.0, 3.0])
def test_right_weights_pass_where_the_trainers_own_log_probs_are_as_noisy(moved: float) -> None:
    """bfloat16 rounds in the trainer as in vLLM: the way between two steps is then mostly rounding."""
    size = 2e-2
    for _ in range(300):
        true = PREVIOUS + noise(moved * size) if moved else PREVIOUS
        of_trainer = told(true + noise(size), PREVIOUS + noise(size), BASE + noise(size))
        result = verify(Scorer(true + noise(size)), "run@1", of_trainer, tolerance=0.05)
        assert result.ok, result.reason


@pytest.mark.parametrize("moved", [0.0, 0.1, 0.5, 2.0])
def test_right_weights_pass_where_trainer_and_vllm_differ_by_more_than_the_step(moved: float) -> None:
    """Kernels of two programs round in two ways, each much the same with and without the adapter: vLLM's log-probs lie
    nearer to its own of the base model than to the trainer's, and yet they are this checkpoint's."""
    size = 2e-2
    for _ in range(300):
        between = noise(size)
        new = BASE + noise(moved * size)
        served = new + between + noise(size / 4)
        if moved == 0.5:
            of_vllm = movement(*(values.ravel().tolist() for values in (served, new, BASE + between)))
            assert of_vllm is not None
            assert of_vllm.elsewhere
        result = verify(Scorer(served), "run@1", told(new, BASE, BASE), tolerance=0.05)
        assert result.ok, result.reason


def test_the_previous_weights_fail_where_the_step_is_a_few_times_the_noise() -> None:
    size = 5e-3
    for _ in range(30):
        new = PREVIOUS + noise(3 * size)
        of_trainer = told(new + noise(size), PREVIOUS + noise(size), BASE)
        result = verify(Scorer(PREVIOUS + noise(size)), "run@1", of_trainer, tolerance=0.05)
        assert "the checkpoint before it" in result.reason


@pytest.mark.parametrize(("moved", "error"), [(1.0, 1e-2), (1e-2, 1e-2), (1e-3, 1e-4), (1e-4, 1e-6)])
def test_the_previous_weights_fail_where_noise_lets_them_be_told_apart(moved: float, error: float) -> None:
    new = PREVIOUS + noise(moved)
    result = verify(Scorer(PREVIOUS + noise(error)), "run@1", probe(new), tolerance=0.02)
    assert not result.ok


def test_the_base_model_fails_though_it_is_within_the_tolerance() -> None:
    new = BASE + noise(5e-3)
    result = verify(Scorer(BASE + noise(1e-4)), "run@1", probe(new), tolerance=0.02)
    assert "base model" in result.reason


def test_error_above_the_tolerance_fails() -> None:
    new = PREVIOUS + noise(1.0)
    assert verify(Scorer(new + 0.0199), "run@1", probe(new), tolerance=0.02).ok
    assert (
        "differ from the trainer's by 0.0201"
        in verify(Scorer(new + 0.0201), "run@1", probe(new), tolerance=0.02).reason
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_fails(value: float) -> None:
    served = PREVIOUS.copy()
    served[2, 3] = value
    assert not verify(Scorer(served), "run@1", probe(PREVIOUS), tolerance=0.02).ok


def test_malformed_probes_fail() -> None:
    good = probe(PREVIOUS)
    short = ({field: getattr(good, field)[:-1]} for field in ("logprobs", "previous", "base"))
    for update in (*short, {"tokens": [], "logprobs": []}):
        assert "malformed" in verify(Scorer(PREVIOUS), "run@1", good.model_copy(update=update), tolerance=0.02).reason


def test_movement_is_the_share_of_the_way() -> None:
    new = PREVIOUS + noise(1.0)
    for share in (0.0, 0.3, 1.0, 2.0):
        moved = movement(*((a.ravel().tolist()) for a in (PREVIOUS + share * (new - PREVIOUS), new, PREVIOUS)))
        assert moved is not None
        assert moved.coefficient == pytest.approx(share, abs=1e-9)
        assert moved.standard_error == pytest.approx(0.0, abs=1e-9)
    assert movement([1.0], [2.0], [2.0]) is None
