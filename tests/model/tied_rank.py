"""Ranks that train a tied model in two pipeline stages: python tied_rank.py DIRECTORY DATA.

The ranks of DATA pipelines train all weights of DIRECTORY/model. Each rank writes its copy of the
tied table after each step to DIRECTORY/<DATA>.<rank>.pt. Several ranks own parts of each table. The
sum of a part's gradients begins with the rank after the part's owner, as in NCCL's ring.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from cut_rank import row
from full import make_full
from ranks import fork_ranks
from tandem.model import device, parallel
from tandem.model.policy import TABLE
from tandem.model.weights import base_memory
from tandem.spool.schema import OptimizerSettings
from tandem.topology.sizes import Sizes

STEPS = 4
SETTINGS = OptimizerSettings(learning_rate=1e-2)


def as_a_ring(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = torch.empty_like(tensor)
    dist.all_to_all_single(parts, tensor.contiguous(), group=group)
    return parts.view(group.size(), -1).roll(-1 - group.rank(), 0).sum(0)


def run(rank: int, world: int, port: int, directory: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    device.activate("cpu")
    topology = parallel.init_parallel(Sizes(pipeline=2), timeout_seconds=300)
    tables = []
    with (
        mock.patch.object(base_memory, "SEGMENT", 512),
        mock.patch.object(parallel, "scatter_sum", as_a_ring),
    ):
        full = make_full(directory / "model", SETTINGS)
        for step in range(STEPS):
            full.optimizer.zero_grad()
            number = step * topology.sizes.data + topology.place.data
            full.policy.stage.backward([full.policy(row(number, full.policy.arch)).logprobs.sum()])
            full.optimizer.reduce_gradients()
            full.optimizer.step(full.optimizer.gradient_norm(), SETTINGS.learning_rate)
            tables.append(full.policy.base()[TABLE].detach().clone())
    torch.save(tables, directory / f"{topology.sizes.data}.{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    fork_ranks(2 * int(sys.argv[2]), run, Path(sys.argv[1]))
