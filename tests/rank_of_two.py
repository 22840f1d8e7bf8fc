"""One of two ranks that tests/model/test_two_ranks.py starts: python rank_of_two.py <directory> cpu|cuda.

On the CPU two tensor-parallel ranks compute what the test compares. On both devices the ranks then read the base
weights together. The results are left in <directory>/rank<r>.pt.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from policies import LORA, linear_row, logits, make_policy
from tandem.families.adapter import WEIGHTS_FILE, write_adapter_config
from tandem.families.registry import read_arch
from tandem.families.topology import Sizes
from tandem.model import device, logprobs, parallel
from tandem.model.weights.base_memory import BaseWeights
from tandem.model.weights.base_weights import load_weights


@mock.patch.object(logprobs, "CHUNK_ELEMENTS", 7 * 130)  # a few items' logits at a time
def outputs_and_gradients(policy) -> dict[str, object]:
    """The same on any topology: gradients are gathered."""
    tokens = torch.randint(0, 260, (60,), generator=torch.Generator().manual_seed(4))
    outputs = policy(linear_row(tokens, padding=4), temperature=0.8)
    weights = torch.linspace(-1.0, 2.0, len(outputs.logprobs))
    (outputs.logprobs * weights + 0.1 * outputs.entropy).sum().backward()
    result: dict[str, object] = {"logprobs": outputs.logprobs.detach(), "entropy": outputs.entropy.detach()}
    result["gradients"] = gathered = {}
    for name, parameter in policy.lora_parameters().items():
        gathered |= policy.adapter.gather(name, parameter.grad)
    row = linear_row(tokens)
    with torch.no_grad():
        result["logits"] = logits(policy, row)
    with policy.adapter_disabled():
        result["base"] = policy(row).logprobs
    return result


def tensor_parallel(directory: Path, rank: int) -> dict[str, object]:
    policy = make_policy(directory / "model", LORA, directory / "adapter")
    result = outputs_and_gradients(policy)
    result["replicated"] = {
        name: parameter.grad
        for name, parameter in policy.lora_parameters().items()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    whole = policy.adapter_tensors()
    for name, parameter in policy.lora_parameters().items():
        assert torch.equal(policy.adapter.shard(name, whole.__getitem__), parameter.data), name
    if rank == 0:
        saved = directory / "saved"
        saved.mkdir()
        save_file(whole, saved / WEIGHTS_FILE)
        write_adapter_config(saved, LORA, "tiny")
    return result


def shared_reading(model: Path, groups: parallel.ReadingGroups | None) -> dict[str, object]:
    """The names of the parameters that this rank read first and then, whether all have the right values in the end,
    and how many it would read the next time."""
    arch = read_arch(str(model))
    alone, shared = (BaseWeights(arch, torch.float32, Sizes(), groups=each) for each in (None, groups))
    for weights in (alone, shared):
        for parameter in weights.parameters.values():
            parameter.fill_(torch.nan)
        load_weights(model, arch, weights.own_share, Sizes(), Sizes().place(0))
    read = [name for name, parameter in shared.parameters.items() if not parameter.isnan().all()]
    shared.connect()
    if missing := shared.exchange():
        load_weights(model, arch, lambda: missing, Sizes(), Sizes().place(0))
    device.synchronize()
    same = all(torch.equal(shared.parameters[name], parameter) for name, parameter in alone.parameters.items())
    return {"read": read, "missing": list(missing), "same": same, "next": len(shared.own_share())}


def main(directory: Path, where: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    device.activate(where, rank)
    if where == "cpu":
        topology = parallel.init_parallel(Sizes(tensor=2), timeout_seconds=300)
        assert (topology.tensor.size(), topology.tensor.rank(), topology.sizes.data) == (2, rank, 1)
        result, groups = tensor_parallel(directory, rank), (dist.group.WORLD, dist.group.WORLD)
    else:
        parallel.init_parallel(timeout_seconds=300)
        result, groups = {}, parallel.reading_groups()
    result["reading"] = shared_reading(directory / "model", groups)
    torch.save(result, directory / f"rank{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
