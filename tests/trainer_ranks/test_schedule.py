"""Every row once per epoch, the same number of micro steps on every rank, denominators over all ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.inputs import AdvantageSettings, PackingSettings
from tandem.data.packed_format import PackedBatch
from tandem.data.prepare import prepare_rl
from tandem.errors import InvalidInput
from tandem.spool.schema import RLLoss
from tandem.training.schedule import denominators, plan_steps
from trainer_ranks.jobs import VOCAB, random_groups


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> PackedBatch:
    out = tmp_path_factory.mktemp("packed") / "data"
    packing = PackingSettings(sequence_length=32)
    prepare_rl(random_groups(1, 9), vocab_size=VOCAB, advantage=AdvantageSettings(), packing=packing, out=out)
    return PackedBatch.open(out)


@settings(max_examples=100, deadline=None)
@given(ranks=st.integers(1, 5), per_rank=st.integers(1, 4), epochs=st.integers(1, 3), seed=st.integers(0, 2**62))
def test_rows_are_dealt_once_and_evenly(batch: PackedBatch, ranks: int, per_rank: int, epochs: int, seed: int) -> None:
    options = {"seed": seed, "base_step": 2, "epochs": epochs, "data_parallel": ranks}
    plan = plan_steps(batch, rows_per_step=ranks * per_rank, **options)
    assert plan == plan_steps(batch, rows_per_step=ranks * per_rank, **options)
    rows = [row for step in plan.steps for row in step]
    for epoch in range(epochs):
        assert sorted(rows[epoch * len(batch) : (epoch + 1) * len(batch)]) == list(range(len(batch)))
    for step, expected in enumerate(plan.steps):
        dealt = [plan.micro_steps(step, rank) for rank in range(ranks)]
        assert len({len(micro) for micro in dealt}) == 1
        assert sorted(row for micro in dealt for row, counts in micro if counts) == sorted(expected)
    visits = [plan.visited_rows(rank) for rank in range(ranks)]
    assert len({len(visit) for visit in visits}) == 1
    for rank, visit in enumerate(visits):
        needed = {row for step in range(len(plan.steps)) for row, _ in plan.micro_steps(step, rank)}
        assert needed == set(visit)


def test_the_order_depends_on_seed_step_and_epoch(batch: PackedBatch) -> None:
    def order(seed: int, base_step: int, epochs: int = 1) -> tuple[tuple[int, ...], ...]:
        plan = plan_steps(
            batch, seed=seed, base_step=base_step, epochs=epochs, rows_per_step=len(batch), data_parallel=1
        )
        return plan.steps

    two_epochs = order(0, 0, 2)
    assert len({order(0, 0), order(1, 0), order(0, 1), two_epochs[1:]}) == 4
    assert two_epochs[:1] == order(0, 0)


def test_rows_per_step_default_to_the_ranks_and_must_divide(batch: PackedBatch) -> None:
    options = {"seed": 0, "base_step": 0, "epochs": 1, "data_parallel": 3}
    assert {len(step) for step in plan_steps(batch, rows_per_step=None, **options).steps[:-1]} == {3}
    with pytest.raises(InvalidInput, match="multiple of 3") as caught:
        plan_steps(batch, rows_per_step=4, **options)
    assert caught.value.field == "optimizer.grad_accumulation_sequences"


def test_denominators_are_global_and_count_what_they_should(batch: PackedBatch) -> None:
    options = {"seed": 0, "base_step": 0, "epochs": 1, "rows_per_step": 64}
    for ranks in (1, 2):
        plan = plan_steps(batch, data_parallel=ranks, **options)
        expected = {
            "token": batch.num_items,
            "trajectory": batch.num_trajectories,
            "group": batch.num_groups,
            "constant": 5.0 * batch.num_trajectories,
        }
        for kind, total in expected.items():
            loss = RLLoss(normalisation=kind, normalisation_constant=5.0 if kind == "constant" else None)
            np.testing.assert_allclose(denominators(batch, plan, loss), [total], rtol=1e-12)
