"""Collects the GPUs' memory, load, temperature, power and errors from the driver."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

from tandem.metrics.collector import Collector
from tandem.metrics.metric import BOTH, OPEN, Metric, Samples
from tandem.system.nvml import Driver, DriverFailed, Gpu

_THROTTLE_REASONS = {
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
}
_GPU = {"uuid": OPEN}
_INFO = ("index", "name", "driver_version", "cuda_version", "pci_bus_id", "mig_profile")
_measured = partial(Metric, exporters=BOTH, labels=_GPU, perishable=True)
_total = partial(Metric, kind="counter", exporters=BOTH, labels=_GPU)
METRICS = (
    _measured(
        "tandem_gpu_info",
        "Always 1; the labels describe the device. Each MIG device has its own UUID.",
        "NVML",
        labels=_GPU | dict.fromkeys(_INFO, OPEN),
    ),
    _measured(
        "tandem_gpu_memory_total_bytes",
        "Total memory of the device in bytes.",
        "nvmlDeviceGetMemoryInfo v2",
    ),
    _measured(
        "tandem_gpu_memory_free_bytes",
        "Free memory of the device in bytes.",
        "nvmlDeviceGetMemoryInfo v2",
    ),
    _measured(
        "tandem_gpu_memory_reserved_bytes",
        "Memory of the device in bytes that the driver reserves for itself.",
        "nvmlDeviceGetMemoryInfo v2",
    ),
    _measured(
        "tandem_gpu_memory_used_bytes",
        "Bytes of the device's memory in use by all processes, including other containers' "
        "processes: total - free - reserved.",
        "nvmlDeviceGetMemoryInfo v2",
    ),
    _measured(
        "tandem_gpu_compute_processes",
        "Number of processes that use the device for computing. Only processes that the driver "
        "shows to this container are counted.",
        "nvmlDeviceGetComputeRunningProcesses",
    ),
    _measured(
        "tandem_gpu_utilization_ratio",
        "Share of the driver's last sample period in which a kernel ran, 0 to 1; absent for MIG "
        "devices.",
        "nvmlDeviceGetUtilizationRates",
    ),
    _measured(
        "tandem_gpu_temperature_celsius",
        "Temperature of the GPU in degrees Celsius.",
        "nvmlDeviceGetTemperatureV",
    ),
    _total(
        "tandem_gpu_energy_joules_total",
        "Energy in joules that the GPU has used since the driver was loaded; rate() gives watts.",
        "nvmlDeviceGetTotalEnergyConsumption",
    ),
    _measured(
        "tandem_gpu_power_limit_watts",
        "Largest power in watts that the GPU may draw.",
        "nvmlDeviceGetEnforcedPowerLimit",
    ),
    _measured(
        "tandem_gpu_throttle_active",
        "1 while the GPU's clocks are reduced for the label's reason, else 0.",
        "nvmlDeviceGetCurrentClocksEventReasons",
        labels=_GPU | {"reason": tuple(_THROTTLE_REASONS)},
    ),
    _total(
        "tandem_gpu_ecc_uncorrected_errors_total",
        "Uncorrected ECC errors of the GPU's memory since the driver was loaded.",
        "nvmlDeviceGetTotalEccErrors",
    ),
)


class NvmlCollector(Collector):
    """`selected`: indices, UUIDs or beginnings of UUIDs of the GPUs to measure; empty: all GPUs."""

    name = "nvml"
    metrics = METRICS

    def __init__(
        self, device: Literal["auto", "cpu", "cuda"], selected: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._device = device
        self._selected = tuple(selected)
        # NVML stays open after a successful collection, because without persistence mode the driver
        # drops a GPU's state when no process has the GPU open.
        self._driver: Driver | None = None
        self._seen = False  # whether a GPU has ever been found

    def collect(self, gauges: Samples) -> None:
        if self._device == "cpu":
            return
        if self._driver is None:
            self._driver = Driver()
        measured = 0
        try:
            if self._driver.nvml is None and (self._device == "cuda" or self._seen):
                raise DriverFailed("there is no NVIDIA driver")
            gpus, self.errors = self._driver.gpus()
            for gpu in gpus:
                if not self._selected or any(gpu.has_name(name) for name in self._selected):
                    measured += 1
                    with self.part(f"GPU {gpu.uuid}"):
                        self._measure(self._driver, gpu, gauges)
            if self._selected and not measured and self._driver.nvml is not None:
                self.errors.append(f"none of the GPUs {', '.join(self._selected)} is here")
            self._seen = self._seen or measured > 0
        finally:
            if self.errors or not measured:
                # The next collection opens NVML again, because a driver that was reloaded answers
                # only new clients.
                self._driver.close()
                self._driver = None

    def _measure(self, driver: Driver, gpu: Gpu, gauges: Samples) -> None:
        """Measures a device. A MIG device has its own memory and processes; other values come from
        the whole GPU."""
        nvml, ask = driver.nvml, driver.ask
        self._describe(driver, gpu, gauges)

        def gauge(name: str, value: float | None, unit: float = 1, /, **labels: str) -> None:
            if value is not None:
                gauges.set(name, value / unit, uuid=gpu.uuid, **labels)

        for part, size in (driver.memory(gpu.handle) or {}).items():
            gauge(f"tandem_gpu_memory_{part}_bytes", size)
        processes = ask("nvmlDeviceGetComputeRunningProcesses", gpu.handle)
        gauge("tandem_gpu_compute_processes", None if processes is None else len(processes))
        utilization = None if gpu.is_mig else ask("nvmlDeviceGetUtilizationRates", gpu.handle)
        gauge("tandem_gpu_utilization_ratio", utilization and utilization.gpu, 100)
        temperature = ask("nvmlDeviceGetTemperatureV", gpu.whole, nvml.NVML_TEMPERATURE_GPU)
        if temperature is None:  # older drivers lack nvmlDeviceGetTemperatureV
            temperature = ask("nvmlDeviceGetTemperature", gpu.whole, nvml.NVML_TEMPERATURE_GPU)
        gauge("tandem_gpu_temperature_celsius", temperature)
        gauge(
            "tandem_gpu_power_limit_watts", ask("nvmlDeviceGetEnforcedPowerLimit", gpu.whole), 1000
        )
        if (reasons := ask("nvmlDeviceGetCurrentClocksEventReasons", gpu.whole)) is not None:
            for reason, bit in _THROTTLE_REASONS.items():
                gauge(
                    "tandem_gpu_throttle_active", bool(reasons & getattr(nvml, bit)), reason=reason
                )
        if (energy := ask("nvmlDeviceGetTotalEnergyConsumption", gpu.whole)) is not None:
            self.counts.set("tandem_gpu_energy_joules_total", energy / 1000, uuid=gpu.uuid)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if (errors := ask("nvmlDeviceGetTotalEccErrors", gpu.whole, *kinds)) is not None:
            self.counts.set("tandem_gpu_ecc_uncorrected_errors_total", errors, uuid=gpu.uuid)

    def _describe(self, driver: Driver, gpu: Gpu, gauges: Samples) -> None:
        name = str(driver.ask("nvmlDeviceGetName", gpu.handle) or "")
        pci = driver.ask("nvmlDeviceGetPciInfo", gpu.whole)
        bus = "" if pci is None else pci.busId
        cuda = driver.ask("nvmlSystemGetCudaDriverVersion_v2")
        gauges.set(
            "tandem_gpu_info",
            1,
            uuid=gpu.uuid,
            index=gpu.index,
            name=name,
            driver_version=str(driver.ask("nvmlSystemGetDriverVersion") or ""),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            pci_bus_id=bus if isinstance(bus, str) else bus.decode(),
            mig_profile=name.rpartition(" ")[2] if gpu.is_mig else "",
        )
