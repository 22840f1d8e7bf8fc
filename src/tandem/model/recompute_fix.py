"""A mixture of experts computed again in the backward pass keeps no layer's input after it.

Megatron's token dispatchers leave the tensors of the last forward in attributes (0.19.2: `local_probs` of allgather,
`probs` of alltoall), the router's probabilities with their graph among them. Under full recompute the last forward of
a layer is the one inside `CheckpointFunction.backward`, whose graph begins at a detached copy of the checkpoint's
input: a leaf, which shares the input's memory and has its gradient. So one attribute holds both for each checkpoint,
from the end of the backward pass to the layer's next forward, and no garbage collector helps, since there is no cycle.
`bench/moe_leak.py` measures it: two layer inputs per layer, half of that with `recompute_num_layers` 2.

Here such an attribute is cut from its graph as soon as the layer is done with it: it keeps its value and its memory,
and autograd has references of its own. Nothing is resized, so nothing that shares memory with anything can be hurt
(https://github.com/NVIDIA/Megatron-LM/pull/3267 and its successors free the inputs instead).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tandem.model.mcore import GPTModel, MoELayer


def install(gpt: GPTModel) -> list[RemovableHandle]:
    """Cut what `gpt`'s dispatchers would hold; returns the hooks. None where there is no mixture of experts or no full
    recompute. A dispatcher that holds no graph, as ours and maybe a later Megatron's, is left as it is."""
    if gpt.config.recompute_granularity != "full":
        return []
    return [layer.register_forward_hook(_cut) for layer in gpt.modules() if isinstance(layer, MoELayer)]


def _cut(layer: nn.Module, _inputs: Any, _output: Any) -> None:
    for holder, name in held_graphs(layer):
        setattr(holder, name, getattr(holder, name).detach())


def held_graphs(layer: nn.Module) -> list[tuple[Any, str]]:
    """The attributes of a MoE layer's dispatcher, and of what it delegates to, that hold a graph: (object, name)."""
    dispatcher = layer.token_dispatcher
    holders = [dispatcher, getattr(dispatcher, "_comm_manager", None)]
    return [
        (holder, name)
        for holder in holders
        if holder is not None
        for name, value in vars(holder).items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
