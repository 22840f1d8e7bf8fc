"""vLLM's CPU backend packs weights into layouts of its own. Merged weights need the plain layout, so torch's own
products replace the packed ones there."""

from typing import Any

import torch
from torch.nn.functional import linear


def install() -> None:
    """Replace the packed kernels of vLLM 0.32's CPU backend."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    utils.dispatch_cpu_unquantized_gemm = _keep_plain
    CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    CPUUnquantizedExperts.apply = _apply_experts


def _keep_plain(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
    layer.cpu_linear = linear


def _apply_experts(
    _: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_args: Any, **_kwargs: Any,
) -> None:  # fmt: skip
    """SwiGLU experts, one after another. `w1` [experts, gate above up, in], `w2` [experts, out, ffn]."""
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        hidden = linear(torch.nn.functional.silu(gate) * up, w2[expert])
        output.index_add_(0, token, hidden * topk_weights[token, choice, None].to(hidden.dtype))
