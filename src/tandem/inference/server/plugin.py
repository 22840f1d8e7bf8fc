"""A vLLM plugin (entry point `vllm.general_plugins`). vLLM calls `register` in every process that
it starts.

It installs what merged weights need (`worker/`), and works around five faults of vLLM 0.32:

- `kill -9` of the API server leaves the engine process behind for ever, with all of the GPU's
  memory. (The orphan can't be found by its environment, because it overwrites that.) Every engine
  process asks the kernel to die with its parent.
- With `--enable-lora`, vLLM runs every mixture of experts in kernels that take adapters, also
  without adapters on experts. On the CPU there are none (they are Triton's), and on Blackwell they
  demand an adapter of experts, so the engine ends. There vLLM is told that experts have no LoRA.
- On the CPU, tokens of the base model get the last slot's adapter wherever they share a batch with
  tokens of any adapter: their slot is -1, with which torch indexes from the end.
- If a worker raises, the executor leaves the answers of those behind it unread and takes them for
  those of the next call. So of several workers none raises where an adapter can't be loaded.
- FlashInfer compiles its kernels with nvcc, which images and many machines lack. vLLM knows that,
  and chooses some of these kernels all the same: for the sums over tensor-parallel GPUs (0.26 did
  not), and for attention on Blackwell. The first use ends the engine. There FlashInfer is hidden,
  and vLLM takes other kernels.

On the CPU it also has the API server fork its engine, which vLLM would start as a new process that
imports torch and vLLM again: 8 of the 17 seconds of a start.
"""

import functools
import multiprocessing
import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.system.processes import die_with_parent
from tandem.vllm_client.names import MERGED_VARIABLE


def register() -> None:
    """Change vLLM in its engine and worker processes, and on the CPU how the API server starts its
    engine."""
    parent = multiprocessing.parent_process()
    if parent is None:
        _fork_the_engine_on_the_cpu()
        return
    die_with_parent(parent.pid)
    _hide_flashinfer_without_nvcc()
    if MERGED_VARIABLE in os.environ:
        _install_merged_weights()
    else:
        _switch_expert_lora_off()
        _leave_base_tokens_alone()
        _tell_failed_adapters()


@functools.cache
def _install_merged_weights() -> None:
    """Workers attach Tandem's merged weights when they have loaded the model, within vLLM's memory
    pool for weights: a sleeping engine offloads only what is in it. After a swap the engine updates
    the requests that it has, and those that reached it during the swap."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    from tandem.inference.server.worker import extension

    if current_platform.is_cpu():
        extension.install_plain_cpu_kernels()
    load_model, collective_rpc = Worker.load_model, EngineCore.collective_rpc
    prepare, add = EngineCore.preprocess_add_request, EngineCore.add_request

    def load_and_attach(worker: Any, *args: Any, **kwargs: Any) -> None:
        runner = worker.model_runner
        load = runner.load_model

        def load_with_copy(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            extension.attach(worker)

        runner.load_model = load_with_copy
        load_model(worker, *args, **kwargs)
        del runner.load_model

    def call_or_swap(
        core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method == "tandem_call" and args[0] == "swap":
            return [extension.swap(core, collective_rpc, *args[1:])]
        return collective_rpc(core, method, timeout, args, kwargs)

    def prepare_and_note(core: Any, request: Any) -> Any:
        root = extension.hash_root()
        prepared = prepare(core, request)
        prepared[0].tandem_root = root
        return prepared

    def renew_and_add(core: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        extension.renew_hashes(request)
        add(core, request, *args, **kwargs)

    Worker.load_model, EngineCore.collective_rpc = load_and_attach, call_or_swap
    EngineCore.preprocess_add_request, EngineCore.add_request = prepare_and_note, renew_and_add


def _fork_the_engine_on_the_cpu() -> None:
    """A fork is safe there (vLLM's default as a library): one thread runs Python, and none has
    computed."""
    # vLLM also calls its plugins where it only looks at a model's class.
    if "vllm.engine.arg_utils" not in sys.modules:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.engine import utils
    from vllm.v1.engine.core import EngineCoreProc

    run_engine = EngineCoreProc.run_engine_core

    def run_changed_engine(*args: Any, **kwargs: Any) -> None:
        _give_up_the_port()
        register()  # vLLM thinks that it has called its plugins here: the server has
        run_engine(*args, **kwargs)

    EngineCoreProc.run_engine_core = staticmethod(run_changed_engine)
    # vLLM sets the variable that chooses the method to "spawn".
    utils.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


def _give_up_the_port() -> None:
    """Close the API server's port, which a fork inherits: a client that connects while the server
    shuts down would wait for the engine's end."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the listing had opened one, and has closed it
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    # The server's object, which is here too, still closes that number.
                    os.dup2(null, descriptor)
    os.close(null)


def _tell_failed_adapters() -> None:
    """A worker that can't load an adapter, or does not hold what the adapter's file has, answers
    with its error, and the engine raises it."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu_worker import Worker

    from tandem.inference.server.worker import held_adapter

    add = Worker.add_lora

    def add_or_tell(worker: Any, adapter: Any) -> Any:
        try:
            added = add(worker, adapter)
            held_adapter.check(worker, adapter)
        except Exception as error:
            with suppress(Exception):
                worker.remove_lora(adapter.lora_int_id)
            return f"{type(error).__name__}: {error}"
        return added

    def add_to_all(executor: Any, adapter: Any) -> bool:
        answers = executor.collective_rpc("add_lora", args=(adapter,))
        if problem := next((answer for answer in answers if isinstance(answer, str)), ""):
            raise RuntimeError(problem)
        return all(answers)

    Worker.add_lora, Executor.add_lora = add_or_tell, add_to_all


def _hide_flashinfer_without_nvcc() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        modules: dict[str, Any] = sys.modules
        modules["flashinfer"] = None  # an import raises ImportError, as if it were not installed
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # vLLM would import it without a try


def _switch_expert_lora_off() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and not current_platform.is_device_capability_family(100):
        return
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    original = FusedMoEConfig.__post_init__

    def without_lora(config: FusedMoEConfig) -> None:
        lora = get_current_vllm_config().lora_config
        if (
            lora is not None
            and lora.target_modules is not None
            and "experts" not in lora.target_modules
        ):
            config.is_lora_enabled = False
        original(config)

    FusedMoEConfig.__post_init__ = without_lora


def _leave_base_tokens_alone() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def shrink_adapted(x: Any, weights: Any, output: Any, slots: Any, scaling: float = 1.0) -> None:
        shrink(x, weights, output, slots, scaling)
        output[slots < 0] = 0

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_adapted
