"""A tiny policy in training, to be interrupted by offloading; on the CPU, or on a GPU where a test says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from policies import linear_row, make_policy, write_random_adapter
from tandem.model import device
from tandem.model.policy import Policy
from tandem.spool.schema import OptimizerSettings
from tandem.training.optimizer import AdapterOptimizer

SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)


class Training:
    """Policy and optimizer, and one optimizer step after another on made-up tokens."""

    def __init__(self, model: Path, adapter: Path, **options: object) -> None:
        self.model = model
        self.before = 0  # bytes on the device before all of this
        self.policy: Policy = make_policy(model, adapter=adapter, **options)
        self.optimizer = AdapterOptimizer(self.policy, SETTINGS)
        self.vocabulary = self.policy.arch.vocab_size

    def step(self, number: int, length: int = 24) -> float:
        """Optimizer step `number`, always on the same tokens; its loss."""
        generator = torch.Generator().manual_seed(number)
        row = linear_row(torch.randint(0, self.vocabulary, (length,), generator=generator).numpy())
        here = type(row)(**{name: value.to(device.device()) for name, value in vars(row).items()})
        self.optimizer.zero_grad()
        loss = -self.policy(here).logprobs.mean()
        loss.backward()
        self.optimizer.reduce_gradients()
        self.optimizer.step(self.optimizer.gradient_norm())
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """Copies of everything that training changes."""
        state = self.optimizer.state()
        found = {f"{name}.weight": value.detach() for name, value in self.policy.lora_parameters().items()}
        found |= {f"{name}.exp_avg": value for name, value in state.exp_avg.items()}
        found |= {f"{name}.exp_avg_sq": value for name, value in state.exp_avg_sq.items()}
        return {name: value.cpu().clone() for name, value in found.items()}

    def base(self) -> list[Tensor]:
        """The frozen parameters."""
        return [parameter for parameter in self.policy.gpt.parameters() if not parameter.requires_grad]

    def offload(self, what: str) -> int:
        """`what`: parameters, optimizer, or both; the bytes given back."""
        freed = self.policy.offload() if what in ("parameters", "both") else 0
        return freed + (self.optimizer.offload() if what in ("optimizer", "both") else 0)

    def reload(self, what: str) -> None:
        if what in ("optimizer", "both"):
            self.optimizer.restore()
        if what in ("parameters", "both"):
            self.policy.restore()
            self.policy.load_base(str(self.model))


def adapter_for(model: Path, directory: Path) -> Path:
    return write_random_adapter(directory, model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def total(tensors: list[Tensor]) -> int:
    """Bytes of their storages."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
