"""Cases for `bench.verification`: adapters that are loaded into vLLM in place of a checkpoint's
adapter.

In a right case the checkpoint's own adapter is loaded into vLLM. In a wrong case another adapter is
loaded, in order to imitate a fault. The seed chooses steps, layers and tensors, so that the same
checkpoints and seed give the same cases. This file was written before the verification rule that
`bench.verification` tests.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A case. `kind`: "right", or the name of the fault. `step`: the step of the checkpoint that is
    to be served. `detail`: the layer, module or tensor that the seed chose. `directory`: the
    adapter that is loaded into vLLM."""

    kind: str
    step: int
    detail: str
    directory: Path


def _scaled(factor: float) -> Callable[[Tensors, Tensors, random.Random], str]:
    def scale(tensors: Tensors, _other: Tensors, _chance: random.Random) -> str:
        for name in tensors:
            if "lora_B" in name:
                tensors[name] = tensors[name] * factor
        return f"B x {factor:g}"

    return scale


def _layer_missing(tensors: Tensors, _other: Tensors, chance: random.Random) -> str:
    layer = chance.choice(sorted({name.split(".")[4] for name in tensors}, key=int))
    for name in [name for name in tensors if name.split(".")[4] == layer]:
        tensors[name] = torch.zeros_like(tensors[name])
    return f"layer {layer}"


def _module_missing(tensors: Tensors, _other: Tensors, chance: random.Random) -> str:
    module = chance.choice([m for m in MODULES if any(f".{m}." in name for name in tensors)])
    for name in [name for name in tensors if f".{module}." in name]:
        tensors[name] = torch.zeros_like(tensors[name])
    return module


def _ignored_prefix(tensors: Tensors, _other: Tensors, _chance: random.Random) -> str:
    for name in list(tensors):
        at = name.replace("base_model.model.model.", "base_model.model.language_model.model.")
        tensors[at] = tensors.pop(name)
    return "language_model.model."


def _tensor_of_another_step(tensors: Tensors, other: Tensors, chance: random.Random) -> str:
    name = chance.choice(sorted(name for name in tensors if "lora_B" in name))
    tensors[name] = other[name]
    return name


ALTERATIONS: dict[str, Callable[[Tensors, Tensors, random.Random], str]] = {
    "scale halved": _scaled(0.5),
    "scale doubled": _scaled(2.0),
    "layer missing": _layer_missing,
    "module missing": _module_missing,
    "ignored prefix": _ignored_prefix,
    "tensor of another step": _tensor_of_another_step,
}


def write_cases(
    steps: dict[int, Path], other_run: dict[int, Path], work: Path, seed: int
) -> Iterator[Case]:
    """Yields the right case of each step, and one case of each fault.

    Args:
        steps: step -> directory of the checkpoint's adapter; step 0 is the identity adapter.
        other_run: step -> directory of the adapter, for another run of the same base model. work:
        directory for the altered adapters; a case's files live until the next case. seed: the seed
        of all random choices.
    """
    chance = random.Random(seed)
    for step in sorted(steps)[1:]:
        yield Case("right", step, "", steps[step])
        yield Case("step before", step, "", steps[_before(steps, step)])
        yield Case("base model", step, "", steps[0])
        yield Case("another run", step, "", other_run[chance.choice(sorted(other_run))])
        for kind, alter in ALTERATIONS.items():
            tensors = load_file(steps[step] / WEIGHTS)
            other = load_file(steps[_before(steps, step)] / WEIGHTS)
            detail = alter(tensors, other, chance)
            directory = work / f"{step}-{kind.replace(' ', '-')}"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            save_file(tensors, directory / WEIGHTS)
            config = json.loads((steps[step] / CONFIG).read_text())
            (directory / CONFIG).write_text(json.dumps(config))
            yield Case(kind, step, detail, directory)
            shutil.rmtree(directory)


def _before(steps: dict[int, Path], step: int) -> int:
    return max(known for known in steps if known < step)
