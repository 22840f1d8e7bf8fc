"""Builds Megatron's GPTModel for an `Arch`, with Tandem's layers and LoRA; no weight is
initialised."""

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch

from tandem.families.arch import Arch, LinearScaling, ProportionalRope, RopeScaling, YarnScaling
from tandem.model import device, mcore, parallel
from tandem.model.layer.decoder_layer import DecoderLayer
from tandem.model.layer.norm import make_norm
from tandem.model.layer.sublayers import SaveLevel
from tandem.model.lora import AdapterSwitch
from tandem.model.pipeline import Pipeline
from tandem.model.policy import Policy
from tandem.model.weights.base_memory import BaseWeights
from tandem.planning.checks import check_sizes
from tandem.spool.schema import LoraShape

Recompute = Literal["auto", "none", "full"]
# At every build GPTModel warns that HybridModel is its successor. The warning doesn't help the
# reader of a job's log.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


def build_policy(
    arch: Arch,
    lora: LoraShape | None,
    *,
    dtype: torch.dtype | None = None,
    recompute: Recompute = "none",
    base: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> Policy:
    """Build this rank's part of the policy, on this process's device. The base weights are
    uninitialised and the adapter is zero; `load_weights` and `Policy.load_adapter` fill them.

    Call `build_policy` after `device.activate` and `parallel.init_parallel`. The device may still
    be starting during the call. The model is built in host memory that is never touched, so the
    model takes no physical memory. At the end, the model moves to the device.

    Args:
        lora: the shape of the adapter; None: all weights are trained (`Policy.train_base`).
        dtype: the dtype of base weights and activations (LoRA is fp32); by default the device's
            default dtype.
        recompute: with "full", each layer saves only its input and its attention's output for the
            backward pass. With other values of `recompute`, layers save all tensors until
            `recompute.fit` chooses how many tensors they save.
        base: a function that returns the memory for the base weights (`BaseWeights.parameters`). If
            `base` is None, `build_policy` allocates the memory for the base weights.

    Raises:
        InvalidInput: the model can't be cut over this number of ranks.
    """
    topology = parallel.current()
    check_sizes(arch, topology.sizes)
    stage, switch, dtype = (
        Pipeline(topology, arch.num_layers),
        AdapterSwitch(),
        dtype or device.default_dtype(),
    )
    layers = [
        mcore.ModuleSpec(
            DecoderLayer, params={"arch": arch, "index": index, "lora": lora, "switch": switch}
        )
        for index in stage.layers
    ]
    gpt = mcore.GPTModel(
        _transformer_config(arch, dtype),
        mcore.TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=partial(make_norm, arch, dtype)
        ),
        vocab_size=arch.vocab_size,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tie_embeddings,
        # A row holds many sequences, so `Policy` passes the rotation of each slot to the layers.
        position_embedding_type="none",
        pre_process=stage.first,
        post_process=stage.last,
    )
    gpt.decoder.pre_process = True  # every pipeline stage takes the hidden states as an argument
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    for layer in gpt.decoder.layers:
        layer.save_level = SaveLevel.INPUT if recompute == "full" else SaveLevel.ALL
    policy = Policy(gpt, arch, lora, switch, stage, inv_freq=rope_frequencies(arch))
    policy.place(
        base() if base is not None else BaseWeights(arch, dtype, topology.sizes).parameters
    )
    return policy


def _transformer_config(arch: Arch, dtype: torch.dtype) -> mcore.TransformerConfig:
    """Megatron's configuration of a model whose layers are Tandem's."""
    return mcore.TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        layernorm_epsilon=arch.rms_norm_eps,
        hidden_dropout=0.0,
        tensor_model_parallel_size=parallel.current().sizes.tensor,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=True,
    )


def rope_frequencies(arch: Arch) -> torch.Tensor:
    """Radians per position of each pair of head dimensions (Su et al., 2021, arXiv:2104.09864):
    fp32 [1, head_dim / 2]. If layers with a sliding window have other frequencies, the result is
    [2, head_dim / 2]. The second row is for the layers with a window. If layers with and without a
    window have heads of different sizes (`Arch.rope_sizes`), the shorter row is padded with zeros.

    Llama 3's scaling multiplies a wavelength by `factor` if the wavelength exceeds
    original_max_positions / low_freq_factor. Wavelengths below original_max_positions /
    high_freq_factor stay unchanged. For wavelengths between the two limits, the frequency is a
    weighted mean of the unchanged frequency and the frequency divided by `factor`.
    """
    size, window_size = arch.rope_sizes
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / arch.rope_theta**exponents
    if isinstance(arch.rope_scaling, ProportionalRope):
        turned = int(arch.rope_scaling.share * size // 2)
        frequencies = frequencies / arch.rope_scaling.factor
        frequencies[turned:] = 0
    elif isinstance(arch.rope_scaling, YarnScaling):
        frequencies = _yarn(frequencies, arch.rope_scaling, arch.rope_theta)
    else:
        frequencies = _scale_rope(frequencies, arch.rope_scaling)
    if arch.window is None or arch.window.rope_theta is None:
        return frequencies[None]
    rows = torch.zeros(2, max(size, window_size) // 2)
    rows[0, : size // 2] = frequencies
    exponents = torch.arange(0, window_size, 2, dtype=torch.float32) / window_size
    rows[1, : window_size // 2] = 1.0 / arch.window.rope_theta**exponents
    return rows


def _scale_rope(
    frequencies: torch.Tensor, scaling: RopeScaling | LinearScaling | None
) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """YaRN's frequencies: section 3.2 of Peng et al., 2023 (arXiv:2309.00071)."""
    pairs = len(frequencies)

    def pair(rotations: float) -> float:
        """The index of the pair of dimensions that makes `rotations` full turns within the original
        number of positions."""
        return (
            pairs
            * math.log(scaling.original_max_positions / (rotations * 2 * math.pi))
            / math.log(theta)
        )

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    stretch = ((torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0, 1
    )
    return stretch * frequencies / scaling.factor + (1 - stretch) * frequencies
