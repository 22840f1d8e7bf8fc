"""A vLLM plugin (entry point `vllm.general_plugins`). vLLM calls `register` in every process that it starts.

It works around two faults of vLLM 0.32:

- `kill -9` of the API server leaves the engine process behind for ever, with all of the GPU's memory, and the next
  server finds none free. (The orphan can't be found by its environment, because it overwrites that.) Every engine
  process asks the kernel to die with its parent.
- With `--enable-lora`, vLLM runs every mixture of experts in its Triton kernels, also without adapters on experts. The
  CPU has no Triton, so the first request ends the engine. On the CPU vLLM is told that experts have no LoRA.
"""

import multiprocessing

from tandem.system.processes import die_with_parent


def register() -> None:
    """Apply both workarounds in vLLM's child processes. The API server needs neither."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with_parent(parent.pid)
        _switch_expert_lora_off_on_the_cpu()


def _switch_expert_lora_off_on_the_cpu() -> None:
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__

    def without_lora(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = False
        original(config)

    FusedMoEConfig.__post_init__ = without_lora
