"""The weights that vLLM shall serve, as this rank has them."""

import torch

from tandem.families.adapter import peft_keys
from tandem.families.parts import Part
from tandem.model.policy import Policy
from tandem.model.transfer.merge import merge
from tandem.trainer.rank.model_files import Weights


class TrainedWeights(Weights):
    """The policy's base weights, each with its adapter, if it has one: summed in float64, rounded once to float32 and
    then to `dtype`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.base())
        self._adapter = policy.lora_parameters()
        scale = policy.lora.alpha / policy.lora.rank if policy.lora else 0.0
        self._scale = torch.full((1,), scale, dtype=torch.float64, device=self.device)

    def _fill(self, part: Part, source: torch.Tensor, out: torch.Tensor) -> None:
        key_a, key_b = peft_keys(part.name.removesuffix(".weight"))
        if key_a not in self._adapter:
            super()._fill(part, source, out)
            return
        a, b = self._adapter[key_a].data, self._adapter[key_b].data
        blocks, rows = part.at
        a = a[blocks] if a.ndim == 3 else a.expand(len(source), *a.shape)
        b = b.view(part.blocks, -1, b.shape[-1])[blocks, rows.start - part.begin : rows.stop - part.begin]
        merge(out, source, a, b, self._scale)
