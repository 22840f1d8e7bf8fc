"""A mixture of experts beside an MLP, each with its own norms (Gemma 4)."""

from typing import Any

import torch

from tandem.families.arch import MoE
from tandem.model import gradients
from tandem.model.attention import TreeParams
from tandem.model.experts import ExpertLinear
from tandem.model.layer import kernels
from tandem.model.layer.moe_sublayer import MoeSublayer, Routing
from tandem.model.layer.norm import norm_backward, normalise
from tandem.model.layer.sublayers import MlpSublayer, Saved, SaveLevel


class ExpertsBesideMlp(MoeSublayer):
    """`x + norm(mlp_norm(mlp(norm_1(x))) + experts_norm(sum over a token's experts of p * s *
    expert(norm_2(x))))`. p is the expert's probability, and s is the expert's own factor
    (`expert_scale`). The router's input is the normalised x times the router's `scale` /
    sqrt(hidden).

    Args:
        norms: the norms of the experts' input, of the experts' sum, and of the whole output.
        router: has the weight [experts, hidden], `scale` [hidden] and `expert_scale` [experts].
        layer: the layer's number, from 0.
        mlp: the dense MLP, with its own output norm.
    """

    def __init__(
        self,
        norms: tuple[Any, Any, Any],
        router: Any,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        shape: MoE,
        layer: int,
        mlp: MlpSublayer,
    ) -> None:
        norm, self._experts_norm, self._whole_norm = norms
        super().__init__(norm, router, gate_up, down, shape, layer)
        self._mlp = mlp

    def forward(
        self, x: torch.Tensor, tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, Saved]:
        """The output and the saved tensors, as in `MoeSublayer.forward`."""
        routing = self._route(self._router_rows(x), tree.slot_experts)
        zeros = torch.zeros_like(x)
        experts, tensors = self._add_experts(zeros, self._normalise(x), routing, level)
        # The MLP's gate and up are recomputed; they are far smaller than the experts' gate and up.
        mlp, mlp_saved = self._mlp.add_mlp(zeros, self._mlp._normalise(x), SaveLevel.INPUT)
        both = mlp + normalise(self._experts_norm, experts)
        saved = Saved(x if level is not None and level >= SaveLevel.ATTENTION else None)
        if level is not None:
            saved.tensors = tensors | {"experts": experts, "both": both}
            saved.tensors |= {f"mlp_{name}": value for name, value in mlp_saved.items()}
        return x + normalise(self._whole_norm, both), saved

    def backward(self, gradient: torch.Tensor, saved: Saved, tree: TreeParams) -> torch.Tensor:
        """The gradient of x, as in `MoeSublayer.backward`."""
        x, tensors = saved.x, saved.tensors
        assert x is not None
        zeros = torch.zeros_like(x)
        grad_both = norm_backward(self._whole_norm, gradient, tensors.pop("both"), zeros)
        grad_sum = norm_backward(self._experts_norm, grad_both, tensors.pop("experts"), zeros)
        normalised, router_rows = self._normalise(x), self._router_rows(x)
        routing = self._route(router_rows, tree.slot_experts)
        mlp_saved = {
            name.removeprefix("mlp_"): tensors.pop(name)
            for name in list(tensors)
            if name.startswith("mlp_")
        }
        grad_assigned, grad_weights = self._experts_backward(grad_sum, normalised, routing, tensors)
        grad_normalised = self._sum_per_token(grad_assigned, routing, zeros)
        grad_x = self._input_gradient(grad_normalised, x, gradient)
        grad_rows = self._router_backward(routing, grad_weights, router_rows)
        grad_x = self._router_rows_backward(grad_rows, x, grad_x)
        grad_mlp = self._mlp.input_gradient(grad_both, self._mlp._normalise(x), mlp_saved)
        return self._mlp._input_gradient(grad_mlp, x, grad_x)

    def _weights(self, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return probs * self._module.expert_scale.float()[chosen]

    def _router_backward(
        self, routing: Routing, grad_weights: torch.Tensor, router_rows: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the router's input."""
        scale = self._module.expert_scale
        if gradients.has_gradient_buffer(scale):
            of_each = torch.zeros_like(scale, dtype=torch.float32)
            terms = (grad_weights * routing.probs).flatten()
            gradients.add(scale, of_each.index_add_(0, routing.experts.flatten(), terms))
        grad_probs = grad_weights * scale.float()[routing.experts]
        grad_logits = self._logits_gradient(routing, grad_probs)
        if gradients.has_gradient_buffer(self._router):
            gradients.add_product(self._router, grad_logits, router_rows)
        return grad_logits.to(router_rows.dtype) @ self._router

    def _router_rows(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self._router_scale(x), self._norm.eps)

    def _router_rows_backward(
        self, gradient: torch.Tensor, x: torch.Tensor, plus: torch.Tensor
    ) -> torch.Tensor:
        """The sum of `plus` and the gradient of x. The gradient of x is computed from the gradient
        of `_router_rows`' output."""
        scale = self._module.scale
        if gradients.has_gradient_buffer(scale):
            of_weight = kernels.norm_weight_gradient(gradient, x, self._norm.eps)
            gradients.add(scale, of_weight * x.shape[-1] ** -0.5)
        return kernels.rms_norm_backward(gradient, x, self._router_scale(x), self._norm.eps, plus)

    def _router_scale(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self._module.scale.float() * x.shape[-1] ** -0.5
        return scale
