"""Patches: replacements of functions of vLLM, and of its server uvicorn. This file contains every
patch. `plugin.py` decides which patches to apply.

`tests/test_patches.py` lists the replaced names, with the version of vLLM from which each patch can
be removed.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def install_merged_weights(attach: Callable[[Any], None], swap: Callable[..., Any]) -> None:
    """Makes workers call `attach` after they have loaded the model, while vLLM's memory pool for
    weights is active. A sleeping engine offloads only this pool. Makes the engine call `swap`
    between two steps; `swap` updates the engine's requests. If a swap ran while a request was on
    its way into the engine, the request's block hashes are computed again.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    load_model, collective_rpc = Worker.load_model, EngineCore.collective_rpc
    prepare, add = EngineCore.preprocess_add_request, EngineCore.add_request

    def load_and_attach(worker: Any, *args: Any, **kwargs: Any) -> None:
        runner = worker.model_runner
        load = runner.load_model

        def load_with_copy(*args: Any, **kwargs: Any) -> None:
            load(*args, **kwargs)
            attach(worker)

        runner.load_model = load_with_copy
        load_model(worker, *args, **kwargs)
        del runner.load_model

    def call_or_swap(
        core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method == "tandem_call" and args[0] == "swap":
            return [swap(core, collective_rpc, *args[1:])]
        return collective_rpc(core, method, timeout, args, kwargs)

    def prepare_and_note(core: Any, request: Any) -> Any:
        root = hash_root()
        prepared = prepare(core, request)
        prepared[0].tandem_root = root
        return prepared

    def renew_and_add(core: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        renew_hashes(request)
        add(core, request, *args, **kwargs)

    Worker.load_model = load_and_attach
    EngineCore.collective_rpc = call_or_swap
    EngineCore.preprocess_add_request = prepare_and_note
    EngineCore.add_request = renew_and_add


def bound_http_requests() -> None:
    """Limits the headers and the waiting times of HTTP requests, in every uvicorn server that this
    process configures afterwards."""
    from uvicorn.config import HTTP_PROTOCOLS

    from tandem.system.http_limits import BoundedHttp

    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"


def hash_root() -> bytes | None:
    """The value from which vLLM computes the hashes of all cached blocks; None before vLLM has set
    it."""
    from vllm.v1.core import kv_cache_utils

    return getattr(kv_cache_utils, "NONE_HASH", None)


def replace_hash_root() -> None:
    """Replaces the root value of the hashes of cached blocks, so that no request finds a cached
    block that was computed by other weights."""
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(os.urandom(32))


def renew_hashes(request: Any) -> None:
    """Renews the block hashes of a request that enters the engine, if they are out of date. Another
    thread has hashed the request's blocks, starting from the root `tandem_root`. If a swap has run
    since this hashing, `hash_root()` returns another root. Without new hashes, the request would
    find cached blocks that other weights have computed."""
    if getattr(request, "tandem_root", None) != hash_root():
        hash_again(request)


def hash_again(request: Any) -> None:
    request.block_hashes.clear()
    request.update_block_hashes()


def note_added_requests(engine: Any, note: Callable[[], None]) -> None:
    """Makes the API server call `note` in the context of each request, after the request was given
    to the engine. The method `generate` of vLLM passes the request to the engine only when its
    caller asks for the first result."""
    add_request = engine.add_request

    async def add_and_note(*args: Any, **kwargs: Any) -> Any:
        queue = await add_request(*args, **kwargs)
        note()
        return queue

    engine.add_request = add_and_note


def continue_sampled_tokens(
    engine: Any, render: Callable[..., Any], record: Callable[..., Any]
) -> None:
    """Makes the API server call `render` to render chats, and `record` to sample.

    Args:
        engine: vLLM's engine client; its `generate` and its renderer's method are replaced.
        render: `render(original, messages, params)`, an async function; `original` is the
            renderer's own method.
        record: called with the arguments of `generate`.
    """
    renderer = engine.renderer
    original = renderer.render_messages_async

    async def render_or_continue(messages: Any, params: Any) -> Any:
        return await render(original, messages, params)

    def sample_and_record(*args: Any, **kwargs: Any) -> Any:
        return record(*args, **kwargs)

    renderer.render_messages_async = render_or_continue
    engine.generate = sample_and_record


def leave_texts_of_tokens_out(unneeded: Callable[[], bool]) -> None:
    """Makes vLLM leave the texts of tokens out of a request's log-probs if `unneeded` returns True.
    `unneeded` is called in the request's context when the engine gets the request. Decoding tokens
    one at a time takes a third of the API server's time for an answer."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    original = LogprobsProcessor.from_new_request

    def without_texts(tokenizer: Any, request: Any) -> Any:
        return original(None if unneeded() else tokenizer, request)

    LogprobsProcessor.from_new_request = without_texts


def install_plain_cpu_kernels(
    keep_plain: Callable[..., None], experts: Callable[..., None]
) -> None:
    """Makes vLLM's CPU backend multiply matrices with torch. The CPU backend of vLLM 0.32 packs
    weights into its own layouts, but merged weights need the unpacked layout."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    utils.dispatch_cpu_unquantized_gemm = keep_plain
    CPUUnquantizedExperts.process_weights_after_loading = lambda *_: None
    CPUUnquantizedExperts.apply = experts


def gather_outputs(keep_or_send: Callable[[Any, dict[int, Any]], None]) -> None:
    """Makes vLLM's scheduler call `keep_or_send(scheduler, outputs)` after each step. `outputs` are
    the step's outputs for each API server, and `keep_or_send` may change them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output

    def update_and_keep(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(scheduler, *args, **kwargs)
        keep_or_send(scheduler, outputs)
        return outputs

    Scheduler.update_from_output = update_and_keep


def fork_the_engine(begin: Callable[[], None], *, always: bool) -> None:
    """Makes a forked engine call `begin` first. vLLM calls no plugins in a forked engine, because
    it assumes that they ran before the fork.

    Args:
        always: the API server starts its engine by a fork, whatever vLLM chooses. A fork is safe
            on the CPU, because only one thread runs Python and no thread has started to compute.
            If vLLM is used as a library, vLLM also forks by default.
    """
    from vllm.v1.engine import utils as engine_utils
    from vllm.v1.engine.core import EngineCoreProc

    run_engine, choose = EngineCoreProc.run_engine_core, engine_utils.get_mp_context

    def run_changed_engine(*args: Any, **kwargs: Any) -> None:
        begin()
        run_engine(*args, **kwargs)

    def fork_or_spawn() -> Any:
        """vLLM calls this function just before it reads `run_engine_core`. A spawned engine needs a
        function that can be pickled, and calls the plugins itself."""
        context = multiprocessing.get_context("fork") if always else choose()
        forks = context.get_start_method() == "fork"
        EngineCoreProc.run_engine_core = staticmethod(run_changed_engine if forks else run_engine)
        return context

    engine_utils.get_mp_context = fork_or_spawn


def tell_failed_adapters() -> None:
    """Makes a worker return an error as its answer if it can't load an adapter, or if the loaded
    tensors differ from the adapter's file. The engine raises an error that a worker has
    returned."""
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

    Worker.add_lora = add_or_tell
    Executor.add_lora = add_to_all


def hide_flashinfer_without_nvcc() -> None:
    """Makes every import of FlashInfer raise ImportError if FlashInfer can't compile its
    kernels."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        sys.modules["flashinfer"] = None  # type: ignore[assignment]
        # unless VLLM_USE_FLASHINFER_SAMPLER is 0, vLLM imports FlashInfer and does not catch the
        # ImportError
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"


def switch_expert_lora_off() -> None:
    """On the CPU and on Blackwell, makes mixtures of experts use kernels without support for
    adapters, unless adapters may change experts."""
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


def multiply_adapters_on_the_cpu() -> None:
    """Makes vLLM on the CPU multiply each adapter only once, with all of its tokens in the batch.
    Tokens without an adapter (slot -1) are skipped."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    # vLLM also passes arguments by name, so the parameters have vLLM's names.
    def shrink(
        inputs: Any,
        lora_b_weights: Any,
        output_tensor: Any,
        lora_indices_tensor: Any,
        scaling: float = 1.0,
    ) -> None:
        for slot, rows in _by_slot(lora_indices_tensor):
            weight = _of_slot(lora_b_weights, slot, output_tensor)
            product = 0 if slot < 0 else scaling * (inputs[rows].to(weight.dtype) @ weight.T)
            output_tensor[rows, : len(weight)] = product

    def expand_slice(
        inputs: Any,
        lora_b_weights: Any,
        output_tensor: Any,
        lora_indices_tensor: Any,
        slice_offset: int,
        slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = output_tensor[:, slice_offset : slice_offset + slice_size]
        for slot, rows in _by_slot(lora_indices_tensor):
            product = 0
            if slot >= 0:
                weight = _of_slot(lora_b_weights, slot, output_tensor)[:slice_size]
                product = inputs[rows].to(weight.dtype) @ weight.T
            part[rows] = part[rows] + product if add_inputs else product

    def expand(
        inputs: Any,
        lora_b_weights: Any,
        output_tensor: Any,
        lora_indices_tensor: Any,
        add_inputs: bool = True,
    ) -> None:
        # vLLM may pad the weights and the output to different sizes.
        size = min(lora_b_weights.shape[-2], output_tensor.shape[1])
        expand_slice(
            inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, size, add_inputs
        )

    for module in (lora_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand = shrink, expand
        module.bgmv_expand_slice = expand_slice


def _by_slot(slots: Any) -> list[tuple[int, Any]]:
    """The adapter slots of a batch, each with the indices of its tokens; slot -1 is the base
    model."""
    found = slots.unique().tolist()
    if len(found) == 1:
        return [(found[0], slice(None))]
    return [(slot, (slots == slot).nonzero().flatten()) for slot in found]


def _of_slot(weights: Any, slot: int, output: Any) -> Any:
    weight = weights[max(slot, 0)]
    return (weight[0] if weight.dim() == 3 else weight).to(output.dtype)
