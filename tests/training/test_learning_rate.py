"""The learning rate over a chain of jobs. After the warm-up the learning rate follows transformers'
own curves, wherever the chain is divided into jobs."""

import pytest
import torch
from pydantic import ValidationError
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from tandem.spool.schema import OptimizerSettings, Schedule

TOTAL, WARMUP = 23, 5


@pytest.mark.parametrize(
    ("shape", "theirs"),
    [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)],
)
def test_the_curve_is_transformers_after_warm_up(shape, theirs) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    scheduler = theirs(optimizer, WARMUP, TOTAL)
    settings = OptimizerSettings(
        learning_rate=3e-3, schedule=Schedule(shape=shape, warmup=WARMUP, total=TOTAL)
    )
    for step in range(TOTAL):
        # During the warm-up Tandem's rates differ: in transformers the first step has the rate 0,
        # and so changes no weight.
        expected = 3e-3 * (step + 1) / (WARMUP + 1) if step < WARMUP else scheduler.get_last_lr()[0]
        assert settings.rate(step) == pytest.approx(expected, rel=1e-12)
        optimizer.step()
        scheduler.step()
    assert settings.rate(TOTAL) == settings.rate(TOTAL + 9) == 0


@pytest.mark.parametrize("shape", ["constant", "cosine", "linear"])
def test_jobs_of_a_chain_continue_the_curve(shape) -> None:
    whole = Schedule(shape=shape, warmup=WARMUP, total=TOTAL, floor=0.1)
    for start in range(0, TOTAL, 4):
        part = whole.model_copy(update={"start": start})
        assert [part.factor(step) for step in range(4)] == [
            whole.factor(start + step) for step in range(4)
        ]
    assert whole.factor(WARMUP) == 1
    assert whole.factor(TOTAL) == (1 if shape == "constant" else pytest.approx(0.1))


def test_a_curve_that_ends_needs_its_length() -> None:
    for wrong in ({"shape": "linear"}, {"total": 3, "warmup": 3}, {"floor": 1.5}, {"start": -1}):
        with pytest.raises(ValidationError):
            Schedule(**wrong)
