"""One of two tensor-parallel ranks on the CPU, started by tests/model/test_tensor_parallel.py: python tp_rank.py <dir>.

Computes what the test compares, and leaves it in <dir>/rank<r>.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from policies import LORA, linear_row, make_policy
from tandem.families.adapter import WEIGHTS_FILE, write_adapter_config
from tandem.model import device, logprobs, parallel

CHUNK = 7 * 130  # a few items' logits at a time


def outputs_and_gradients(policy) -> dict[str, object]:
    """The same on any topology: gradients are gathered."""
    logprobs.CHUNK_ELEMENTS = CHUNK
    tokens = torch.randint(0, 260, (60,), generator=torch.Generator().manual_seed(4)).numpy()
    outputs = policy(linear_row(tokens, padding=4), temperature=0.8)
    weights = torch.linspace(-1.0, 2.0, len(outputs.logprobs))
    (outputs.logprobs * weights + 0.1 * outputs.entropy).sum().backward()
    result: dict[str, object] = {"logprobs": outputs.logprobs.detach(), "entropy": outputs.entropy.detach()}
    result["gradients"] = gathered = {}
    for name, parameter in policy.lora_parameters().items():
        gathered |= policy.gather(name, parameter.grad)
    with torch.no_grad():
        row = linear_row(tokens)
        result["logits"] = policy.logits(row.tokens, row.positions, row.subtree_end)
    with policy.adapter_disabled():
        result["base"] = policy(row).logprobs
    return result


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    device.activate("cpu")
    topology = parallel.init_parallel(2, timeout_seconds=300)
    assert (topology.tp, topology.tp_rank, topology.dp) == (2, int(os.environ["RANK"]), 1)
    policy = make_policy(directory / "model", LORA, directory / "adapter")
    result = outputs_and_gradients(policy)
    result["replicated"] = {
        name: parameter.grad
        for name, parameter in policy.lora_parameters().items()
        if not getattr(parameter, "tensor_model_parallel", False)
    }
    whole = policy.adapter_tensors()
    for name, parameter in policy.lora_parameters().items():
        assert torch.equal(policy.shard(name, whole.__getitem__), parameter.data), name
    if topology.rank == 0:
        saved = directory / "saved"
        saved.mkdir()
        save_file(whole, saved / WEIGHTS_FILE)
        write_adapter_config(saved, LORA, "tiny")
    torch.save(result, directory / f"rank{topology.rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
