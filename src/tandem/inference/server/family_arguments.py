"""Returns the vLLM arguments that a family of models needs."""

import json
from importlib.util import find_spec
from typing import Any

from tandem.errors import InvalidInput, TandemError
from tandem.families.arch import LatentAttention
from tandem.families.model_config import model_directory
from tandem.families.registry import read_arch

CPU_LATENT = 576
"""The only number of features per token that vLLM's CPU kernel for latent attention can cache."""


def family_arguments(model: str, dtype: str, *, on_cpu: bool) -> list[str]:
    """The arguments for the model's family. Raises InvalidInput if vLLM can't serve the model on
    this device in `dtype`.

    Args:
        model: a directory or a hub name; if the hub's cache lacks the model's configuration, the
            result is empty.
        dtype: the dtype in which vLLM computes, such as "bfloat16".
        on_cpu: whether vLLM computes on the CPU.
    """
    try:
        arch = read_arch(str(model_directory(model, ("config.json",), cached=True)))
    # the model is not downloaded yet, or the trainer refuses its family with an error of its own
    except TandemError:
        return []
    if arch.mla is not None and on_cpu:
        return _latent_arguments(arch.mla, arch.model_type)
    # Training rows contain only text. The vision tower is not loaded, because it is not needed and
    # would take memory.
    vision = arch.weight_prefix != "model."
    argv = ["--language-model-only"] if vision else []
    if (growth := arch.query_growth) is not None:
        # vLLM 0.32 reads the position-dependent scaling of queries only from the key
        # `llama_4_scaling`. Hugging Face's configs do not have the key `llama_4_scaling`.
        of_text: dict[str, Any] = {
            "llama_4_scaling": {
                "beta": growth.rate,
                "original_max_position_embeddings": growth.positions,
            }
        }
        overrides = {"text_config": of_text} if vision else of_text
        argv += ["--hf-overrides", json.dumps(overrides)]
    if arch.gdn is None:
        return argv
    if find_spec("torchvision") is None:
        raise InvalidInput(
            f"vLLM needs torchvision to serve {arch.model_type}, and it is not installed; install"
            " the release that goes with your torch (0.28 with torch 2.13)"
        )
    if on_cpu and dtype != "bfloat16":
        problem = f"vLLM computes {arch.model_type} on the CPU in bfloat16 only"
        raise InvalidInput(f"{problem}; set TANDEM_DTYPE=bfloat16", field="TANDEM_DTYPE")
    # vLLM can cache the states of a delta net for prefixes only if vLLM splits prefills. On the
    # CPU, prefills are not split.
    return argv + (["--no-enable-prefix-caching"] if on_cpu else [])


def _latent_arguments(mla: LatentAttention, model_type: str) -> list[str]:
    """The arguments for latent attention on the CPU."""
    if (size := mla.kv_rank + mla.rope_size) != CPU_LATENT:
        problem = f"kv_lora_rank + qk_rope_head_dim is {size} here"
        needed = f"vLLM serves {model_type} on the CPU where it is {CPU_LATENT}"
        raise InvalidInput(f"{problem}; {needed}", field="base_model")
    # vLLM 0.32's RoPE kernel rotates the queries of several heads wrongly if the two dimensions of
    # a rotated pair are adjacent. The option `-rotary_embedding` selects torch's code, which is
    # correct.
    return ["--compilation-config", '{"custom_ops": ["-rotary_embedding"]}']
