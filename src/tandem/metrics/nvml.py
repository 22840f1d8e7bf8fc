"""The devices as the driver sees them, through NVML: no CUDA context, and every answer optional.

Devices are known by UUID: an index restarts at 0 in each container, and the pids that NVML tells are the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, ClassVar, Literal

from tandem.metrics.catalogue import THROTTLE_REASONS, CollectorName
from tandem.metrics.collector import Collector, PartlyFailed
from tandem.metrics.samples import Gauges

_EVENT_REASONS = {
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
}
# What a driver, a device or a container may simply not have; anything else is a failure.
_ABSENT = ("NotSupported", "NoPermission", "FunctionNotFound", "ArgumentVersionMismatch", "NotFound", "InvalidArgument")


class NvmlCollector(Collector):
    """`selected`: indices or UUIDs (or their beginnings) of the devices to tell about; empty: all that there are."""

    name: ClassVar[CollectorName] = "nvml"

    def __init__(self, device: Literal["auto", "cpu", "cuda"], selected: Sequence[str] = (), nvml: Any = None) -> None:
        super().__init__()
        self._device = device
        self._selected = tuple(selected)
        self._nvml = nvml
        self._ready = False
        self._seen = False

    def collect(self, gauges: Gauges) -> None:
        if self._device == "cpu" or not self._open():
            return
        try:
            found, troubles = self._devices(gauges)
        except self._nvml.NVMLError:
            self._close()
            raise
        if troubles:
            self._close()
            raise PartlyFailed(*troubles)
        if self._selected and not found:
            raise PartlyFailed(f"none of the devices {', '.join(self._selected)} is here")
        self._seen = self._seen or found

    def _open(self) -> bool:
        """Whether there is a driver. None is fine on a machine without GPUs, unless there was one before."""
        if self._nvml is None:
            self._nvml = import_module("pynvml")  # late, and with a name of its own: it has no types
        if not self._ready:
            try:
                self._nvml.nvmlInit()
            except self._nvml.NVMLError as error:
                if _is(self._nvml, error, "LibraryNotFound") and self._device == "auto" and not self._seen:
                    return False
                raise
            self._ready = True
        return True

    def _close(self) -> None:
        """The next collection starts afresh: a driver that was reloaded answers only then."""
        self._ready = False
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def _devices(self, gauges: Gauges) -> tuple[bool, list[str]]:
        """Whether there was a device, and what went wrong with some."""
        nvml = self._nvml
        driver = str(self._ask(nvml.nvmlSystemGetDriverVersion) or "")
        cuda = self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        versions = {"driver_version": driver, "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""}
        found, troubles = False, []
        for index in range(nvml.nvmlDeviceGetCount()):
            uuid = ""
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                migs = list(self._migs(handle))
                for number, (device, name) in enumerate(migs or [(handle, uuid)]):
                    if self._wanted(str(index), uuid, name):
                        found = True
                        place = f"{index}:{number}" if migs else str(index)
                        self._tell(gauges, device, handle, name, place, versions)
            except nvml.NVMLError as error:
                troubles.append(f"device {uuid or index}: {error}")
        return found, troubles

    def _migs(self, handle: Any) -> Iterator[tuple[Any, str]]:
        """(handle, UUID) of the MIG devices, where the device is divided into some."""
        nvml = self._nvml
        mode = self._ask(nvml.nvmlDeviceGetMigMode, handle)
        if not mode or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for index in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            mig = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
            if mig is not None:
                yield mig, nvml.nvmlDeviceGetUUID(mig)

    def _wanted(self, index: str, *uuids: str) -> bool:
        return not self._selected or any(
            name == index or any(uuid.startswith(name) for uuid in uuids) for name in self._selected
        )

    def _tell(self, gauges: Gauges, device: Any, parent: Any, uuid: str, index: str, versions: dict[str, str]) -> None:
        """`parent` differs from `device` for a MIG device, which has memory and processes of its own but shares the
        rest."""
        nvml, ask = self._nvml, self._ask
        mig = device is not parent
        name = str(ask(nvml.nvmlDeviceGetName, device) or "")
        pci = ask(nvml.nvmlDeviceGetPciInfo, parent)
        bus = "" if pci is None else pci.busId
        gauges.set(
            "tandem_gpu_info", 1, uuid=uuid, index=index, name=name, **versions,
            pci_bus_id=bus if isinstance(bus, str) else bus.decode(),
            mig_profile=name.rpartition(" ")[2] if mig else "",
        )  # fmt: skip
        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2))
        if memory is not None:
            # What v2 calls used includes the reserved memory in some drivers; like this the three always add up.
            used = memory.total - memory.free - memory.reserved
            parts = {"total": memory.total, "free": memory.free, "reserved": memory.reserved, "used": max(used, 0)}
            for part, value in parts.items():
                gauges.set(f"tandem_gpu_memory_{part}_bytes", value, uuid=uuid)
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses, device)
        if processes is not None:
            gauges.set("tandem_gpu_compute_processes", len(processes), uuid=uuid)
        if not mig and (utilization := ask(nvml.nvmlDeviceGetUtilizationRates, device)) is not None:
            gauges.set("tandem_gpu_utilization_ratio", utilization.gpu / 100, uuid=uuid)
        temperature = ask(nvml.nvmlDeviceGetTemperatureV, parent, nvml.NVML_TEMPERATURE_GPU)
        if temperature is None:  # an older driver
            temperature = ask(nvml.nvmlDeviceGetTemperature, parent, nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            gauges.set("tandem_gpu_temperature_celsius", temperature, uuid=uuid)
        limit = ask(nvml.nvmlDeviceGetEnforcedPowerLimit, parent)
        if limit is not None:
            gauges.set("tandem_gpu_power_limit_watts", limit / 1000, uuid=uuid)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, parent)
        if reasons is not None:
            for reason in THROTTLE_REASONS:
                bit = getattr(nvml, _EVENT_REASONS[reason])
                gauges.set("tandem_gpu_throttle_active", float(bool(reasons & bit)), uuid=uuid, reason=reason)
        energy = ask(nvml.nvmlDeviceGetTotalEnergyConsumption, parent)
        if energy is not None:
            self.counts.set("tandem_gpu_energy_joules_total", energy / 1000, uuid=uuid)
        errors = ask(
            nvml.nvmlDeviceGetTotalEccErrors, parent, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors is not None:
            self.counts.set("tandem_gpu_ecc_uncorrected_errors_total", errors, uuid=uuid)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer; None where there is none to be had. Raises NVMLError for a device that is in trouble."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if any(_is(self._nvml, error, name) for name in _ABSENT):
                return None
            raise


def _is(nvml: Any, error: Exception, name: str) -> bool:
    return isinstance(error, getattr(nvml, f"NVMLError_{name}"))
