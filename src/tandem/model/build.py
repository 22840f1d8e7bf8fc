"""Megatron's GPTModel for an `Arch`, with our attention and LoRA, and not one weight initialised."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from tandem.families.arch import Arch
from tandem.model import device, recompute_fix
from tandem.model.attention import TreeAttention
from tandem.model.experts import Experts, ExpertsLayer
from tandem.model.lora import LoraLinear, Part, Switch, join_qkv, join_stacked
from tandem.model.mcore import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    GPTModel,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    WrappedTorchNorm,
    get_bias_dropout_add,
    parallel_state,
)
from tandem.model.policy import Policy
from tandem.model.weights.base import BaseWeights, check_cut
from tandem.spool.schema import LoraShape

Recompute = Literal["none", "full"]

# At every build GPTModel warns that its successor is HybridModel: news for us, not for who reads a job's log.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_policy(
    arch: Arch,
    lora: LoraShape,
    *,
    dtype: torch.dtype | None = None,
    recompute: Recompute = "none",
    recompute_layers: int = 1,
    base: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Policy:
    """The policy on this process's device, cut for its tensor-parallel rank. Its base weights are uninitialised memory
    until `Policy.load_base`, its adapter is zero until `Policy.load_adapter`.

    `device.activate` and `parallel.init_parallel` came before; the device may still be starting: all is made in host
    memory that nobody touches, which takes none, and placed at the end. `dtype` is of base weights and activations
    (LoRA is fp32), by default the device's own. `recompute="full"` keeps only the input of every `recompute_layers`
    layers and computes them again in the backward pass. `base()` gives the memory for the base weights, if it is not to
    be allocated here: see `weights.BaseWeights`.

    Raises:
        InvalidInput: heads, MLP or vocabulary don't divide over the tensor-parallel ranks.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    check_cut(arch, tp)
    dtype = dtype or device.default_dtype()
    gpt = GPTModel(
        transformer_config(arch, dtype=dtype, recompute=recompute, recompute_layers=recompute_layers),
        _layer_spec(arch),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tie_embeddings,
        # Rows hold many sequences: `Policy` gives the layers each slot's own rotation.
        position_embedding_type="none",
    )
    gpt.to(dtype).requires_grad_(False)
    switch = Switch()
    adapt = partial(LoraLinear, lora=lora, switch=switch)
    q, kv = arch.num_heads * arch.head_dim // tp, arch.num_kv_heads * arch.head_dim // tp
    ffn = arch.ffn_hidden_size // tp
    qkv_parts = [Part("q_proj", q), Part("k_proj", kv), Part("v_proj", kv)]
    for layer in gpt.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        attention.linear_qkv = adapt(attention.linear_qkv, qkv_parts, join_qkv(arch.num_kv_heads // tp))
        attention.linear_proj = adapt(attention.linear_proj, [Part("o_proj", arch.hidden_size)], join_stacked)
        if isinstance(mlp, MoELayer):
            mlp.experts.adapt(lora, switch)
            continue
        mlp.linear_fc1 = adapt(mlp.linear_fc1, [Part("gate_proj", ffn), Part("up_proj", ffn)], join_stacked)
        mlp.linear_fc2 = adapt(mlp.linear_fc2, [Part("down_proj", arch.hidden_size)], join_stacked)
    recompute_fix.install(gpt)
    policy = Policy(gpt, arch, lora, switch, inv_freq=rope_frequencies(arch))
    policy.place(base() if base is not None else BaseWeights(arch, dtype, tp=tp).parameters)
    return policy


def transformer_config(
    arch: Arch, *, dtype: torch.dtype, recompute: Recompute, recompute_layers: int = 1
) -> TransformerConfig:
    """Megatron's own configuration of `arch` at this process's place in the process groups."""
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=False,
        gradient_accumulation_fusion=False,  # needs apex, and the fused layers are frozen
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,
        recompute_granularity="full" if recompute == "full" else None,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=recompute_layers if recompute == "full" else None,
        **_moe_options(arch),
    )


def _moe_options(arch: Arch) -> dict[str, Any]:
    moe = arch.moe
    if moe is None:
        return {}
    # Megatron advises a router in fp32; transformers and vLLM compute its logits in the activations' dtype, as here.
    warnings.filterwarnings("ignore", "Using a large number of experts")
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        # A softmax over the chosen logits is one over all of them, divided by the sum of the chosen.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
    }


def rope_frequencies(arch: Arch) -> torch.Tensor:
    """Radians per position of each pair of head dimensions (Su et al., 2021, arXiv:2104.09864): fp32 [head_dim / 2].

    With Llama 3's scaling, wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor stay, and between them the two are blended.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponents
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _layer_spec(arch: Arch) -> ModuleSpec:
    qk_norm = WrappedTorchNorm if arch.qk_norm else IdentityOp
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = (
        partial(ExpertsLayer, submodules=MoESubmodules(experts=Experts))
        if arch.moe
        else partial(MLP.as_mlp_submodule, submodules=linears)
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=TreeAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
