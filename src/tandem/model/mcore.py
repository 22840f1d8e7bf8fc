"""Everything of Megatron-core that the model is made of, imported without compiling anything.

Megatron decorates its fused functions with `torch.compile` as they are imported, which loads the whole compiler: about
half of the seconds that its import takes, in every rank of every job, for functions that the model doesn't use.
So while Megatron is imported `torch.compile` returns what it is given; those functions would be right, and plain.
"""

from __future__ import annotations

import torch

_compile = torch.compile
torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)  # type: ignore
try:
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
finally:
    torch.compile = _compile

__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "GPTModel",
    "IdentityOp",
    "MLPSubmodules",
    "MegatronModule",
    "MoEAllGatherTokenDispatcher",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "WrappedTorchNorm",
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_bias_dropout_add",
    "parallel_state",
    "random",
    "reduce_from_tensor_model_parallel_region",
    "set_tensor_model_parallel_attributes",
]
