"""Frees what a mixture of experts under full recompute would hold after the backward pass.

docs/architecture.md names the attributes that hold it, and `bench/moe_leak.py` measures it. Under full recompute the
last forward of a layer is the one inside `CheckpointFunction.backward`. Its graph begins at a detached copy of the
checkpoint's input, a leaf, which shares the input's memory and has its gradient. It is no cycle, so Python's garbage
collector doesn't help.

The fix detaches such an attribute as soon as its layer's forward is done. It keeps its value, and autograd has
references of its own. Nothing is resized, so tensors that share memory are safe
(https://github.com/NVIDIA/Megatron-LM/pull/3267 and its successors free the inputs instead).
"""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tandem.model.mcore import GPTModel, MoELayer


def install(gpt: GPTModel) -> list[RemovableHandle]:
    """Detach what `gpt`'s dispatchers hold after each forward; returns the hooks, none without full recompute. A
    dispatcher that holds no graph, such as ours, is left as it is."""
    if gpt.config.recompute_granularity != "full":
        return []
    return [layer.register_forward_hook(_detach) for layer in gpt.modules() if isinstance(layer, MoELayer)]


def _detach(layer: nn.Module, _inputs: Any, _output: Any) -> None:
    for holder, name in held_graphs(layer):
        setattr(holder, name, getattr(holder, name).detach())


def held_graphs(layer: nn.Module) -> list[tuple[Any, str]]:
    """(dispatcher, name) of the attributes of a MoE layer's dispatcher that hold a graph."""
    dispatcher = layer.token_dispatcher
    return [
        (dispatcher, name)
        for name, value in vars(dispatcher).items()
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
