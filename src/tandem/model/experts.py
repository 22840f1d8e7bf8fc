"""A mixture of experts with LoRA: Megatron's MoE layer and router, with our own token order and expert arithmetic.

Megatron's experts need TransformerEngine or run one by one. Its dispatcher sums each token's experts with atomics, so
on CUDA the order of the sums, and with it the last bits, differ from run to run. Here the weights of all experts are
stacked [experts, out, in] and multiplied by torch's grouped matrix product, and sums have a fixed order. The adapters
are stacked too: A [experts, rank, in] and B [experts, out, rank].
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad, silu

from tandem.model.lora import AdapterSwitch, LoraTensor, join_stacked
from tandem.model.mcore import MegatronModule, MoEAllGatherTokenDispatcher, MoELayer, TransformerConfig
from tandem.spool.schema import LoraShape

_ALIGNED = 8  # elements; in bf16 torch's grouped product takes only rows of whole 16 bytes


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each group of rows of `x` times its own matrix: [N, in] -> [N, out].

    Args:
        x: [N, in], rows of group 0 first, then those of group 1, ...
        weight: [groups, out, in], of x's dtype.
        ends: int32 [groups], one past each group's last row; the last is N. Groups may be empty.
    """
    aligned = not any(size % _ALIGNED for size in weight.shape[1:])
    if x.is_cuda and x.dtype is torch.bfloat16 and aligned:
        return torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    # The gradient of `unbind` is one stack; that of an index would be a tensor of zeros as large as `weight`.
    parts = zip(x.split(sizes), weight.unbind(), strict=True)
    return torch.cat([linear(rows, matrix) for rows, matrix in parts])


class Experts(MegatronModule):
    """All experts of a layer: `down(silu(gate(x)) * up(x))`, times the router's probability of expert and token."""

    def __init__(self, num_experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        ffn, hidden, dtype = config.moe_ffn_hidden_size, config.hidden_size, config.params_dtype
        self.fc1 = nn.Parameter(torch.empty(num_experts, 2 * ffn, hidden, dtype=dtype))  # gate, then up
        self.fc2 = nn.Parameter(torch.empty(num_experts, hidden, ffn, dtype=dtype))
        self.features = {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
        self.lora_a, self.lora_b = nn.ParameterDict(), nn.ParameterDict()
        self.switch, self.rank, self.scale = AdapterSwitch(), 0, 0.0

    def add_adapters(self, lora: LoraShape, switch: AdapterSwitch) -> None:
        """Add the adapters of the targets that `lora` names, uninitialised."""
        self.switch, self.rank, self.scale = switch, lora.rank, lora.alpha / lora.rank
        experts = len(self.fc1)
        for target, (in_features, out_features) in self.features.items():
            if target in lora.targets:
                self.lora_a[target] = nn.Parameter(torch.empty(experts, lora.rank, in_features))
                self.lora_b[target] = nn.Parameter(torch.empty(experts, out_features, lora.rank))

    def lora_tensors(self) -> dict[str, tuple[LoraTensor, LoraTensor]]:
        """Adapted target -> A and B of all experts."""
        return {t: (LoraTensor(self.lora_a[t], "whole"), LoraTensor(self.lora_b[t], "whole")) for t in self.lora_a}

    def forward(self, x: torch.Tensor, ends: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """x [N, hidden] and probs [N], in the order of `TokenOrder`, whose groups end at `ends` -> [N, hidden] and, for
        Megatron, no bias."""
        gate, up = self._project(x, self.fc1, ("gate_proj", "up_proj"), ends).chunk(2, dim=-1)
        # The last product is linear, so probabilities may come before it, where rows are shorter.
        inner = silu(gate) * up * probs[:, None]
        return self._project(inner, self.fc2, ("down_proj",), ends), None

    def _project(
        self, x: torch.Tensor, weight: torch.Tensor, targets: tuple[str, ...], ends: torch.Tensor
    ) -> torch.Tensor:
        """The projections of `targets` with their adapters, one after the other; `weight` is their stack."""
        output = grouped_linear(x, weight, ends)
        adapted = [target for target in targets if target in self.lora_a]
        if not adapted or not self.switch.on:
            return output
        spare = -self.rank % _ALIGNED
        a = torch.cat([pad(self.lora_a[target], (0, 0, 0, spare)) for target in adapted], dim=1).to(x.dtype)
        hidden = (grouped_linear(x, a, ends) * self.scale).chunk(len(adapted), dim=-1)
        hidden_of = dict(zip(adapted, hidden, strict=True))
        deltas = [
            grouped_linear(hidden_of[target], pad(self.lora_b[target], (0, spare)).to(x.dtype), ends)
            if target in hidden_of
            else x.new_zeros(()).expand(len(x), self.features[target][1])
            for target in targets
        ]
        return output + join_stacked(deltas)


class TokenOrder(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher for one rank, with sums in a fixed order and no wait for the device.

    Rows are ordered by expert, then by token; a token has a row for each of its experts. After the layer's forward no
    attribute holds a tensor with a gradient.
    """

    routing_map: torch.Tensor | None  # bool [tokens, experts]

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens, hidden] and probs [tokens, experts] -> rows [N, hidden], each expert's end, probs [N]."""
        assert self.ep_size == self.tp_size == 1, "with several ranks a token's number of rows on this one is unknown"
        chosen = self.routing_map
        assert chosen is not None
        self.routing_map = None
        tokens = len(chosen)
        by_expert = chosen.T.reshape(-1).argsort(descending=True, stable=True)[: tokens * self.router_topk]
        token_of_row = by_expert % tokens
        rows_of_token = token_of_row.argsort(stable=True).view(tokens, self.router_topk)
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = (token_of_row, rows_of_token)
        ends = chosen.sum(0).cumsum(0).to(torch.int32)
        # All indices of the probs are different, so their gradient has a fixed order too.
        return (
            _Gather.apply(hidden_states, token_of_row, rows_of_token),
            ends,
            probs.T.reshape(-1).index_select(0, by_expert),
        )

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows [N, hidden] -> each token's sum [tokens, hidden]."""
        assert self._rows is not None
        token_of_row, rows_of_token = self._rows
        self._rows = None
        return _Gather.apply(hidden_states, rows_of_token, token_of_row)


class ExpertsLayer(MoELayer):
    """Megatron's MoE layer with our order of tokens."""

    def __init__(self, config: TransformerConfig, *, pg_collection: Any, **options: Any) -> None:
        super().__init__(config, pg_collection=pg_collection, **options)
        self.token_dispatcher = TokenOrder(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=pg_collection
        )


class _Gather(torch.autograd.Function):
    """Rows that each copy one row of `x`, or sum several: `index` is int64 [rows] or [rows, summands].

    `transposed` is the same for the gradient, so its sums have a fixed order too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, transposed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(transposed)
        return _gathered(x, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (transposed,) = ctx.saved_tensors
        return _gathered(gradient, transposed), None, None


def _gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index] if index.ndim == 1 else x[index].sum(1)
