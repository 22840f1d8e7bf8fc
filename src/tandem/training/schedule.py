"""Which rows each optimizer step visits, which rank computes them, and the weight of each item. NumPy.

Every rank computes the whole plan from the job and the packed tables, without communication. Denominators are sums over
all rows of an optimizer step, not over one rank's rows (R20).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import RLLoss, SFTLoss
from tandem.training.losses import item_weights

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """`steps[s]`: the rows of optimizer step s, in order. A row appears once per epoch."""

    steps: tuple[tuple[int, ...], ...]
    data_parallel: int

    def micro_steps(self, step: int, dp_rank: int) -> list[tuple[int, bool]]:
        """`(row, counts)` for each micro step of data-parallel rank `dp_rank`.

        All ranks have equally many micro steps, so that their collectives match. A rank that has too few rows computes
        the step's first row again, with `counts` False: its weight is zero.
        """
        rows = self.steps[step]
        own = [(row, True) for row in rows[dp_rank :: self.data_parallel]]
        return own + [(rows[0], False)] * (-(-len(rows) // self.data_parallel) - len(own))

    def visited_rows(self, dp_rank: int) -> list[int]:
        """The rows that the rank computes in any micro step, once each, for a pass before training.

        The first one is repeated until all ranks have equally many.
        """
        visited = [
            list(dict.fromkeys(row for step in range(len(self.steps)) for row, _ in self.micro_steps(step, rank)))
            for rank in range(self.data_parallel)
        ]
        own = visited[dp_rank]
        return own + own[:1] * (max(map(len, visited)) - len(own))


def plan_steps(
    batch: PackedBatch, *, seed: int, base_step: int, epochs: int, rows_per_step: int | None, data_parallel: int
) -> Plan:
    """Cut `epochs` passes over the batch's rows into optimizer steps.

    Each pass visits the rows that have items, in a permutation drawn from (seed, base_step, epoch). `rows_per_step`
    counts the rows of all ranks; None means `data_parallel` (R19). The last step of a pass may have fewer rows.

    Raises InvalidInput if `rows_per_step` is not a multiple of `data_parallel`.
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
    """`losses.item_weights` of the row's items, both float64 [items]. SFT multiplies both by the example's weight."""
    trajectory_items = batch.trajectory_num_items[row.item_trajectory]
    group_items = batch.group_num_items[batch.trajectory_group[row.item_trajectory]]
    constant = loss.normalisation_constant if isinstance(loss, RLLoss) else None
    weights, parts = item_weights(loss.normalisation, trajectory_items, group_items, constant)
    if isinstance(loss, SFTLoss):
        example_weight = row.item_advantage.astype(np.float64)
        return weights * example_weight, parts * example_weight
    return weights, parts


def denominators(batch: PackedBatch, plan: Plan, loss: RLLoss | SFTLoss) -> list[float]:
    """`D` of each optimizer step (see `losses`): the sum over the items of all its rows, on any rank.

    Raises NothingToLearn if a step's items all have weight 0.
    """
    of_row: dict[int, float] = {}
    for row in sorted({row for step in plan.steps for row in step}):
        of_row[row] = float(row_weights(batch, batch.row(row), loss)[1].sum())
    totals = [sum(of_row[row] for row in step) for step in plan.steps]
    for step, total in enumerate(totals):
        if not total > 0:
            raise NothingToLearn(f"all items of optimizer step {step + 1} of {len(totals)} have weight 0")
    return totals
