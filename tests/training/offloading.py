"""A tiny policy in training that tests interrupt by offloading. The policy is on the CPU, or on a
GPU if the test has activated a GPU."""

from pathlib import Path

import torch
from torch import Tensor

from policies import linear_row, load_base, make_policy, write_random_adapter
from tandem.model import device
from tandem.spool.schema import OptimizerSettings
from tandem.training.optimizer import AdapterOptimizer


class Training:
    """A policy and its optimizer, which run optimizer steps on random tokens."""

    def __init__(self, model: Path, adapter: Path) -> None:
        """`adapter`: the directory of the adapter. If the directory does not exist, a random
        adapter is written to it first."""
        self.model = model
        if not adapter.exists():
            write_random_adapter(adapter, model)
        self.policy = make_policy(model, adapter=adapter)
        self.optimizer = AdapterOptimizer(
            self.policy, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
        )

    def step(self, number: int, length: int = 24) -> float:
        """Runs the optimizer step `number` and returns its loss. The number determines the step's
        tokens."""
        generator = torch.Generator().manual_seed(number)
        row = linear_row(
            torch.randint(0, self.policy.arch.vocab_size, (length,), generator=generator).numpy()
        )
        tensors = {name: value for name, value in vars(row).items() if value is not None}
        here = type(row)(**{name: value.to(device.device()) for name, value in tensors.items()})
        self.optimizer.zero_grad()
        loss = -self.policy(here).logprobs.mean()
        loss.backward()
        self.optimizer.reduce_gradients()
        self.optimizer.step(self.optimizer.gradient_norm(), self.optimizer.settings.learning_rate)
        return loss.item()

    def trained(self) -> list[Tensor]:
        """Copies of everything that training changes."""
        values = [*self.policy.lora_parameters().values(), *self._moments()]
        return [value.detach().cpu().clone() for value in values]

    def _moments(self) -> list[Tensor]:
        return [
            tensor
            for of_moment in self.optimizer.moments().values()
            for tensor in of_moment.values()
        ]

    def base(self) -> list[Tensor]:
        """The frozen parameters of the policy, not copied."""
        return [
            parameter for parameter in self.policy.gpt.parameters() if not parameter.requires_grad
        ]

    def device_tensors(self, part: str) -> list[Tensor]:
        """The tensors whose device memory `offload` of `part` must free."""
        parameters = [*self.policy.lora_parameters().values(), *self.base(), self.policy._inv_freq]
        optimizer = [*self._moments(), *(memory for memory, _ in self.optimizer._gradients)]
        return {"parameters": parameters, "optimizer": optimizer, "both": parameters + optimizer}[
            part
        ]

    def offload(self, part: str) -> int:
        """Offloads `part`: `parameters`, `optimizer` or `both`. Returns the freed bytes."""
        freed = self.policy.offload() if part in ("parameters", "both") else 0
        return freed + (self.optimizer.offload() if part in ("optimizer", "both") else 0)

    def restore(self, part: str) -> None:
        if part in ("optimizer", "both"):
            self.optimizer.restore()
        if part in ("parameters", "both"):
            self.policy.restore()
            load_base(self.policy, self.model)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether the tensors of both lists are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def total(tensors: list[Tensor]) -> int:
    """The bytes of the tensors' storages. A shared storage counts once."""
    return sum(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )
