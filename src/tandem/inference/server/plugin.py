"""A vLLM plugin (entry point `vllm.general_plugins`), which vLLM calls in every process that it starts.

The engine's processes die with the process that started them. Without it, `kill -9` of the API server leaves the engine
behind for ever, with all of the GPU's memory, and the server that is started next finds none (vLLM 0.32; nor can the
orphan be found by its environment, which it overwrites).

And on the CPU a mixture of experts is computed by vLLM's kernels for the CPU.
"""

from __future__ import annotations

import multiprocessing

from tandem.system.processes import die_with_parent


def register() -> None:
    """In the API server, which is nobody's child in this sense, it does nothing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
        _experts_without_lora_on_the_cpu()


def _experts_without_lora_on_the_cpu() -> None:
    """With `--enable-lora` vLLM (0.32) gives every mixture of experts to its Triton kernels, adapters on experts or
    not; on the CPU, which has no Triton, the first request then ends the engine."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    made = FusedMoEConfig.__post_init__

    def without_lora(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = False
        made(config)

    FusedMoEConfig.__post_init__ = without_lora
