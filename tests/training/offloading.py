"""A tiny policy in training, to be interrupted by offloading; on the CPU, or on a GPU if a test
says so."""

from pathlib import Path

import torch
from torch import Tensor

from policies import linear_row, load_base, make_policy, write_random_adapter
from tandem.model import device
from tandem.spool.schema import OptimizerSettings
from tandem.training.optimizer import AdapterOptimizer


class Training:
    """Policy and optimizer, and one optimizer step after another on made-up tokens."""

    def __init__(self, model: Path, adapter: Path) -> None:
        """`adapter`: the adapter's directory. If it does not exist, a random adapter is written
        first."""
        self.model = model
        if not adapter.exists():
            write_random_adapter(adapter, model)
        self.policy = make_policy(model, adapter=adapter)
        self.optimizer = AdapterOptimizer(
            self.policy, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
        )

    def step(self, number: int, length: int = 24) -> float:
        """Runs optimizer step `number`, always on the same tokens. Returns its loss."""
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
        """The frozen parameters."""
        return [
            parameter for parameter in self.policy.gpt.parameters() if not parameter.requires_grad
        ]

    def device_tensors(self, part: str) -> list[Tensor]:
        """The number of bytes that `offload` of this part must free."""
        parameters = [*self.policy.lora_parameters().values(), *self.base(), self.policy._inv_freq]
        optimizer = [*self._moments(), *(memory for memory, _ in self.optimizer._gradients)]
        return {"parameters": parameters, "optimizer": optimizer, "both": parameters + optimizer}[
            part
        ]

    def offload(self, part: str) -> int:
        """`part`: parameters, optimizer, or both. Returns the freed bytes."""
        freed = self.policy.offload() if part in ("parameters", "both") else 0
        return freed + (self.optimizer.offload() if part in ("optimizer", "both") else 0)

    def restore(self, part: str) -> None:
        if part in ("optimizer", "both"):
            self.optimizer.restore()
        if part in ("parameters", "both"):
            self.policy.restore()
            load_base(self.policy, self.model)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def total(tensors: list[Tensor]) -> int:
    """Bytes of their storages."""
    return sum(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )
