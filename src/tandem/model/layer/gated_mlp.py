"""An MLP whose output is multiplied by a gate: a sigmoid, computed for each token. The shared
expert of Qwen3.5 is a gated MLP."""

from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.functional import linear

from tandem.model import gradients
from tandem.model.layer.sublayers import MlpSublayer, SaveLevel
from tandem.model.lora import LoraLinear


class GatedMlp(MlpSublayer):
    """`x + sigmoid(W_gate norm(x)) * W_down swiglu(W_gate_up norm(x))`.

    Args:
        gate_weight: the weight W_gate, [1, hidden], the same on all ranks.
    """

    def __init__(
        self, norm: Any, gate_up: LoraLinear, down: LoraLinear, gate_weight: Parameter
    ) -> None:
        super().__init__(norm, gate_up, down)
        self._gate_weight = gate_weight

    def add_mlp(
        self, x: torch.Tensor, normalised: torch.Tensor, _level: SaveLevel | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Like `MlpSublayer.add_mlp`, but no tensors are saved. The backward pass computes the MLP
        again, because it also needs the MLP's output."""
        output, _tensors = super().add_mlp(torch.zeros_like(x), normalised, None)
        return torch.addcmul(x, output, self._gates(normalised).to(x.dtype)), {}

    def input_gradient(
        self, gradient: torch.Tensor, normalised: torch.Tensor, _saved: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Like `MlpSublayer.input_gradient`; `gradient` and `normalised`: [S, hidden]."""
        output, tensors = super().add_mlp(torch.zeros_like(gradient), normalised, SaveLevel.ALL)
        gates = self._gates(normalised)
        grad_logits = self._logits_gradient(gradient, output, gates)
        if gradients.has_gradient_buffer(self._gate_weight):
            gradients.add_product(self._gate_weight, grad_logits, normalised)
        grad_output = gradient * gates.to(gradient.dtype)
        grad_normalised = super().input_gradient(grad_output, normalised, tensors)
        return torch.addmm(grad_normalised, grad_logits.to(gradient.dtype), self._gate_weight)

    @staticmethod
    def _logits_gradient(
        gradient: torch.Tensor, output: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the gate's logits, fp32 [S, 1], from the gradient of `add_mlp`'s output.
        `output`: the MLP's output before it is multiplied by the gate."""
        return (gradient.float() * output).sum(-1, keepdim=True) * gates * (1 - gates)

    def _gates(self, normalised: torch.Tensor) -> torch.Tensor:
        """The gates, fp32 [S, 1]. The gates' logits are computed in the activations' dtype, as in
        transformers."""
        return linear(normalised, self._gate_weight).float().sigmoid()
