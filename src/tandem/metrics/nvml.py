"""The collector of GPU metrics: memory, load, temperature, power and errors, as the driver reports them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from tandem.metrics.catalogue import THROTTLE_REASONS, CollectorName
from tandem.metrics.collector import Collector, PartlyFailed
from tandem.metrics.samples import Gauges
from tandem.system.nvml import Driver, DriverFailed, Gpu

_EVENT_REASONS = {
    "hw_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "sw_thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
}


class NvmlCollector(Collector):
    """`selected`: indices or UUIDs (or their beginnings) of the GPUs to measure; empty: all that there are."""

    name: ClassVar[CollectorName] = "nvml"

    def __init__(self, device: Literal["auto", "cpu", "cuda"], selected: Sequence[str] = ()) -> None:
        super().__init__()
        self._device = device
        self._selected = tuple(selected)
        # It stays open between collections: without persistence mode a GPU that no process has open loses its state.
        self._driver: Driver | None = None
        self._seen = False  # whether there ever was a GPU

    def collect(self, gauges: Gauges) -> None:
        if self._device == "cpu":
            return
        if self._driver is None:
            self._driver = Driver()
        measured = 0
        failures: list[str] = []
        try:
            if self._driver.nvml is None and (self._device == "cuda" or self._seen):
                raise DriverFailed("there is no NVIDIA driver")
            gpus, failures = self._driver.gpus()
            for gpu in gpus:
                if not self._selected or any(gpu.has_name(name) for name in self._selected):
                    measured += 1
                    try:
                        self._measure(self._driver, gpu, gauges)
                    except DriverFailed as error:
                        failures.append(f"GPU {gpu.uuid}: {error}")
            if self._selected and not measured and self._driver.nvml is not None:
                failures.append(f"none of the GPUs {', '.join(self._selected)} is here")
            if failures:
                raise PartlyFailed(*failures)
            self._seen = self._seen or measured > 0
        finally:
            if failures or not measured:
                # The next collection opens it again: a driver that was reloaded answers only then.
                self._driver.close()
                self._driver = None

    def _measure(self, driver: Driver, gpu: Gpu, gauges: Gauges) -> None:
        """A MIG device has memory and processes of its own, and shares the rest with its whole GPU."""
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
        if temperature is None:  # an older driver
            temperature = ask("nvmlDeviceGetTemperature", gpu.whole, nvml.NVML_TEMPERATURE_GPU)
        gauge("tandem_gpu_temperature_celsius", temperature)
        gauge("tandem_gpu_power_limit_watts", ask("nvmlDeviceGetEnforcedPowerLimit", gpu.whole), 1000)
        if (reasons := ask("nvmlDeviceGetCurrentClocksEventReasons", gpu.whole)) is not None:
            for reason in THROTTLE_REASONS:
                active = bool(reasons & getattr(nvml, _EVENT_REASONS[reason]))
                gauge("tandem_gpu_throttle_active", active, reason=reason)
        if (energy := ask("nvmlDeviceGetTotalEnergyConsumption", gpu.whole)) is not None:
            self.counts.set("tandem_gpu_energy_joules_total", energy / 1000, uuid=gpu.uuid)
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        if (errors := ask("nvmlDeviceGetTotalEccErrors", gpu.whole, *kinds)) is not None:
            self.counts.set("tandem_gpu_ecc_uncorrected_errors_total", errors, uuid=gpu.uuid)

    def _describe(self, driver: Driver, gpu: Gpu, gauges: Gauges) -> None:
        name = str(driver.ask("nvmlDeviceGetName", gpu.handle) or "")
        pci = driver.ask("nvmlDeviceGetPciInfo", gpu.whole)
        bus = "" if pci is None else pci.busId
        cuda = driver.ask("nvmlSystemGetCudaDriverVersion_v2")
        gauges.set(
            "tandem_gpu_info", 1, uuid=gpu.uuid, index=gpu.index, name=name,
            driver_version=str(driver.ask("nvmlSystemGetDriverVersion") or ""),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            pci_bus_id=bus if isinstance(bus, str) else bus.decode(),
            mig_profile=name.rpartition(" ")[2] if gpu.is_mig else "",
        )  # fmt: skip
