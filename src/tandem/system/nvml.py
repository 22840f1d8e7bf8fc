"""The only module that asks the NVIDIA driver about GPUs. The module uses NVML through the package
nvidia-ml-py. NVML creates no CUDA context.

A machine without nvidia-ml-py, the driver's library or the driver counts as a machine without GPUs.
Every other failure raises DriverFailed, so that a failing driver never looks like a machine without
GPUs.

GPUs are identified by UUID, because an index starts at 0 in each container. The pids that NVML
reports are the host's pids, also in a container. NVML's first call starts a thread that waits for
driver events and outlives `close`. NVML's thread takes none of Python's locks, so `subprocess` may
still fork afterwards.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tandem.errors import TandemError

# Errors that only mean that the driver, the GPU or the container does not support a feature. Errors
# about unsupported features are not failures of the driver.
_NO_ANSWER = (
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "FUNCTION_NOT_FOUND",
    "ARGUMENT_VERSION_MISMATCH",
    "NOT_FOUND",
    "INVALID_ARGUMENT",
)


class DriverFailed(TandemError):
    """The NVIDIA driver is installed but does not answer, or a GPU has failed."""

    code = "gpu_driver_failed"


@dataclass(frozen=True)
class Gpu:
    """A GPU, or one MIG device of a GPU that is divided into MIG devices."""

    index: str  # such as "0", or "0:1" for the second MIG device of GPU 0
    uuid: str
    handle: Any
    whole: Any  # the handle of the whole GPU
    whole_uuid: str

    @property
    def is_mig(self) -> bool:
        return self.uuid != self.whole_uuid

    def has_name(self, name: str) -> bool:
        """Whether `name` is the index of the whole GPU, or the beginning of a UUID. This may be the
        UUID of the device or of the whole GPU. CUDA also accepts the beginning of a UUID."""
        return name == self.index.partition(":")[0] or any(
            u.startswith(name) for u in (self.uuid, self.whole_uuid)
        )


class Driver:
    """An open connection to NVML. The constructor opens NVML and may raise DriverFailed; `close`
    closes NVML. Handles are valid until `close`. On a machine without a driver, `ask` always
    returns None."""

    def __init__(self) -> None:
        self.nvml: Any = None
        try:
            nvml: Any = import_module("pynvml")  # `pynvml` has no type annotations
            nvml.nvmlInit()
        except ModuleNotFoundError:
            return
        except nvml.NVMLError as error:
            if error.value in (
                nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
                nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            ):
                return
            raise DriverFailed(
                f"NVML does not start: {error}; check the driver with `nvidia-smi`"
            ) from error
        self.nvml = nvml

    def close(self) -> None:
        if self.nvml is not None:
            with suppress(self.nvml.NVMLError):
                self.nvml.nvmlShutdown()

    def ask(self, function: str, *arguments: Any, **options: Any) -> Any:
        """The answer of an NVML function; None if this driver, GPU or container does not support
        it. Raises DriverFailed.

        Args:
            function: the function's name in `pynvml`.
            arguments, options: the function's arguments.
        """
        if self.nvml is None:
            return None
        try:
            return getattr(self.nvml, function)(*arguments, **options)
        except self.nvml.NVMLError as error:
            if error.value in [getattr(self.nvml, f"NVML_ERROR_{name}") for name in _NO_ANSWER]:
                return None
            raise DriverFailed(f"{function}: {error}") from error

    def gpus(self) -> tuple[list[Gpu], list[str]]:
        """All GPUs (for a divided GPU its MIG devices), and one message for each GPU that does not
        answer."""
        gpus: list[Gpu] = []
        failures: list[str] = []
        for index in range(self.ask("nvmlDeviceGetCount") or 0):
            try:
                handle = self.ask("nvmlDeviceGetHandleByIndex", index)
                uuid = self.ask("nvmlDeviceGetUUID", handle)
                migs = [(mig, self.ask("nvmlDeviceGetUUID", mig)) for mig in self._migs(handle)]
            except DriverFailed as error:
                failures.append(f"GPU {index}: {error}")
                continue
            gpus += [
                Gpu(f"{index}:{n}", name, mig, handle, uuid) for n, (mig, name) in enumerate(migs)
            ]
            if not migs:
                gpus.append(Gpu(str(index), uuid, handle, handle, uuid))
        return gpus, failures

    def _migs(self, handle: Any) -> Iterator[Any]:
        mode = self.ask("nvmlDeviceGetMigMode", handle)
        if mode and mode[0] == self.nvml.NVML_DEVICE_MIG_ENABLE:
            for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
                if (
                    mig := self.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
                ) is not None:
                    yield mig

    def handle(self, uuid: str) -> Any:
        """The handle of a GPU or MIG device; None if it does not exist. Raises DriverFailed."""
        return self.ask("nvmlDeviceGetHandleByUUID", uuid)

    def has_nvlink(self, a: str, b: str) -> bool:
        """Whether two GPUs, given by UUID, can access each other's memory over NVLink. Raises
        DriverFailed."""
        over_nvlink = self.nvml.NVML_P2P_CAPS_INDEX_NVLINK
        status = self.ask("nvmlDeviceGetP2PStatus", self.handle(a), self.handle(b), over_nvlink)
        return bool(status == self.nvml.NVML_P2P_STATUS_OK)

    def memory(self, handle: Any) -> dict[str, int] | None:
        """The GPU's memory in bytes, with `total` = `free` + `reserved` + `used`; None if the GPU
        does not report its memory. Raises DriverFailed. The value of `used` equals the memory in
        use that nvidia-smi shows. It leaves out the driver's own reservation (600 MiB on an H200).
        Version 1 of NVML's call counts the reservation as used, so this method uses only version 2.
        """
        if handle is None:
            return None
        memory = self.ask("nvmlDeviceGetMemoryInfo", handle, version=self.nvml.nvmlMemory_v2)
        if memory is None:
            return None
        # Some drivers count the reserved memory in `used` even in version 2 of the call.
        used = max(memory.total - memory.free - memory.reserved, 0)
        return {
            "total": memory.total,
            "free": memory.free,
            "reserved": memory.reserved,
            "used": used,
        }
