"""The model's outputs and gradients on one row of random trees.

`python cpu_reference.py DIRECTORY` computes the outputs and gradients on the CPU in fp32, for a
test that computes on a GPU. The program is a process of its own, because a process uses one device
for its whole life.
"""

import sys
from pathlib import Path

import torch

from policies import gradients, make_policy
from tandem.families.adapter import default_targets
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import LoraShape

SLOTS, USED = 1000, 950


def lora_of(model: Path) -> LoraShape:
    """The shape of an adapter on every linear layer, and on the experts of a mixture. Gemma 4's
    `k_proj` has no adapter."""
    targets = default_targets(read_arch(str(model)))
    lora = LoraShape(rank=16, alpha=32.0)
    return lora if "k_proj" in targets else lora.model_copy(update={"targets": targets})


def random_row(vocabulary: int) -> RowTensors:
    """Trees of random shape, then padding. Every token is trained, except the first token of each
    tree."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(SLOTS)
    positions, end, parent = torch.zeros_like(slots), slots + 1, torch.full_like(slots, -1)

    def grow(start: int, stop: int, depth: int, above: int) -> None:
        while start < stop:
            least = (stop - start + 2) // 3
            size = int(torch.randint(least, stop - start + 1, (), generator=generator))
            segment = size if depth == 3 else (size + 3) // 4
            inner = slice(start, start + segment)
            base = 0 if above < 0 else int(positions[above]) + 1
            positions[inner], end[inner] = base + torch.arange(segment), start + size
            parent[inner] = torch.cat([torch.tensor([above]), slots[start : start + segment - 1]])
            grow(start + segment, start + size, depth + 1, start + segment - 1)
            start += size

    grow(0, USED, 0, -1)
    target = (parent >= 0).nonzero().squeeze(1)
    tokens = torch.randint(0, vocabulary, (SLOTS,), generator=generator)
    return RowTensors(tokens, positions, end, parent[target], target)


def evaluate(policy: Policy) -> dict[str, torch.Tensor]:
    """Log-probs, entropies, and the gradients of a function of log-probs and entropies. The results
    are copied to the CPU."""
    row = vars(random_row(policy.arch.vocab_size))
    here = {name: value.to(device.device()) for name, value in row.items() if value is not None}
    outputs = policy(RowTensors(**here))
    weights = torch.linspace(-1, 1, len(outputs.logprobs), device=device.device())
    (outputs.logprobs * weights + 0.1 * outputs.entropy).mean().backward()
    found = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, **gradients(policy)}
    return {name: value.detach().float().cpu() for name, value in found.items()}


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    device.activate("cpu")
    parallel.init_parallel()
    reference = make_policy(
        directory, lora_of(directory), directory / "adapter", dtype=torch.float32
    )
    torch.save(evaluate(reference), directory / "cpu.pt")
