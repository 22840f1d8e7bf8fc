"""One of two ranks that tests/model/test_two_ranks.py starts: python rank_of_two.py <directory>
cpu|cuda.

The ranks read the base weights together. Each rank reports to <directory>/rank<r>.pt which weights
it has read.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.weights.base_memory import BaseWeights
from tandem.model.weights.base_weights import load_weights
from tandem.topology.sizes import Sizes


def shared_reading(model: Path, groups: parallel.ReadingGroups | None) -> dict[str, object]:
    """The report of this rank. `read`: the names of the parameters that the rank read first.
    `missing`: the names of the parameters that the rank had to read after the exchange. `same`:
    whether all values are right at the end. `next`: the number of parameters that the rank would
    read for a next job."""
    arch = read_arch(str(model))
    alone, shared = (
        BaseWeights(arch, torch.float32, Sizes(), groups=each) for each in (None, groups)
    )
    for weights in (alone, shared):
        for parameter in weights.parameters.values():
            parameter.fill_(torch.nan)
        load_weights(model, arch, weights.own_share, Sizes(), Sizes().place(0))
    read = [name for name, parameter in shared.parameters.items() if not parameter.isnan().all()]
    shared.connect()
    if missing := shared.exchange():
        load_weights(model, arch, lambda: missing, Sizes(), Sizes().place(0))
    device.synchronize()
    same = all(
        torch.equal(shared.parameters[name], parameter)
        for name, parameter in alone.parameters.items()
    )
    return {"read": read, "missing": list(missing), "same": same, "next": len(shared.own_share())}


def main(directory: Path, where: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    device.activate(where, rank)
    parallel.init_parallel(timeout_seconds=300)
    groups = (dist.group.WORLD, dist.group.WORLD) if where == "cpu" else parallel.reading_groups()
    torch.save(shared_reading(directory / "model", groups), directory / f"rank{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
