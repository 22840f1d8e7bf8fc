"""The weights that vLLM shall serve, as this rank has them."""

from collections.abc import Sequence

import torch

from tandem.families.adapter import peft_keys
from tandem.families.parts import Part
from tandem.model.policy import Policy
from tandem.model.transfer.merge import merge


class TrainedWeights:
    """The policy's base weights, each with its adapter: summed in float64, rounded once to float32 and then to
    `dtype`."""

    def __init__(self, policy: Policy) -> None:
        self._base, self._adapter = policy.base(), policy.lora_parameters()
        first = next(iter(self._base.values()))
        self.dtype, self.device = first.dtype, first.device
        scale = policy.lora.alpha / policy.lora.rank
        self._scale = torch.full((1,), scale, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def fill(self, parts: Sequence[Part], buffer: torch.Tensor) -> None:
        """Write the parts one after the other into `buffer`, flat and of `dtype`."""
        for part, out in zip(parts, buffer.split([part.size for part in parts]), strict=True):
            self._fill(part, out)

    def _fill(self, part: Part, out: torch.Tensor) -> None:
        parameter = self._base[part.parameter]
        columns = parameter.shape[-1:] if parameter.ndim > 1 else ()
        source = parameter.view(part.blocks, -1, *columns)[part.at]
        key_a, key_b = peft_keys(part.name.removesuffix(".weight"))
        if key_a not in self._adapter:
            out.view(source.shape).copy_(source)
            return
        a, b = self._adapter[key_a].data, self._adapter[key_b].data
        blocks, rows = part.at
        a = a[blocks] if a.ndim == 3 else a.expand(len(source), *a.shape)
        b = b.view(part.blocks, -1, b.shape[-1])[blocks, rows.start - part.begin : rows.stop - part.begin]
        merge(out.view(source.shape), source, a, b, self._scale)
