"""Builds Megatron's GPTModel for an `Arch`, with our attention and LoRA; no weight is initialised."""

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch

from tandem.families.arch import Arch, LinearScaling, RopeScaling, YarnScaling
from tandem.families.topology import Sizes, check
from tandem.model import device, mcore, parallel
from tandem.model.experts import Experts
from tandem.model.layer.blocks import AttentionBlock, Keep, MlpBlock
from tandem.model.layer.decoder_layer import DecoderLayer
from tandem.model.layer.kernels import HeadShape
from tandem.model.layer.moe_block import MoeBlock, SharedExpert
from tandem.model.layer.norm import OffsetNorm
from tandem.model.lora import AdapterSwitch, LoraLinear
from tandem.model.pipeline import Pipeline
from tandem.model.policy import Policy
from tandem.model.weights.base_memory import BaseWeights
from tandem.spool.schema import LoraShape

Recompute = Literal["auto", "none", "full"]

# GPTModel warns at every build that HybridModel is its successor, which doesn't help a reader of a job's log.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_policy(
    arch: Arch,
    lora: LoraShape | None,
    *,
    dtype: torch.dtype | None = None,
    recompute: Recompute = "none",
    base: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Policy:
    """This rank's part of the policy, on this process's device. Its base weights are uninitialised, its adapter is
    zero; `load_weights` and `Policy.load_adapter` fill them.

    Call it after `device.activate` and `parallel.init_parallel`. The device may still be starting: the model is made in
    host memory that is never touched, so it takes none, and moves to the device at the end.

    Args:
        lora: None trains all weights (`Policy.train_base`).
        dtype: of base weights and activations (LoRA is fp32); the default is the device's.
        recompute: "full" keeps only each layer's input and its attention's output for the backward pass. The others
            keep everything, until `recompute.fit` chooses.
        base: returns the memory for the base weights (`BaseWeights.parameters`); the default allocates it.

    Raises:
        InvalidInput: the model can't be cut over the ranks so.
    """
    sizes = parallel.current().sizes
    check(arch, sizes)
    stage = Pipeline(parallel.current(), arch.num_layers)
    dtype = dtype or device.default_dtype()
    gpt = mcore.GPTModel(
        _transformer_config(arch, dtype, sizes),
        _layer_spec(arch, stage.layers),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tie_embeddings,
        # A row holds many sequences, so `Policy` gives the layers each slot's own rotation.
        position_embedding_type="none",
        pre_process=stage.first,
        post_process=stage.last,
    )
    gpt.decoder.pre_process = True  # on every stage it takes the hidden states as an argument
    gpt.to(dtype).requires_grad_(False)
    switch = AdapterSwitch()
    for index, layer in zip(stage.layers, gpt.decoder.layers, strict=True):
        _add_blocks(layer, index, arch, lora, switch)
        layer.keep = Keep.INPUT if recompute == "full" else Keep.ALL
    policy = Policy(gpt, arch, lora, switch, stage, inv_freq=rope_frequencies(arch))
    policy.place(base() if base is not None else BaseWeights(arch, dtype, sizes).parameters)
    return policy


def _add_blocks(layer: Any, index: int, arch: Arch, lora: LoraShape | None, switch: AdapterSwitch) -> None:
    """Give layer `index`, counted over all stages, its adapters, and the blocks that compute it."""
    adapted = partial(LoraLinear, lora=lora, switch=switch)
    if arch.post_norms:
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            norm = _norm(arch)(config=layer.config, hidden_size=arch.hidden_size, eps=arch.rms_norm_eps)
            setattr(layer, name, norm.to(layer.config.params_dtype).requires_grad_(False))
    layer.blocks = [_attention_block(layer, index, arch, adapted)]
    if arch.moe and index >= arch.moe.dense_layers:
        mlp, shared = layer.mlp, None
        if lora is not None:
            mlp.experts.add_adapters(lora, switch)
        if arch.moe.biases:
            mlp.experts.add_biases()
            mlp.router.bias = _frozen(mlp.router.weight, arch.moe.num_experts)
        if arch.moe.router == "sigmoid":
            mlp.router.correction_bias = torch.nn.Parameter(torch.empty(arch.moe.num_experts), requires_grad=False)
        if size := arch.moe.shared_size:
            linears = mcore.MLPSubmodules(linear_fc1=mcore.ColumnParallelLinear, linear_fc2=mcore.RowParallelLinear)
            mlp.shared_experts = mcore.MLP(layer.config, linears, ffn_hidden_size=size)
            mlp.shared_experts.to(layer.config.params_dtype).requires_grad_(False)
            shared = SharedExpert(*_adapt_mlp(mlp.shared_experts, size, arch, adapted))
        layer.blocks.append(MoeBlock(layer.pre_mlp_layernorm, mlp.router, mlp.experts, arch.moe, index, shared))
    else:
        post_norm = layer.post_mlp_layernorm if arch.post_norms else None
        linears = _adapt_mlp(layer.mlp, arch.ffn_hidden_size, arch, adapted)
        layer.blocks.append(
            MlpBlock(layer.pre_mlp_layernorm, *linears, activation=arch.activation, post_norm=post_norm)
        )


def _attention_block(layer: Any, index: int, arch: Arch, adapted: Callable[..., LoraLinear]) -> AttentionBlock:
    tp, attention = parallel.current().sizes.tensor, layer.self_attention
    qkv = {"q_proj": arch.query_size // tp, "k_proj": arch.kv_size // tp, "v_proj": arch.kv_size // tp}
    if arch.output_bias:
        attention.linear_proj.bias = _frozen(attention.linear_proj.weight, arch.hidden_size)
    if arch.sinks:
        attention.sinks = _frozen(attention.linear_proj.weight, arch.num_heads // tp)
    attention.linear_qkv = adapted(attention.linear_qkv, qkv, groups=arch.num_kv_heads // tp)
    attention.linear_proj = adapted(attention.linear_proj, {"o_proj": arch.hidden_size})
    heads = HeadShape(
        arch.num_kv_heads // tp, arch.num_heads // arch.num_kv_heads, arch.head_dim, arch.rms_norm_eps,
        getattr(attention.q_layernorm, "weight", None), getattr(attention.k_layernorm, "weight", None),
        partial_rope=arch.rotary_size not in (None, arch.head_dim),
        offset_norms=arch.offset_norms,
    )  # fmt: skip
    return AttentionBlock(
        layer.input_layernorm, attention.linear_qkv, attention.linear_proj, heads,
        windowed=arch.window is not None and arch.window.layers[index],
        scale=arch.attention_scale,
        post_norm=layer.post_self_attn_layernorm if arch.post_norms else None,
        sinks=attention.sinks if arch.sinks else None,
    )  # fmt: skip


def _frozen(like: torch.Tensor, size: int) -> torch.nn.Parameter:
    """An uninitialised vector of that dtype."""
    return torch.nn.Parameter(like.new_empty(size), requires_grad=False)


def _adapt_mlp(
    mlp: Any, features: int, arch: Arch, adapted: Callable[..., LoraLinear]
) -> tuple[LoraLinear, LoraLinear]:
    """Megatron's MLP of so many features, with adapters."""
    gate_up = dict.fromkeys(("gate_proj", "up_proj"), features // parallel.current().sizes.tensor)
    mlp.linear_fc1 = adapted(mlp.linear_fc1, gate_up)
    mlp.linear_fc2 = adapted(mlp.linear_fc2, {"down_proj": arch.hidden_size})
    return mlp.linear_fc1, mlp.linear_fc2


def _transformer_config(arch: Arch, dtype: torch.dtype, sizes: Sizes) -> mcore.TransformerConfig:
    return mcore.TransformerConfig(
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
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,
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
        # Megatron's router and dispatcher are not used; without these values it refuses the model.
        "moe_router_pre_softmax": not moe.norm_topk_prob,
        "moe_token_dispatcher_type": "allgather",
    }


def rope_frequencies(arch: Arch) -> torch.Tensor:
    """Radians per position of each pair of head dimensions (Su et al., 2021, arXiv:2104.09864): fp32
    [1, head_dim / 2]; or [2, head_dim / 2], where layers with a sliding window have the second.

    With Llama 3's scaling, wavelengths above original / low_freq_factor are stretched by `factor`, those below
    original / high_freq_factor stay, and between them the two are blended.
    """
    size = arch.head_dim if arch.rotary_size is None else arch.rotary_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / arch.rope_theta**exponents
    if isinstance(arch.rope_scaling, YarnScaling):
        frequencies = _yarn(frequencies, arch.rope_scaling, arch.rope_theta)
    else:
        frequencies = _scaled(frequencies, arch.rope_scaling)
    if arch.window is None or arch.window.rope_theta is None:
        return frequencies[None]
    return torch.stack([frequencies, 1.0 / arch.window.rope_theta**exponents])


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | LinearScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """Section 3.2 of Peng et al., 2023 (arXiv:2309.00071)."""
    pairs = len(frequencies)

    def pair(rotations: float) -> float:
        """Which pair of dimensions turns so often within the original positions."""
        return pairs * math.log(scaling.original_max_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretch = ((torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * frequencies / scaling.factor + (1 - stretch) * frequencies


def _norm(arch: Arch) -> Any:
    return OffsetNorm if arch.offset_norms else mcore.WrappedTorchNorm


def _layer_spec(arch: Arch, layers: range) -> mcore.TransformerBlockSubmodules:
    norm = _norm(arch)
    qk_norm = norm if arch.qk_norm else mcore.IdentityOp
    column, row = mcore.ColumnParallelLinear, mcore.RowParallelLinear
    attention = mcore.SelfAttentionSubmodules(
        linear_qkv=column, core_attention=mcore.IdentityOp, linear_proj=row, q_layernorm=qk_norm, k_layernorm=qk_norm
    )
    linears = mcore.MLPSubmodules(linear_fc1=column, linear_fc2=row)
    dense = partial(mcore.MLP.as_mlp_submodule, submodules=linears)
    mixture = partial(mcore.MoELayer, submodules=mcore.MoESubmodules(experts=Experts))
    causal = {"attn_mask_type": mcore.AttnMaskType.causal}
    layer = partial(
        mcore.TransformerLayerSubmodules,
        input_layernorm=norm,
        self_attention=mcore.ModuleSpec(module=mcore.SelfAttention, params=causal, submodules=attention),
        self_attn_bda=mcore.get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp_bda=mcore.get_bias_dropout_add,
    )
    first = arch.num_layers if arch.moe is None else arch.moe.dense_layers
    specs = [
        mcore.ModuleSpec(module=DecoderLayer, submodules=layer(mlp=dense if index < first else mixture))
        for index in layers
    ]
    return mcore.TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)
