"""The sublayer of a mixture of experts in a decoder layer (see `sublayers.py`).

An assignment is a token together with one of its experts. Assignments are ordered by expert.

Megatron's token dispatcher is not used. The dispatcher sums the outputs of a token's experts with
atomic operations, so on CUDA the last bits would differ between two runs. In this module, every sum
has a fixed order.

The experts are divided among ranks by expert parallelism and expert tensor parallelism. From all of
these ranks, each rank gathers the tokens and the routers' choices for the tokens. A rank computes
its own experts for all tokens, and sends the sum of each token's outputs to the token's rank.
Gathering all tokens sends less data than sending each token to the ranks of its k experts, if there
are at most k ranks. Without expert parallelism, the host never waits for the device. With expert
parallelism, the host waits for one number, which is the number of assignments of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.functional import linear, pad

from tandem.families.arch import MoE
from tandem.model import gradients, parallel
from tandem.model.attention import TreeParams
from tandem.model.experts import ExpertLinear
from tandem.model.layer import kernels
from tandem.model.layer.sublayers import MlpSublayer, Saved, SaveLevel, Sublayer, entry


@dataclass
class Routing:
    """The assignments of tokens to experts."""

    probs: torch.Tensor  # The probabilities of each token's experts, fp32 [S, k].
    experts: torch.Tensor  # The experts of each token, int64 [S, k].
    # The unscaled probabilities of all experts, fp32 [S, experts]. If `all_probs` is None, `probs`
    # are a softmax over the chosen experts.
    all_probs: torch.Tensor | None
    # The fields from `token` on describe the N assignments to this rank's experts. The assignments'
    # tokens are the tokens of all ranks among which the experts are divided. If a single rank has
    # all experts, N is S * k.
    token: torch.Tensor  # The token of each assignment, int64 [N].
    # Each token's assignments, int64 [slots of all ranks, k]. The value is N if another rank has
    # the assignment.
    assignment: torch.Tensor
    assignment_probs: torch.Tensor  # The entry of `probs` for each assignment, fp32 [N].
    # One past each expert's last assignment, int32 [experts of this rank].
    ends: torch.Tensor


class MoeSublayer(Sublayer):
    """`x + shared(norm(x)) + sum over a token's experts of p * W_down swiglu(W_gate_up
    norm(x))`."""

    def __init__(
        self,
        norm: Any,
        router: Any,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        shape: MoE,
        layer: int,
        shared: MlpSublayer | None = None,
    ) -> None:
        """A softmax router has logits in the activations' dtype and a softmax in fp32. A sigmoid
        router has fp32 logits and a `correction_bias` [experts]. Transformers and vLLM compute both
        routers in the same way.

        Args:
            router: a module with the weight [experts, hidden].
            layer: the layer's number, from 0.
        """
        super().__init__(norm)
        self._module, self._gate_up, self._down, self._shape, self._layer = (
            router,
            gate_up,
            down,
            shape,
            layer,
        )
        self._shared, self._activate = (
            shared,
            kernels.clamped_swiglu if shape.biases else kernels.expert_swiglu,
        )
        self._activate_backward = (
            kernels.clamped_swiglu_backward if shape.biases else kernels.expert_swiglu_backward
        )
        if shape.beside_mlp:
            self._activate, self._activate_backward = (
                kernels.expert_geglu,
                kernels.expert_geglu_backward,
            )
        self._topology = parallel.current()
        self._group = self._topology.expert_group

    @property
    def _router(self) -> Parameter:
        weight: Parameter = self._module.weight
        return weight

    def forward(
        self, x: torch.Tensor, tree: TreeParams, level: SaveLevel | None
    ) -> tuple[torch.Tensor, Saved]:
        """The sublayer's output for x, both [S, hidden], and the tensors that `backward` needs.

        Args:
            level: which tensors are saved; None if there is no backward pass.
        """
        normalised = self._normalise(x)
        routing = self._route(normalised, tree.slot_experts)
        y, tensors = self._add_experts(x, normalised, routing, level)
        saved = Saved(x if level is not None and level >= SaveLevel.ATTENTION else None, tensors)
        # The shared MLP's gate and up are recomputed; they are far smaller than the experts' gate
        # and up.
        if self._shared is not None:
            y, shared_saved = self._shared.add_mlp(y, normalised, SaveLevel.INPUT)
            saved.tensors |= entry("shared_inner", shared_saved.get("down_inner"))
        return y, saved

    def _add_experts(
        self, x: torch.Tensor, normalised: torch.Tensor, routing: Routing, level: SaveLevel | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns x plus the sum of each token's expert outputs, and the tensors to save."""
        tokens = parallel.gather(normalised, self._group)
        gate_up, inner = self._gate_up_products(tokens[routing.token], routing.ends)
        # The experts' layer `down` is linear, so its input can be multiplied by the probabilities
        # instead of its output. The input has fewer features.
        scaled = self._activate(gate_up, routing.assignment_probs)
        output, down_inner = self._down(scaled, routing.ends)
        if (bias := self._down.assignment_biases(routing.ends, len(output))) is not None:
            output.addcmul_(bias, routing.assignment_probs[:, None].to(bias.dtype))
        tensors = entry("down_inner", down_inner)
        if level is SaveLevel.ALL:
            tensors |= {"gate_up": gate_up} | entry("inner", inner)
        return self._sum_per_token(output, routing, x), tensors

    def backward(self, gradient: torch.Tensor, saved: Saved, tree: TreeParams) -> torch.Tensor:
        """The gradient of x, [S, hidden]. Also adds the parameters' gradients to their buffers.

        Args:
            gradient: the gradient of the output, [S, hidden].
            saved: the second result of `forward`; it can't be used again.
            tree: the argument `tree` of `forward`.
        """
        x = saved.x
        assert x is not None
        normalised = self._normalise(x)
        routing = self._route(normalised, tree.slot_experts)
        grad_assigned, grad_probs = self._experts_backward(
            gradient, normalised, routing, saved.tensors
        )
        grad_logits = self._logits_gradient(routing, grad_probs)
        if gradients.has_gradient_buffer(self._router):
            gradients.add_product(self._router, grad_logits, normalised)
        grad_routed = grad_logits.to(x.dtype) @ self._router
        if self._shared is not None:
            shared_inner = entry("down_inner", saved.tensors.pop("shared_inner", None))
            grad_routed = grad_routed + self._shared.input_gradient(
                gradient, normalised, shared_inner
            )
        grad_normalised = self._sum_per_token(grad_assigned, routing, grad_routed)
        return self._input_gradient(grad_normalised, x, gradient)

    def _experts_backward(
        self,
        gradient: torch.Tensor,
        normalised: torch.Tensor,
        routing: Routing,
        saved: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns two gradients: of each assignment's input, and of `routing.probs`, fp32 [S, k].
        Both gradients are computed from the gradient of `_add_experts`' output. Adds the
        parameters' gradients to their buffers. Empties `saved`."""
        ends, inputs = routing.ends, parallel.gather(normalised, self._group)[routing.token]
        if "gate_up" in saved:
            gate_up, inner = saved.pop("gate_up"), saved.pop("inner", None)
        else:
            gate_up, inner = self._gate_up_products(inputs, ends)
        grad_output = parallel.gather(gradient, self._group)[routing.token]
        grad_scaled, grad_inner = self._down.input_gradient(grad_output, ends)
        grad_gate_up, scaled, grad_probs = self._activate_backward(
            grad_scaled, gate_up, routing.assignment_probs
        )
        if (bias := self._down.assignment_biases(ends, len(grad_output))) is not None:
            grad_probs += (grad_output.float() * bias).sum(-1)
        down_inner = saved.pop("down_inner", None)
        self._down.add_gradients(grad_output, grad_inner, scaled, down_inner, ends)
        del grad_output, grad_scaled, scaled, gate_up
        grad_assigned, grad_inner = self._gate_up.input_gradient(grad_gate_up, ends)
        self._gate_up.add_gradients(grad_gate_up, grad_inner, inputs, inner, ends)
        del grad_gate_up, inputs
        if self._group.size() > 1:
            grad_probs = pad(grad_probs, (0, 1))
        return grad_assigned, parallel.scatter_sum(grad_probs[routing.assignment], self._group)

    def _gate_up_products(
        self, inputs: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, inner = self._gate_up(inputs, ends)
        bias = self._gate_up.assignment_biases(ends, len(inputs))
        return output if bias is None else output.add_(bias), inner

    def _route(self, normalised: torch.Tensor, slot_experts: torch.Tensor | None) -> Routing:
        """The routing of tokens. If `slot_experts` (`RowTensors.slot_experts`) has experts for a
        slot, they replace the router's choice. The probabilities always come from the router, so
        they have gradients."""
        k, experts = self._shape.experts_per_token, self._shape.num_experts
        all_probs = None
        if self._shape.router == "sigmoid":
            scores = all_probs = linear(normalised.float(), self._router.float()).sigmoid()
            chosen = self._best_of_groups(scores)
            probs = scores.gather(-1, chosen)
        else:
            scores = linear(normalised, self._router, self._module.bias).float()
            if not self._shape.norm_topk_prob:
                scores = all_probs = scores.softmax(-1)
            probs, chosen = scores.topk(k)
        if slot_experts is not None:
            replay = slot_experts[:, self._layer].long()
            chosen = torch.where(replay >= 0, replay, chosen)
            probs = scores.gather(-1, chosen)
        if all_probs is None:  # a softmax over the chosen logits
            probs = probs.softmax(-1)
        if self._shape.router == "sigmoid":
            probs = self._shape.scale * (
                probs / self._probs_total(probs) if self._shape.norm_topk_prob else probs
            )
        all_chosen = parallel.gather(chosen, self._group)
        assignment_probs = parallel.gather(self._weights(probs, chosen), self._group)
        sorted_experts, pairs = all_chosen.view(-1).sort(stable=True)
        ends = torch.searchsorted(
            sorted_experts, torch.arange(experts, device=pairs.device), right=True
        )
        assignment = torch.full_like(pairs, 0)
        if (parts := self._topology.sizes.expert) > 1:
            count = experts // parts
            first = self._topology.place.expert * count
            ends = pad(ends, (1, 0))[first : first + count + 1]
            begin, end = ends[[0, -1]].tolist()  # the host waits for the device
            pairs, ends = pairs[begin:end], ends[1:] - begin
            assignment += end - begin
        assignment.scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
        assignment_probs = assignment_probs.view(-1)[pairs]
        return Routing(
            probs,
            chosen,
            all_probs,
            pairs // k,
            assignment.view_as(all_chosen),
            assignment_probs,
            ends.to(torch.int32),
        )

    def _weights(self, probs: torch.Tensor, _chosen: torch.Tensor) -> torch.Tensor:
        """The factors of the experts' outputs [S, k], computed from the experts' probabilities [S,
        k]."""
        return probs

    def _sum_per_token(
        self, values: torch.Tensor, routing: Routing, plus: torch.Tensor
    ) -> torch.Tensor:
        """For each of this rank's tokens, the sum of `plus` [S, features] and the values of the
        token's assignments on all ranks."""
        if self._group.size() == 1:
            return kernels.sum_assignments(values, routing.assignment, plus)
        # The index N, which stands for the assignments of other ranks, gets a row of zeros.
        values = pad(values, (0, 0, 0, 1))
        shape = len(routing.assignment), values.shape[1]
        partial = kernels.sum_assignments(values, routing.assignment, values.new_zeros(shape))
        return plus + parallel.scatter_sum(partial, self._group)

    def _best_of_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts chosen for each token, [S, k], from the groups with the best scores. A
        group's score is the sum of the scores of its two best experts. All scores include the
        experts' biases."""
        choice = scores + self._module.correction_bias
        groups = choice.unflatten(-1, (self._shape.groups, -1))
        best = groups.topk(2).values.sum(-1).topk(self._shape.groups_per_token).indices
        open_groups = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
        return choice.topk(self._shape.experts_per_token).indices

    @staticmethod
    def _probs_total(probs: torch.Tensor) -> torch.Tensor:
        return probs.sum(-1, keepdim=True) + 1e-20

    def _logits_gradient(self, routing: Routing, grad_probs: torch.Tensor) -> torch.Tensor:
        """The gradient of the logits, [S, experts], from the gradient of the chosen experts'
        probabilities [S, k], both fp32."""
        whole = grad_probs.new_zeros(len(grad_probs), self._shape.num_experts)
        if routing.all_probs is None:
            mean = (grad_probs * routing.probs).sum(-1, keepdim=True)
            return whole.scatter_(1, routing.experts, routing.probs * (grad_probs - mean))
        if self._shape.router == "sigmoid":
            grad_probs, chosen = (
                self._shape.scale * grad_probs,
                routing.all_probs.gather(-1, routing.experts),
            )
            if self._shape.norm_topk_prob:
                total = self._probs_total(chosen)
                grad_probs = (
                    grad_probs - (grad_probs * chosen / total).sum(-1, keepdim=True)
                ) / total
            return whole.scatter_(1, routing.experts, grad_probs * chosen * (1 - chosen))
        whole.scatter_(1, routing.experts, grad_probs)
        return routing.all_probs * (whole - (whole * routing.all_probs).sum(-1, keepdim=True))
