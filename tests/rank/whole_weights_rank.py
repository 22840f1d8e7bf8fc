"""`python whole_weights_rank.py DIRECTORY TP`: a rank that merges DIRECTORY/adapter into
DIRECTORY/model. The rank writes the whole weights to DIRECTORY/merged. DIRECTORY/sent<rank>.pt gets
the tensors that a rank sends to vLLM."""

import sys
from pathlib import Path

import torch

from policies import LORA, make_policy
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.transfer.parts import buffers
from tandem.topology.sizes import Sizes
from tandem.trainer.rank.model_files import ModelFiles
from tandem.trainer.rank.publication import TrainedWeights

MOST = 700  # A buffer has at most 700 elements, so tensors are cut.


def main(directory: Path, tp: int) -> None:
    device.activate("cpu")
    top = parallel.init_parallel(Sizes(tensor=tp))
    model = directory / "model"
    arch = read_arch(str(model))
    weights = TrainedWeights(make_policy(model, LORA, directory / "adapter"))
    sent = []
    for targets in (None, LORA.targets):
        for parts in buffers(arch, targets, sizes=top.sizes, rank=top.rank, most=MOST):
            buffer = torch.full((sum(part.size for part in parts),), torch.nan)
            weights.fill(parts, buffer)
            values = buffer.split([part.size for part in parts])
            sent += [
                (targets, part.name, part.in_tensor, value.view(part.shape))
                for part, value in zip(parts, values, strict=True)
            ]
    torch.save(sent, directory / f"sent{top.rank}.pt")
    files = ModelFiles(directory / "merged", arch, weights.dtype)
    if top.rank == 0:
        files.create(model)
    parallel.gather_objects(None)
    files.write(weights, arch, top.sizes, top.rank, beat=lambda: None)
    parallel.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
