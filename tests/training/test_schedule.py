"""The schedule of rows. Each epoch visits every row once, all ranks have equally many micro steps,
and denominators count the items of all ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rank.jobs import VOCAB, random_examples, random_groups
from tandem.data.inputs import AdvantageSettings, PackingSettings
from tandem.data.packed_format import PackedBatch
from tandem.data.prepare import prepare_rl, prepare_sft
from tandem.errors import InvalidInput
from tandem.spool.schema import OptimizerSettings, RLLoss, SFTLoss
from tandem.training.schedule import RowSchedule, advantage_divisor, denominators, make_schedule

PACKING = PackingSettings(sequence_length=32)


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> PackedBatch:
    out = tmp_path_factory.mktemp("packed") / "data"
    prepare_rl(
        random_groups(1, 9),
        vocab_size=VOCAB,
        advantage=AdvantageSettings(),
        packing=PACKING,
        out=out,
    )
    return PackedBatch.open(out)


def schedule_of(
    batch: PackedBatch, rows: int | None, *, epochs=1, seed=0, base_step=0, ranks=1
) -> RowSchedule:
    optimizer = OptimizerSettings(
        learning_rate=1.0, epochs=epochs, grad_accumulation_sequences=rows
    )
    return make_schedule(batch, optimizer, seed, base_step, ranks)


@settings(max_examples=100, deadline=None)
@given(
    ranks=st.integers(1, 5),
    per_rank=st.integers(1, 4),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**62),
)
def test_rows_are_dealt_once_and_evenly(
    batch: PackedBatch, ranks: int, per_rank: int, epochs: int, seed: int
) -> None:
    schedule = schedule_of(batch, ranks * per_rank, epochs=epochs, seed=seed, ranks=ranks)
    assert schedule == schedule_of(batch, ranks * per_rank, epochs=epochs, seed=seed, ranks=ranks)
    rows = [row for step in schedule.steps for row in step]
    for epoch in range(epochs):
        assert sorted(rows[epoch * len(batch) : (epoch + 1) * len(batch)]) == list(
            range(len(batch))
        )
    for step, expected in enumerate(schedule.steps):
        dealt = [schedule.micro_steps(step, rank) for rank in range(ranks)]
        assert len({len(micro) for micro in dealt}) == 1
        assert sorted(row for micro in dealt for row, counts in micro if counts) == sorted(expected)
    for rank in range(ranks):
        needed = {
            row
            for step in range(len(schedule.steps))
            for row, _ in schedule.micro_steps(step, rank)
        }
        assert sorted(schedule.visited_rows(rank)) == sorted(needed)
    own = [row for rank in range(ranks) for row in schedule.rank_rows(epochs, rank)]
    assert sorted(own) == list(range(len(batch)))  # Each row counts on one rank only.


def test_the_order_depends_on_seed_step_and_epoch(batch: PackedBatch) -> None:
    def order(seed: int, base_step: int, epochs: int = 1) -> tuple[tuple[int, ...], ...]:
        return schedule_of(batch, len(batch), epochs=epochs, seed=seed, base_step=base_step).steps

    two_epochs = order(0, 0, 2)
    assert len({order(0, 0), order(1, 0), order(0, 1), two_epochs[1:]}) == 4
    assert two_epochs[:1] == order(0, 0)


def test_rows_per_step_default_to_the_ranks_and_must_divide(batch: PackedBatch) -> None:
    assert {len(step) for step in schedule_of(batch, None, ranks=3).steps[:-1]} == {3}
    with pytest.raises(InvalidInput, match="multiple of 3") as caught:
        schedule_of(batch, 4, ranks=3)
    assert caught.value.field == "optimizer.grad_accumulation_sequences"


@pytest.mark.parametrize("ranks", [1, 2])
def test_denominators_count_the_items_of_all_ranks(batch: PackedBatch, ranks: int) -> None:
    schedule = schedule_of(batch, 64, ranks=ranks)
    trajectories, groups = len(batch.trajectory_group), len(batch.group_num_items)
    totals = {"token": batch.item_offsets[-1], "trajectory": trajectories, "group": groups}
    for kind, total in (totals | {"constant": 5.0 * trajectories}).items():
        loss = RLLoss(
            normalisation=kind, normalisation_constant=5.0 if kind == "constant" else None
        )
        np.testing.assert_allclose(denominators(batch, schedule.steps, loss), [total], rtol=1e-12)


def test_sft_counts_each_example_by_its_weight(tmp_path) -> None:
    examples = random_examples(0)
    prepare_sft(
        examples, tokenizer_path="", vocab_size=VOCAB, packing=PACKING, out=tmp_path / "data"
    )
    batch = PackedBatch.open(tmp_path / "data")
    for kind, total in {
        "token": sum(example.weight * sum(example.trainable) for example in examples),
        "trajectory": sum(example.weight for example in examples),
    }.items():
        assert denominators(
            batch, schedule_of(batch, 64).steps, SFTLoss(normalisation=kind)
        ) == pytest.approx([total])


def test_advantages_are_divided_by_their_weighted_mean_size(batch: PackedBatch) -> None:
    """The divisor is the mean of |A| over tokens, or over trajectories if the loss is a mean over
    trajectories. The losses of SFT have no such divisor."""
    trajectory = np.concatenate([batch.row(row).item_trajectory for row in range(len(batch))])
    advantage = np.concatenate([batch.row(row).item_weight for row in range(len(batch))]).astype(
        np.float64
    )
    of_trajectory = [abs(advantage[trajectory == t][0]) for t in range(len(batch.trajectory_group))]
    for kind, want in {
        "token": np.abs(advantage).mean(),
        "trajectory": np.mean(of_trajectory),
    }.items():
        assert advantage_divisor(
            batch, RLLoss(normalisation=kind, advantage_scale="mean_abs")
        ) == pytest.approx(want)
    assert advantage_divisor(batch, RLLoss()) == advantage_divisor(batch, SFTLoss()) == 1.0


def test_advantages_of_0_are_divided_by_1(tmp_path) -> None:
    groups = [
        group.model_copy(update={"trajectories": group.trajectories[:1]})
        for group in random_groups(1, 2)
    ]
    advantage = AdvantageSettings(keep_zero_variance=True)
    prepare_rl(
        groups, vocab_size=VOCAB, advantage=advantage, packing=PACKING, out=tmp_path / "data"
    )
    assert (
        advantage_divisor(PackedBatch.open(tmp_path / "data"), RLLoss(advantage_scale="mean_abs"))
        == 1.0
    )
