"""GPUs: those of this machine, and those that the settings name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

from tandem.cli.checks import Check
from tandem.cli.output import size
from tandem.config import Settings
from tandem.system.nvml import Driver, DriverFailed


def device_checks(settings: Settings) -> Iterator[Check]:
    """Whether this machine has the device that the settings want."""
    gpus = _gpus()
    if settings.device == "cuda" and not gpus:
        yield Check("fail", "device", "TANDEM_DEVICE=cuda, but there is no GPU",
                    "install the driver, give the container its GPUs, or set TANDEM_DEVICE=cpu")  # fmt: skip
        return
    device = ("cuda" if gpus else "cpu") if settings.device == "auto" else settings.device
    dtype = ("bfloat16" if device == "cuda" else "float32") if settings.dtype == "auto" else settings.dtype
    needed = settings.trainer_ranks
    if device == "cuda" and needed > len(gpus):
        yield Check("fail", "device", f"{needed} trainer ranks, {len(gpus)} GPUs", "lower TANDEM_TRAINER_RANKS")
        return
    shown = f"; {', '.join(gpus)}" if device == "cuda" else f"; {os.cpu_count()} cores"
    yield Check("ok", "device", f"{device}, {dtype}{shown}")


def _gpus() -> list[str]:
    """Name and memory of each GPU. Raises DriverFailed."""
    with closing(Driver()) as driver:
        gpus, failures = driver.gpus()
        if failures:
            raise DriverFailed("; ".join(failures))
        memory = [driver.memory(gpu.handle) or {"total": 0} for gpu in gpus]
        names = [driver.ask("nvmlDeviceGetName", gpu.handle) for gpu in gpus]
    return [f"{name}, {size(sizes['total'])}" for name, sizes in zip(names, memory, strict=True)]


def gpu_checks(settings: Settings) -> Iterator[Check]:
    """Whether the settings name GPUs of their own for trainer and inference, or in shared mode the same, one for each
    process.

    Names are compared as written, without a GPU; the containers that use them check that they exist. The settings
    themselves refuse equal names, and unequal ones in shared mode.
    """
    if settings.device == "cpu":
        yield Check("ok", "GPUs", "none: TANDEM_DEVICE=cpu")
        return
    trainer, inference = settings.trainer_devices, settings.inference_devices
    names = [*trainer, *inference]
    if not trainer or not inference:
        remedy = "set TANDEM_TRAINER_DEVICES and TANDEM_INFERENCE_DEVICES"
        yield Check("fail", "GPUs", f"trainer has {trainer}, inference {inference}", remedy)
        return
    if len({name.isdigit() for name in names}) > 1:
        found = f"some are named by index, some by UUID ({', '.join(names)}), so two names may be one device"
        yield Check("fail", "GPUs", found, "name all by index, or all by UUID (`nvidia-smi -L`)")
        return
    # CUDA accepts the beginning of a UUID, so of two different names one may begin with the other.
    same = [(a, b) for a in trainer for b in inference if not a.isdigit() and (a.startswith(b) or b.startswith(a))]
    if same and settings.gpu_mode == "dedicated":
        found = f"trainer's {same[0][0]} and inference's {same[0][1]} may be one device"
        yield Check("fail", "GPUs", found, "write the UUIDs in full")
        return
    yield from _one_gpu_per_process("TRAINER", "TRAINER_RANKS", settings.trainer_ranks, trainer)
    yield from _one_gpu_per_process(
        "INFERENCE", "INFERENCE_TENSOR_PARALLEL", settings.inference_tensor_parallel, inference
    )
    if settings.gpu_mode == "shared":
        yield Check("ok", "GPUs", f"{', '.join(trainer)}, shared by trainer and inference")
    else:
        yield Check("ok", "GPUs", f"trainer {', '.join(trainer)}; inference {', '.join(inference)}")


def _one_gpu_per_process(role: str, variable: str, processes: int, names: list[str]) -> Iterator[Check]:
    devices = f"TANDEM_{role}_DEVICES={','.join(names)}"
    if len(set(names)) < len(names):
        yield Check("fail", "GPUs", f"{devices} names one twice", "name each once")
    if processes != len(names):
        found = f"TANDEM_{variable}={processes}, but {devices} names {len(names)}"
        yield Check("fail", "GPUs", found, "each process has one GPU: make the numbers equal")
