"""Assigns rows to optimizer steps and ranks, and computes the weight of each item. Uses only NumPy,
not torch.

Every rank computes the whole schedule from the job and the packed arrays, without communication. A
denominator is a sum over all rows of an optimizer step, not only over one rank's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.errors import InvalidInput
from tandem.spool.schema import Loss, OptimizerSettings, RLLoss, SFTLoss
from tandem.training.losses import Floats, item_weights


@dataclass(frozen=True)
class RowSchedule:
    # The rows of each optimizer step, in order. A row appears once per epoch.
    steps: tuple[tuple[int, ...], ...]
    data_parallel: int
    held_out: tuple[int, ...] = ()  # rows that are only evaluated

    def micro_steps(self, step: int, dp_rank: int) -> list[tuple[int, bool]]:
        """`(row, counts)` for each micro step of data-parallel rank `dp_rank`. All ranks have the
        same number of micro steps, so that their collective operations match. A rank with fewer
        rows computes the step's first row in the missing micro steps, with weight 0 (`counts`
        False).
        """
        rows = self.steps[step]
        counted = [(row, True) for row in rows[dp_rank :: self.data_parallel]]
        missing = -(-len(rows) // self.data_parallel) - len(counted)
        return counted + [(rows[0], False)] * missing

    def visited_rows(self, dp_rank: int) -> list[int]:
        """The rows that the rank computes in micro steps or evaluates, each row once."""
        trained = (
            row for step in range(len(self.steps)) for row, _ in self.micro_steps(step, dp_rank)
        )
        return list(dict.fromkeys([*trained, *self.rank_held_out(dp_rank)]))

    def rank_held_out(self, dp_rank: int) -> list[int]:
        """The held-out rows that this rank evaluates."""
        return list(self.held_out[dp_rank :: self.data_parallel])

    def rank_rows(self, epochs: int, dp_rank: int) -> list[int]:
        """The rows that rank `dp_rank` counts in the first of `epochs` epochs. Over all ranks
        together, each row counts once."""
        first = range(len(self.steps) // epochs)
        return [row for step in first for row, counts in self.micro_steps(step, dp_rank) if counts]


def make_schedule(
    batch: PackedBatch, settings: OptimizerSettings, seed: int, base_step: int, data_parallel: int
) -> RowSchedule:
    """Divide the epochs (passes over the batch's rows) into optimizer steps.

    Each epoch visits all rows except held-out rows, in a permutation drawn from (seed, base_step,
    epoch). A step has `settings.grad_accumulation_sequences` rows over all ranks together, by
    default `data_parallel` rows. The last step of an epoch may have fewer rows. If
    `settings.batch_size` is set, the packer has chosen the rows of each step. Each epoch then
    visits the steps in a permutation drawn from (seed, base_step, epoch).

    Raises InvalidInput if the rows of a step are not a multiple of `data_parallel`.

    Args:
        batch: the job's packed rows.
        seed: the run's seed.
        base_step: the step that the job starts from.
        data_parallel: the number of data-parallel ranks.
    """
    held_out = tuple(np.flatnonzero(batch.row_batch < 0).tolist())
    rows = np.flatnonzero(batch.row_batch >= 0)
    orders = [np.random.default_rng([seed, base_step, epoch]) for epoch in range(settings.epochs)]
    if settings.batch_size is not None:
        numbers = batch.row_batch[rows]
        batch_steps = [tuple(rows[numbers == number].tolist()) for number in np.unique(numbers)]
        chosen = (
            batch_steps[number]
            for order in orders
            for number in order.permutation(len(batch_steps))
        )
        return RowSchedule(tuple(chosen), data_parallel, held_out)
    size = settings.grad_accumulation_sequences or data_parallel
    if size % data_parallel:
        raise InvalidInput(
            f"{size} rows per optimizer step can't be split evenly over {data_parallel}"
            f" data-parallel ranks; use a multiple of {data_parallel}, or leave it out to use"
            f" {data_parallel}",
            field="optimizer.grad_accumulation_sequences",
        )
    steps: list[tuple[int, ...]] = []
    for order in orders:
        shuffled = order.permutation(rows).tolist()
        steps += [tuple(shuffled[start : start + size]) for start in range(0, len(shuffled), size)]
    return RowSchedule(tuple(steps), data_parallel, held_out)


def row_weights(batch: PackedBatch, row: PackedRow, loss: Loss) -> tuple[Floats, Floats]:
    """The result `(w, d)` of `losses.item_weights` for the row's items, both float64 [items]. For
    SFT, both arrays are multiplied by each item's own weight.

    Args:
        batch: the packed rows, which give the numbers of items of trajectories and groups.
        row: a row of `batch`.
        loss: the loss, of which only kind and normalisation are used.
    """
    trajectory_items = batch.trajectory_num_items[row.item_trajectory]
    group_items = batch.group_num_items[batch.trajectory_group[row.item_trajectory]]
    constant = loss.normalisation_constant if isinstance(loss, RLLoss) else None
    weights, parts = item_weights(loss.mean_over, trajectory_items, group_items, constant)
    sft_weight = row.item_weight.astype(np.float64) if isinstance(loss, SFTLoss) else 1.0
    return weights * sft_weight, parts * sft_weight


def denominators(batch: PackedBatch, steps: Sequence[Sequence[int]], loss: Loss) -> list[float]:
    """The denominator `D` (see `losses`) of each optimizer step: the sum of `d` over the items of
    the step's rows on all ranks. If the loss is a sum, `D` is 1.

    Args:
        batch: the job's packed rows.
        steps: the rows of each optimizer step.
        loss: the loss, of which only the normalisation is used.
    """
    if loss.mean_over == "sum":
        return [1.0] * len(steps)
    rows = {row for step in steps for row in step}
    row_sums = {row: float(row_weights(batch, batch.row(row), loss)[1].sum()) for row in rows}
    return [sum(row_sums[row] for row in step) for step in steps]


def advantage_divisor(batch: PackedBatch, loss: Loss) -> float:
    """The divisor of the advantages. The divisor is 1 unless `advantage_scale` is "mean_abs". With
    "mean_abs", the divisor is sum_i w_i |A_i| / sum_i w_i over all items of the job. The division
    makes the size of the gradient independent of the scale of the rewards (OpenPipe's ART).
    """
    if not isinstance(loss, RLLoss) or loss.advantage_scale == "none":
        return 1.0
    magnitude = weight = 0.0
    for row in map(batch.row, range(len(batch))):
        weights = row_weights(batch, row, loss)[0]
        magnitude += float((weights * np.abs(row.item_weight.astype(np.float64))).sum())
        weight += float(weights.sum())
    return magnitude / weight or 1.0
