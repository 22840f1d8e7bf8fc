"""The weights of vLLM's model on one worker, and a second copy of those that may change."""

from hashlib import sha256
from typing import Any, Literal

import torch

from tandem.families.adapter import chosen
from tandem.inference.server.worker.base_files import BaseFiles
from tandem.inference.server.worker.weight_plan import CannotWrite, plan

BASE = "base"
"""The version of the weights that vLLM loaded."""


class ModelWeights:
    def __init__(
        self, model: torch.nn.Module, base_model: str, targets: frozenset[str] | None, copy: Literal["device", "host"]
    ) -> None:
        """`targets`: names of the linear layers that may change; None: every tensor may.

        Proves the plan: the base model's files, put through it, are what vLLM loaded, byte for byte. Else CannotWrite.
        """
        self._parameters = dict(model.named_parameters())
        self._blocks = plan(model)
        self._base_model, self._base_files = base_model, BaseFiles(base_model)
        self._device = next(model.parameters()).device
        self._prove()
        self._adapted = [block for block in self._blocks if chosen(block.names[0], targets)]
        self._copy = {
            name: _copied(self._parameters[name].data, copy) for name in {block.parameter for block in self._adapted}
        }
        self.version = BASE

    @property
    def device_bytes(self) -> int:
        """Memory on the GPU beside vLLM's own: the copy, or the space for one parameter on its way from the host."""
        sizes = [copy.nbytes for copy in self._copy.values()]
        return sum(sizes) if next(iter(self._copy.values())).is_cuda else 2 * max(sizes)

    def _prove(self) -> None:
        for block in self._blocks:
            live = block.view(self._parameters[block.parameter].data)
            for name, part in zip(block.names, live, strict=True):
                try:
                    expected = self._base_files.block(name, block.of).to(part.dtype)
                except KeyError as error:
                    raise CannotWrite(f"the base model's files have no {name}") from error
                if expected.shape != part.shape or not torch.equal(bits(expected.to(part.device)), bits(part)):
                    raise CannotWrite(f"{block.parameter} of vLLM differs from {name} in the base model's files")

    @torch.inference_mode()
    def rows(self, wanted: dict[str, int]) -> list[dict[str, Any]]:
        """For one row of each named tensor that is on this worker: its columns here and the SHA-256 of its bytes."""
        found, parts = [], []
        for block in self._adapted:
            live = block.view(self._parameters[block.parameter].data)
            for name, part in zip(block.names, live, strict=True):
                begin, end, _ = block.of[0].indices(10**9)
                if name in wanted and begin <= wanted[name] < end:
                    columns = block.of[1]
                    parts.append(part[wanted[name] - begin])
                    first = columns.start or 0
                    found.append({"name": name, "begin": first, "end": first + part.shape[1]})
        host = torch.cat(parts).cpu() if parts else torch.empty(0)
        for entry, row in zip(found, host.split([p.numel() for p in parts]), strict=True):
            entry["sha256"] = sha256(bits(row).numpy().tobytes()).hexdigest()
        return found


def _copied(live: torch.Tensor, where: Literal["device", "host"]) -> torch.Tensor:
    if where == "device" or live.device.type == "cpu":
        return live.clone()
    return torch.empty(live.shape, dtype=live.dtype, pin_memory=True).copy_(live)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
