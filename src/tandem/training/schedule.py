"""Which rows each optimizer step visits, which rank runs them, and each item's weight. NumPy.

Every rank computes the whole plan from the job and the packed tables, so no rank has to be told anything, and the
denominators are global by construction (R20): they are sums over all rows of the optimizer step, not over a rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.data.packed import PackedBatch, PackedRow
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import RLLoss, SFTLoss
from tandem.training.losses import item_weights

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """`steps[s]`: the rows of optimizer step s, in order; a row appears once per epoch."""

    steps: tuple[tuple[int, ...], ...]
    data_parallel: int

    def micro_steps(self, step: int, dp_rank: int) -> list[tuple[int, bool]]:
        """`(row, counts)` for each micro step of this rank.

        All ranks have the same number of them, so that collectives match; where rows run out, a rank runs the step's
        first row once more with `counts` False, which means weight zero.
        """
        return _deal(self.steps[step], self.data_parallel, dp_rank)

    def first_visits(self, dp_rank: int) -> list[tuple[int, bool]]:
        """Like `micro_steps`, over every row that this rank will ever visit, once each: for passes before training."""
        per_rank = []
        for rank in range(self.data_parallel):
            visits = [visit for step in range(len(self.steps)) for visit in self.micro_steps(step, rank)]
            per_rank.append(list(dict.fromkeys(row for row, _ in visits)))
        own = per_rank[dp_rank]
        padding = max(map(len, per_rank)) - len(own)
        return [(row, True) for row in own] + [(own[0], False)] * padding


def plan_steps(
    batch: PackedBatch, *, seed: int, base_step: int, epochs: int, rows_per_step: int | None, data_parallel: int
) -> Plan:
    """Cut `epochs` passes over the batch's rows into optimizer steps.

    Each pass visits the rows that train anything in a permutation drawn from (seed, base_step, epoch). `rows_per_step`
    counts rows over all ranks; None means `data_parallel` (R19). The last step of a pass may have fewer.

    Raises InvalidInput when `data_parallel` doesn't divide `rows_per_step`.
    """
    size = data_parallel if rows_per_step is None else rows_per_step
    if size % data_parallel:
        raise InvalidInput(
            f"{size} rows per optimizer step can't be split evenly over {data_parallel} data-parallel ranks; "
            f"use a multiple of {data_parallel}, or leave it out to use {data_parallel}",
            field="optimizer.grad_accumulation_sequences",
        )
    rows = np.flatnonzero(np.diff(batch.item_offsets))
    steps: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        order = np.random.default_rng([seed, base_step, epoch]).permutation(rows).tolist()
        steps += [tuple(order[start : start + size]) for start in range(0, len(order), size)]
    return Plan(tuple(steps), data_parallel)


def row_weights(batch: PackedBatch, row: PackedRow, loss: RLLoss | SFTLoss) -> tuple[Float64, Float64]:
    """`(w, d)` of the row's items, float64 [items]: weight, and part of the denominator (`losses.item_weights`).

    An SFT item counts as often as its example's weight says.
    """
    trajectory_items = batch.trajectory_num_items[row.item_trajectory]
    group_items = batch.group_num_items[batch.trajectory_group[row.item_trajectory]]
    constant = loss.normalisation_constant if isinstance(loss, RLLoss) else None
    weights, parts = item_weights(loss.normalisation, trajectory_items, group_items, constant)
    if isinstance(loss, SFTLoss):
        example_weight = row.item_advantage.astype(np.float64)
        return weights * example_weight, parts * example_weight
    return weights, parts


def denominators(batch: PackedBatch, plan: Plan, loss: RLLoss | SFTLoss) -> list[float]:
    """`D` of each optimizer step: the sum of `d` over the items of all its rows, whichever rank runs them."""
    per_row: dict[int, float] = {}
    for row in sorted({row for step in plan.steps for row in step}):
        per_row[row] = float(row_weights(batch, batch.row(row), loss)[1].sum())
    totals = [sum(per_row[row] for row in step) for step in plan.steps]
    for step, total in enumerate(totals):
        if not total > 0:
            raise NothingToLearn(f"optimizer step {step + 1} of {len(totals)} has only items of weight 0")
    return totals


def _deal(rows: tuple[int, ...], ranks: int, rank: int) -> list[tuple[int, bool]]:
    """Rows `rank`, `rank + ranks`, ... and a weightless first row where this rank's turn comes up empty."""
    own = [(row, True) for row in rows[rank::ranks]]
    return own + [(rows[0], False)] * (-(-len(rows) // ranks) - len(own))
