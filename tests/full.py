"""Policies whose weights are all trained, for tests."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from policies import load_base
from tandem.families.registry import read_arch
from tandem.model import parallel
from tandem.model.build import build_policy
from tandem.model.policy import Policy
from tandem.model.weights.base_memory import BaseWeights
from tandem.spool.schema import OptimizerSettings
from tandem.trainer.rank.model_files import ModelFiles, Weights
from tandem.training.sharded_adam import ShardedAdam


@dataclass
class Full:
    policy: Policy
    base: BaseWeights
    optimizer: ShardedAdam

    def write(self, directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
        """Writes tensors in the shapes of the weights, as a Hugging Face model. All ranks must call
        this function, because it is a collective operation."""
        weights, top, arch = Weights(tensors), self.policy.topology, self.policy.arch
        files = ModelFiles(directory, arch, weights.dtype)
        if top.rank == 0:
            files.create()
        parallel.gather_objects(None)
        files.write(weights, arch, top.sizes, top.rank, beat=lambda: None)
        parallel.gather_objects(None)
        return directory

    def gradients(self) -> dict[str, torch.Tensor]:
        """The buffers of the weights' gradients, by the weights' names."""
        base: dict[str, Any] = self.policy.base()
        return {name: parameter.gradient_sum for name, parameter in base.items()}


def make_full(model: Path, settings: OptimizerSettings, dtype: torch.dtype = torch.float32) -> Full:
    arch = read_arch(str(model))
    base = BaseWeights(arch, dtype, parallel.current().sizes)
    policy = build_policy(arch, None, dtype=dtype, base=lambda: base.parameters)
    load_base(policy, model)
    return Full(policy, base, ShardedAdam(policy, base, settings))


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face model's files."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def without_buffers(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that transformers trains; the router's bias is not trained."""
    return {name: value for name, value in named.items() if not name.endswith("correction_bias")}


def saved(model, directory: Path, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Writes `values` as transformers writes the model's parameters. Returns the written tensors by
    their names in the files."""
    other = transformers.AutoModelForCausalLM.from_config(model.config)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(values[name])
    other.save_pretrained(directory)
    return tensors(directory)
