"""The block of a decoder layer that is a mixture of experts; see `blocks.py`.

Megatron's token dispatcher sums each token's experts with atomics, so on CUDA the last bits would
differ from run to run. Here every sum has a fixed order.

The ranks that the experts are cut over (EP, ETP) gather their tokens and what their routers chose;
each computes its own experts' rows of all tokens, and sends each token's sum to the token's rank.
With k experts per token that is less traffic than sending each token to each expert's rank, as long
as there are at most k such ranks. Without expert parallelism nothing waits for the device; with it
the host waits for one number, how many rows this rank has.
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
from tandem.model.layer.blocks import Block, Keep, Kept, MlpBlock, named


@dataclass
class Routing:
    """Which experts compute which tokens. A row is one token at one of its experts; rows are
    ordered by expert."""

    probs: torch.Tensor  # fp32 [S, k], of each token's experts
    experts: torch.Tensor  # int64 [S, k]
    # fp32 [S, experts], unscaled; None: `probs` are a softmax over the chosen.
    all_probs: torch.Tensor | None
    # Of this rank's N rows, which are of the tokens of all ranks that the experts are cut over.
    # Alone N is S * k.
    token: torch.Tensor  # int64 [N], each row's
    row: torch.Tensor  # int64 [all S, k], each token's; N: another rank has it
    row_probs: torch.Tensor  # fp32 [N], each row's of `probs`
    ends: torch.Tensor  # int32 [experts of this rank], one past each expert's last row


class MoeBlock(Block):
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
        shared: MlpBlock | None = None,
    ) -> None:
        """`router`: has the weight [experts, hidden]. The logits of a softmax have the activations'
        dtype and the softmax is fp32; a sigmoid's logits are fp32 too, with `correction_bias`
        [experts]; as in transformers and vLLM. `layer`: 0, 1, ..."""
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
        self._topology = parallel.current()
        self._group = self._topology.experts

    @property
    def _router(self) -> Parameter:
        weight: Parameter = self._module.weight
        return weight

    def forward(
        self, x: torch.Tensor, row: TreeParams, keep: Keep | None
    ) -> tuple[torch.Tensor, Kept]:
        """x [S, hidden] -> the same shape. `keep`: None where there is no backward pass."""
        normalised = self._normalised(x)
        routing = self._route(normalised, row.experts)
        tokens = parallel.gather(normalised, self._group)
        gate_up, inner = self._gates_and_ups(tokens[routing.token], routing.ends)
        # Down is linear, so probabilities may come before it, where rows are shorter.
        scaled = self._activate(gate_up, routing.row_probs)
        output, down_inner = self._down(scaled, routing.ends)
        if (bias := self._down.row_biases(routing.ends, len(output))) is not None:
            output.addcmul_(bias, routing.row_probs[:, None].to(bias.dtype))
        kept = Kept(
            x if keep is not None and keep >= Keep.ATTENTION else None,
            named("down_inner", down_inner),
        )
        if keep is Keep.ALL:
            kept.tensors |= {"gate_up": gate_up} | named("inner", inner)
        y = self._sum(output, routing, x)
        if self._shared is not None:  # its gate and up are not kept: the experts' are far larger
            y, of_shared = self._shared.added_to(y, normalised, Keep.INPUT)
            kept.tensors |= named("shared_inner", of_shared.get("down_inner"))
        return y, kept

    def backward(self, gradient: torch.Tensor, kept: Kept, row: TreeParams) -> torch.Tensor:
        """From the gradient of the output that of x; adds those of parameters to theirs. Uses up
        `kept`."""
        x = kept.x
        assert x is not None
        normalised = self._normalised(x)
        routing = self._route(normalised, row.experts)
        ends, rows = routing.ends, parallel.gather(normalised, self._group)[routing.token]
        if "gate_up" in kept.tensors:
            gate_up, inner = kept.tensors.pop("gate_up"), kept.tensors.pop("inner", None)
        else:
            gate_up, inner = self._gates_and_ups(rows, ends)
        of_output = parallel.gather(gradient, self._group)[routing.token]
        of_scaled, of_inner = self._down.input_gradient(of_output, ends)
        of_gate_up, scaled, of_probs = self._activate_backward(
            of_scaled, gate_up, routing.row_probs
        )
        if (bias := self._down.row_biases(ends, len(of_output))) is not None:
            of_probs += (of_output.float() * bias).sum(-1)
        down_inner = kept.tensors.pop("down_inner", None)
        self._down.add_gradients(of_output, of_inner, scaled, down_inner, ends)
        del of_output, of_scaled, scaled, gate_up
        of_rows, of_inner = self._gate_up.input_gradient(of_gate_up, ends)
        self._gate_up.add_gradients(of_gate_up, of_inner, rows, inner, ends)
        del of_gate_up, rows
        if self._group.size() > 1:
            of_probs = pad(of_probs, (0, 1))
        of_probs = parallel.scatter_sum(of_probs[routing.row], self._group)
        of_logits = self._logits_gradient(routing, of_probs)
        if gradients.wanted(self._router):
            gradients.add_product(self._router, of_logits, normalised)
        of_router = of_logits.to(x.dtype) @ self._router
        if self._shared is not None:
            shared_inner = named("down_inner", kept.tensors.pop("shared_inner", None))
            of_router = of_router + self._shared.input_gradient(gradient, normalised, shared_inner)
        of_normalised = self._sum(of_rows, routing, of_router)
        return self._input_gradient(of_normalised, x, gradient)

    def _gates_and_ups(
        self, rows: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, inner = self._gate_up(rows, ends)
        bias = self._gate_up.row_biases(ends, len(rows))
        return output if bias is None else output.add_(bias), inner

    def _route(self, normalised: torch.Tensor, row_experts: torch.Tensor | None) -> Routing:
        """`row_experts`: `RowTensors.slot_experts`. Their probabilities are the router's, so they
        have gradients."""
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
        if row_experts is not None:
            given = row_experts[:, self._layer].long()
            chosen = torch.where(given >= 0, given, chosen)
            probs = scores.gather(-1, chosen)
        if all_probs is None:  # a softmax over the chosen logits
            probs = probs.softmax(-1)
        if self._shape.router == "sigmoid":
            probs = self._shape.scale * (
                probs / self._total(probs) if self._shape.norm_topk_prob else probs
            )
        of_tokens, row_probs = (
            parallel.gather(chosen, self._group),
            parallel.gather(probs, self._group),
        )
        ordered, pairs = of_tokens.view(-1).sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(experts, device=pairs.device), right=True)
        row = torch.full_like(pairs, 0)
        if (parts := self._topology.sizes.expert) > 1:
            mine = experts // parts
            first = self._topology.place.expert * mine
            ends = pad(ends, (1, 0))[first : first + mine + 1]
            begin, end = ends[[0, -1]].tolist()  # waits for the device
            pairs, ends = pairs[begin:end], ends[1:] - begin
            row += end - begin
        row.scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
        row_probs = row_probs.view(-1)[pairs]
        return Routing(
            probs,
            chosen,
            all_probs,
            pairs // k,
            row.view_as(of_tokens),
            row_probs,
            ends.to(torch.int32),
        )

    def _sum(self, rows: torch.Tensor, routing: Routing, plus: torch.Tensor) -> torch.Tensor:
        """Each of this rank's tokens' rows, wherever they are, plus `plus` [S, features]."""
        if self._group.size() == 1:
            return kernels.sum_rows(rows, routing.row, plus)
        rows = pad(rows, (0, 0, 0, 1))  # for the rows that other ranks have
        own = kernels.sum_rows(rows, routing.row, rows.new_zeros(len(routing.row), rows.shape[1]))
        return plus + parallel.scatter_sum(own, self._group)

    def _best_of_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The experts of each token [S, k]. A group is as good as its two best experts, all with
        their biases."""
        choice = scores + self._module.correction_bias
        groups = choice.unflatten(-1, (self._shape.groups, -1))
        best = groups.topk(2).values.sum(-1).topk(self._shape.groups_per_token).indices
        open_groups = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
        return choice.topk(self._shape.experts_per_token).indices

    @staticmethod
    def _total(probs: torch.Tensor) -> torch.Tensor:
        return probs.sum(-1, keepdim=True) + 1e-20

    def _logits_gradient(self, routing: Routing, of_probs: torch.Tensor) -> torch.Tensor:
        """[S, experts] from the gradient of the chosen experts' probabilities [S, k], both fp32."""
        whole = of_probs.new_zeros(len(of_probs), self._shape.num_experts)
        if routing.all_probs is None:
            mean = (of_probs * routing.probs).sum(-1, keepdim=True)
            return whole.scatter_(1, routing.experts, routing.probs * (of_probs - mean))
        if self._shape.router == "sigmoid":
            of_probs, chosen = (
                self._shape.scale * of_probs,
                routing.all_probs.gather(-1, routing.experts),
            )
            if self._shape.norm_topk_prob:
                total = self._total(chosen)
                of_probs = (of_probs - (of_probs * chosen / total).sum(-1, keepdim=True)) / total
            return whole.scatter_(1, routing.experts, of_probs * chosen * (1 - chosen))
        whole.scatter_(1, routing.experts, of_probs)
        return routing.all_probs * (whole - (whole * routing.all_probs).sum(-1, keepdim=True))
