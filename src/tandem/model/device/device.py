"""The device of this process. The only place that knows the CPU from CUDA.

Megatron-core asks `torch.cuda` for its device, streams and random state, and writes `device="cuda"` in factory calls.
On the CPU `activate` answers for the CPU, for the whole process, before any model is built; nothing else has to care.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils._device import _device_constructors

Kind = Literal["cpu", "cuda"]

_kind: Kind | None = None
_seen = False  # a GPU, by `choose`
_index = 0  # of the CUDA device among those that the process can see
_starting: threading.Thread | None = None
_started = False
_thread = threading.local()  # `ready`: the thread's current device is this one


def choose(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The device that a setting means: "auto" is CUDA where there is a usable GPU.

    A GPU that this process, or what it is forked from, has seen is not looked for again, which would take each rank 36
    ms: if it has gone, to start CUDA there says so.
    """
    global _seen
    if setting == "auto":
        _seen = _seen or torch.cuda.is_available()
        return "cuda" if _seen else "cpu"
    return setting


def activate(kind: Kind, local_rank: int = 0) -> torch.device:
    """Make `kind` this process's device: `cuda:<local_rank>` of what the process can see, or the CPU.

    CUDA takes a quarter of a second to start, half of one where two ranks start at a time. It does so in a thread, and
    whatever here needs it waits for that; until then process groups connect and the model is made.
    Once per process, before anything is built. Calling it again with the same kind is harmless.

    Raises:
        RuntimeError: called before with the other kind. That there is no such CUDA device is told by what waits for it.
    """
    global _kind, _index, _starting
    if _kind not in (None, kind):
        raise RuntimeError(f"this process runs on {_kind} already; start another one for {kind}")
    if kind == "cuda" and _kind is None:
        _index, _starting = local_rank, threading.Thread(target=_start_cuda, args=(local_rank,), daemon=True)
        _starting.start()
    elif _kind is None:
        _answer_for_the_cpu()
    _kind = kind
    return torch.device("cuda", _index) if kind == "cuda" else torch.device("cpu")


def _start_cuda(index: int) -> None:
    """Start the runtime and make the device's context, without the interpreter, which torch would keep to itself. What
    goes wrong here goes wrong again when torch does it, and then it says what."""
    with contextlib.suppress(OSError, AttributeError):
        _runtime().cudaSetDevice(index)


def started() -> bool:
    """Whether anything has waited for the device yet. Before that this process has nothing on it."""
    return _active() == "cpu" or _started


def device() -> torch.device:
    """The device that `activate` chose."""
    return torch.device("cuda", _index) if _ready() == "cuda" else torch.device("cpu")


def is_cuda() -> bool:
    """Whether `activate` chose a GPU."""
    return _active() == "cuda"


def backend() -> Literal["gloo", "cpu:gloo,cuda:nccl"]:
    """torch.distributed's backend for this device, of the default group and so of all others.

    NCCL's first collective in a group makes a communicator, which takes a part of a second, and device memory for as
    long as the process lives. With Gloo beside it, what is in host memory needs none, so that of the world, and of a
    lone rank's groups, none is made.
    """
    return "gloo" if _active() == "cpu" else "cpu:gloo,cuda:nccl"


def default_dtype() -> torch.dtype:
    """The dtype of base weights and activations where the settings say `auto`."""
    return torch.bfloat16 if _active() == "cuda" else torch.float32


def attention_kernel() -> Literal["flex", "sdpa"]:
    """The faster of `tandem.model.attention`'s two kernels here."""
    return "flex" if _active() == "cuda" else "sdpa"


def synchronize() -> None:
    """Wait until all work given to the device is done."""
    if started() and _ready() == "cuda":
        torch.cuda.synchronize()


def uuid() -> str:
    """The device's UUID as NVML has it; "cpu" on the CPU."""
    if _ready() == "cpu":
        return "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if _index < len(visible) and visible[_index].startswith("MIG-"):
        return visible[_index]
    return f"GPU-{torch.cuda.get_device_properties(_index).uuid}"


def memory_stats() -> dict[str, int]:
    """What this process's allocator says, without waiting for the device.

    Bytes now and, as `<name>_peak`, most since `reset_peaks`: `allocated`, `reserved`, `active`, `inactive_split`,
    `requested` (torch.cuda.memory_stats has their meanings); bytes of `host_pinned` memory; and counts since the
    process began: `alloc_retries`, `ooms`, `device_allocs`, `device_frees`. On the CPU only `allocated` and `reserved`,
    which are both the resident set.
    """
    if _ready() == "cpu":
        now, peak = _resident()
        return {"allocated": now, "reserved": now, "allocated_peak": peak, "reserved_peak": peak}
    stats = torch.cuda.memory_stats()
    found: dict[str, int] = {}
    for name in ("allocated", "reserved", "active", "inactive_split", "requested"):
        found[name] = stats.get(f"{name}_bytes.all.current", 0)
        found[f"{name}_peak"] = stats.get(f"{name}_bytes.all.peak", 0)
    found["host_pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    counts = ("alloc_retries", "num_alloc_retries"), ("ooms", "num_ooms"), ("device_allocs", "num_device_alloc")
    for name, key in (*counts, ("device_frees", "num_device_free")):
        found[name] = stats.get(key, 0)
    return found


def reset_peaks() -> None:
    """Let the peaks of `memory_stats` begin at what is in use now."""
    if _ready() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # where it is forbidden, peaks are those since the process began
            Path("/proc/self/clear_refs").write_text("5")


def release_cached() -> None:
    """Give back what the allocators keep for later: unused device memory and unused pinned host memory."""
    if _ready() == "cuda":
        release_workspaces()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # what torch.accelerator.empty_host_cache, where there is one, calls


def release_workspaces() -> None:
    """Let the allocator have what cuBLAS keeps of it; made again at the next matrix product."""
    if _ready() == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def staging(size: int, *, pinned: bool) -> Iterator[torch.Tensor]:
    """uint8 [size] of host memory to read files into, for as long as the block takes. `pinned`: for a GPU.

    In huge pages where the kernel has any: torch's own pinned memory is in small ones, which take three times as long
    to pin, and a seventh longer to read 16 GB through.
    """
    if not pinned:
        yield torch.empty(size, dtype=torch.uint8)
        return
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer, runtime = torch.frombuffer(memory, dtype=torch.uint8), torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0)))
    try:
        yield buffer
    finally:
        runtime.cudaHostUnregister(buffer.data_ptr())


class NotShared(RuntimeError):
    """The driver does not let this process have another's memory."""


Export = tuple[bytes, int]
"""CUDA's handle of an allocation (cudaIpcMemHandle_t), and a byte in it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def exported(tensor: torch.Tensor) -> Export | None:
    """What other processes of this machine need for `imported`: the first byte of `tensor`, whose memory must stay as
    long. None where memory can't be shared, as with the allocator's `expandable_segments`."""
    if _ready() == "cpu":
        return None
    handle, base, address = _Handle(), ctypes.c_uint64(), ctypes.c_uint64(tensor.data_ptr())
    try:
        _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), address))
    except NotShared:
        return None
    if ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(ctypes.byref(base), None, address):
        return None
    return bytes(handle), address.value - base.value


@contextlib.contextmanager
def imported(export: Export | None) -> Iterator[Callable[[torch.Tensor, int], None]]:
    """`copy(tensor, at)`: fill a contiguous tensor from byte `at` on of what another process has `exported`; the copy
    is queued. On leaving the block, when it should have been made, the other's memory is let go. Raises NotShared."""
    _ready()
    if export is None:
        raise NotShared("the other process can't share it")
    handle, begin = export
    pointer, runtime = ctypes.c_void_p(), _runtime()
    lazily = 1  # cudaIpcMemLazyEnablePeerAccess: from this process's device, without a context on the other's
    _check(runtime.cudaIpcOpenMemHandle(ctypes.byref(pointer), _Handle.from_buffer_copy(handle), lazily))

    def copy(tensor: torch.Tensor, at: int) -> None:
        source, target = ctypes.c_void_p((pointer.value or 0) + begin + at), ctypes.c_void_p(tensor.data_ptr())
        _check(runtime.cudaMemcpyAsync(target, source, ctypes.c_size_t(tensor.nbytes), 3, None))  # device to device

    try:
        yield copy
    finally:
        _check(runtime.cudaIpcCloseMemHandle(pointer))


def _runtime() -> ctypes.CDLL:
    """CUDA's runtime, the one that torch has loaded. Its calls leave the interpreter to others."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")


def _check(code: int) -> None:
    if code:
        _runtime().cudaGetLastError()  # else torch would find it at its next call
        raise NotShared(f"CUDA error {code}")


def bound[**P, T](work: Callable[P, T]) -> Callable[P, T]:
    """`work` for another thread, on this process's device: a thread begins with the first that there is."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        _ready()
        return work(*args, **kwargs)

    return run


def allocated() -> int:
    """`memory_stats()["allocated"]`, alone."""
    return torch.cuda.memory_allocated() if _ready() == "cuda" else _resident()[0]


def used() -> int:
    """Bytes in use on the whole device, by anybody."""
    if _ready() == "cuda":
        free, total = torch.cuda.mem_get_info()
        return total - free
    return (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


def _resident() -> tuple[int, int]:
    """This process's resident set, and its largest since the last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return found["VmRSS"], found.get("VmHWM", found["VmRSS"])


def _active() -> Kind:
    if _kind is None:
        raise RuntimeError("no device yet: call tandem.model.device.device.activate first")
    return _kind


def _ready() -> Kind:
    """`_active()`, when it has started; it is then the calling thread's current one."""
    global _started
    if (kind := _active()) == "cuda" and not getattr(_thread, "ready", False):
        if _starting is not None:
            _starting.join()
        try:
            # torch 2.11 asks NVML eight times as it starts, 3 ms each.
            torch.cuda._cached_device_count = torch._C._cuda_getDeviceCount()
            torch.cuda.set_device(_index)
        except RuntimeError as error:
            raise RuntimeError(f"GPU {_index} of those that this process sees can't be used: {error}") from error
        _thread.ready = _started = True
    return kind


class _Immediate:
    """A CUDA stream or event for a device that has only one queue and has always finished it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = wait

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Immediate()

    def elapsed_time(self, _: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _same_stream(_: Any) -> Iterator[None]:
    yield


def _answer_for_the_cpu() -> None:
    cpu, only = torch.device("cpu"), _Immediate()
    # Each name gets an answer of its own: torch.compile refuses a torch in which two names are one object.
    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "current_stream": lambda *_, **__: only,
        "Stream": type("Stream", (_Immediate,), {}),
        "Event": type("Event", (_Immediate,), {}),
        "stream": _same_stream,
        "synchronize": lambda *_, **__: None,
        # The CPU has one generator, which every caller saves and restores beside CUDA's.
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # `with torch.device(...)` knows factories by identity, from a set made at first use: let it know the real ones.
    _device_constructors()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))

    from tandem.model.mcore import random  # after the answers: imports may ask already

    random._get_cuda_rng_state = torch.cuda.get_rng_state
    random._set_cuda_rng_state = torch.cuda.set_rng_state


def _on_the_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`factory` with `device="cuda"` read as the CPU."""

    @functools.wraps(factory)
    def made_here(*args: Any, **kwargs: Any) -> torch.Tensor:
        where = kwargs.get("device")
        if where is not None and torch.device(where).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made_here
