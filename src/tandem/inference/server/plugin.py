"""A vLLM plugin (entry point `vllm.general_plugins`). In every process that vLLM starts, vLLM calls
`register`.

The plugin limits the headers and waiting times of HTTP requests, makes the API server collect
garbage less often, and installs the code for merged weights (`worker/`). The plugin also works
around five faults of vLLM 0.32, mostly with functions of `patches.py`:

- `kill -9` of the API server leaves the engine process behind for ever, with all of the GPU's
  memory. The orphaned engine overwrites its environment, so a search by environment can't find the
  process. The plugin therefore makes the kernel kill each engine process when the parent of the
  process dies.
- With `--enable-lora`, vLLM computes every mixture of experts with kernels for adapters, even if no
  adapter changes experts. The kernels for adapters are written in Triton, and the CPU has no Triton
  kernels. On Blackwell the kernels for adapters crash the engine unless an adapter changes experts.
  On the CPU and on Blackwell, the plugin therefore reports to vLLM that experts have no LoRA.
- On the CPU, vLLM copies an adapter's weights, padded to the largest rank, for each token. The
  copies make a real model sample 11 times as slowly. Also, if a batch has tokens of the base model
  and tokens of an adapter, vLLM applies the adapter in the last slot to the base model's tokens.
  The base model's slot is -1, which torch takes as the index of the last slot. The plugin
  multiplies each adapter once with all of its tokens.
- If a worker raises an error, vLLM's executor does not read the answers of the later workers. The
  executor then mistakes the unread answers for answers to the next call. A worker that can't load
  an adapter therefore returns the error as its answer.
- FlashInfer compiles its kernels with nvcc, which container images and many machines do not have.
  Even without nvcc, vLLM chooses FlashInfer's kernels for the sums over tensor-parallel GPUs (0.26
  did not), and for attention on Blackwell. The first use of a kernel that can't be compiled crashes
  the engine. The plugin hides FlashInfer if FlashInfer can't compile its kernels, so that vLLM
  chooses other kernels.

The plugin also changes vLLM where this saves time:

- On the CPU, the plugin makes the API server fork its engine. A new process instead of a fork would
  import torch and vLLM again, which takes 8 of the 17 seconds of a start. On CUDA `command.py` sets
  vLLM's own variable for a fork. vLLM calls no plugins in a forked engine, so the plugin makes the
  engine call `register` in both cases.
- The engine sends the tokens of several steps at once to the API server, for requests that are not
  streams (`worker/gathered_outputs.py`).
"""

import functools
import gc
import multiprocessing
import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

from tandem.inference.server import patches
from tandem.system.processes import die_with_parent
from tandem.vllm_client.names import MERGED_VARIABLE

API_SERVER = "ApiServer"
"""The prefix of vLLM's names of its API servers' processes."""
COLLECTIONS = (50_000, 20, 10)
"""Thresholds of the API server's garbage collector, in place of Python's 700, 10, 10. With hundreds
of requests in flight, Python's default thresholds take a quarter of the server's time, and free
almost nothing."""


def register() -> None:
    """Apply the patches that this process needs as an API server, an engine or a worker."""
    parent = multiprocessing.parent_process()
    if parent is None or multiprocessing.current_process().name.startswith(API_SERVER):
        patches.bound_http_requests()  # imports uvicorn, which other processes don't need
        gc.set_threshold(*COLLECTIONS)
    if parent is None:
        _prepare_for_a_fork()
        return
    die_with_parent(parent.pid)
    _gather_outputs()
    patches.hide_flashinfer_without_nvcc()
    if MERGED_VARIABLE in os.environ:
        _install_merged_weights()
    else:
        patches.switch_expert_lora_off()
        patches.multiply_adapters_on_the_cpu()
        patches.tell_failed_adapters()


@functools.cache
def _install_merged_weights() -> None:
    from vllm.platforms import current_platform

    from tandem.inference.server.worker import extension

    if current_platform.is_cpu():
        patches.install_plain_cpu_kernels(extension.keep_plain, extension.apply_experts)
    patches.install_merged_weights(extension.attach, extension.swap)


def _gather_outputs() -> None:
    if "vllm.v1.engine.core" not in sys.modules:
        return  # this process is a worker, which has no engine
    from tandem.inference.server.worker.gathered_outputs import keep_or_send

    patches.gather_outputs(keep_or_send)


def _prepare_for_a_fork() -> None:
    # vLLM also calls its plugins when it only inspects a model's class.
    if "vllm.engine.arg_utils" not in sys.modules:
        return
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()  # vLLM for the CPU sets the variable below to "spawn"
    if on_cpu or os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
        # a forked engine inherits the modules that the API server has imported
        patches.hide_flashinfer_without_nvcc()
        patches.fork_the_engine(_begin_engine, always=on_cpu)


def _begin_engine() -> None:
    _give_up_the_port()
    register()


def _give_up_the_port() -> None:
    """Close the API server's port, which a forked process inherits. If the engine kept the port
    open, a client that connects during the server's shutdown would wait until the engine ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        # one of the descriptors belonged to the listing of the directory, and is closed now
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    # The descriptor is replaced, not closed. This process has a copy of the
                    # server's socket object, which will later close the same descriptor number.
                    os.dup2(null, descriptor)
    os.close(null)
