"""What NVML says becomes series, and what it does not have becomes nothing; a stand-in at pynvml's boundary."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from metrics.metric_tools import rig
from tandem.metrics.nvml import NvmlCollector

GIB = 2**30


class FakeNvml:
    """pynvml's functions over a list of devices; anything may be made to raise. Constants and errors are the real."""

    def __init__(self, *devices: dict) -> None:
        self.devices = list(devices)
        self.raises: dict[str, Exception] = {}
        self.inits = 0

    def __getattr__(self, name: str):
        if not name.startswith("nvml") or not hasattr(pynvml, name) or not callable(getattr(pynvml, name)):
            return getattr(pynvml, name)
        return lambda *arguments, **more: self.call(name, *arguments, **more)

    def call(self, name: str, *arguments, **more):
        if name in self.raises:
            raise self.raises[name]
        if name == "nvmlInit":
            self.inits += 1
            return None
        if name == "nvmlShutdown":
            return None
        if name == "nvmlDeviceGetCount":
            return len(self.devices)
        if name == "nvmlDeviceGetHandleByIndex":
            return self.devices[arguments[0]]
        if name == "nvmlSystemGetDriverVersion":
            return "580.95.05"
        if name == "nvmlSystemGetCudaDriverVersion_v2":
            return 13010
        device = arguments[0]
        if "lost" in device and name != "nvmlDeviceGetUUID":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name == "nvmlDeviceGetMemoryInfo":
            assert more == {"version": pynvml.nvmlMemory_v2}
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            migs = device["migs"]
            if arguments[1] >= len(migs):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return migs[arguments[1]]
        if name not in device:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return device[name]


def h200(uuid: str, **more) -> dict:
    # As newer drivers have it, `used` holds the reserved memory too.
    memory = SimpleNamespace(total=141 * GIB, free=100 * GIB, reserved=1 * GIB, used=41 * GIB)
    return {
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:19:00.0"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetComputeRunningProcesses": [object()],
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=12),
        "nvmlDeviceGetTemperatureV": 61,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.nvmlClocksEventReasonSwPowerCap | 1,
        "nvmlDeviceGetTotalEccErrors": 2,
        **more,
    }


def test_everything_a_device_says_is_told_under_its_uuid():
    with rig(NvmlCollector("cuda", nvml=FakeNvml(h200("GPU-a"), h200("GPU-b")))) as made:
        seen = made.collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 1
    info = {
        "uuid": "GPU-a", "index": "0", "name": "NVIDIA H200", "driver_version": "580.95.05", "cuda_version": "13.1",
        "pci_bus_id": "00000000:19:00.0", "mig_profile": "",
    }  # fmt: skip
    assert seen.get("tandem_gpu_info", **info) == 1
    parts = {part: seen.get(f"tandem_gpu_memory_{part}_bytes", uuid="GPU-a") for part in
             ("total", "free", "reserved", "used")}  # fmt: skip
    assert parts == {"total": 141 * GIB, "free": 100 * GIB, "reserved": GIB, "used": 40 * GIB}
    assert seen.get("tandem_gpu_utilization_ratio", uuid="GPU-b") == 0.37
    assert seen.get("tandem_gpu_temperature_celsius", uuid="GPU-b") == 61
    assert seen.get("tandem_gpu_energy_joules_total", uuid="GPU-b") == 5000.5
    assert seen.get("tandem_gpu_power_limit_watts", uuid="GPU-b") == 700
    assert seen.get("tandem_gpu_compute_processes", uuid="GPU-b") == 1
    assert seen.get("tandem_gpu_ecc_uncorrected_errors_total", uuid="GPU-b") == 2
    throttled = {labels["reason"]: seen.get("tandem_gpu_throttle_active", **labels)
                 for labels in seen.all("tandem_gpu_throttle_active") if labels["uuid"] == "GPU-a"}  # fmt: skip
    assert throttled == {"hw_thermal": 0, "sw_thermal": 0, "hw_power_brake": 0, "sw_power_cap": 1}


def test_what_is_not_supported_is_left_out_and_no_failure():
    bare = {"nvmlDeviceGetUUID": "GPU-a"}
    with rig(NvmlCollector("cuda", nvml=FakeNvml(bare))) as made:
        seen = made.collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 1
    assert {labels["uuid"] for labels in seen.all("tandem_gpu_info")} == {"GPU-a"}
    assert {name for name, _ in seen.samples if name.startswith("tandem_gpu_")} == {"tandem_gpu_info"}


def test_an_older_driver_tells_the_temperature_the_older_way():
    device = h200("GPU-a", nvmlDeviceGetTemperature=55)
    del device["nvmlDeviceGetTemperatureV"]
    with rig(NvmlCollector("cuda", nvml=FakeNvml(device))) as made:
        assert made.collect().get("tandem_gpu_temperature_celsius", uuid="GPU-a") == 55


@pytest.mark.parametrize(
    ("selected", "expected"), [((), {"GPU-a", "GPU-b"}), (("1",), {"GPU-b"}), (("GPU-a",), {"GPU-a"})]
)
def test_only_the_roles_own_devices_are_told(selected, expected):
    with rig(NvmlCollector("cuda", selected, FakeNvml(h200("GPU-a"), h200("GPU-b")))) as made:
        seen = made.collect()
    assert {labels["uuid"] for labels in seen.all("tandem_gpu_memory_used_bytes")} == expected


def test_a_device_that_is_not_there_is_a_failure():
    with rig(NvmlCollector("auto", ("GPU-z",), FakeNvml(h200("GPU-a")))) as made:
        assert made.collect().get("tandem_collector_success", collector="nvml") == 0


def test_mig_devices_have_their_own_uuids_and_memory():
    memory = SimpleNamespace(total=18 * GIB, free=10 * GIB, reserved=GIB, used=8 * GIB)
    migs = [
        {"nvmlDeviceGetUUID": f"MIG-{n}", "nvmlDeviceGetName": "NVIDIA H200 MIG 1g.18gb",
         "nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=1, memory=1)}
        for n in (1, 2)
    ]  # fmt: skip
    parent = h200("GPU-a", nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, migs=migs)
    with rig(NvmlCollector("cuda", nvml=FakeNvml(parent))) as made:
        seen = made.collect()
    infos = {labels["uuid"]: labels for labels in seen.all("tandem_gpu_info")}
    assert infos.keys() == {"MIG-1", "MIG-2"}
    assert (infos["MIG-2"]["index"], infos["MIG-2"]["mig_profile"]) == ("0:1", "1g.18gb")
    assert seen.get("tandem_gpu_memory_used_bytes", uuid="MIG-1") == 7 * GIB
    assert seen.get("tandem_gpu_temperature_celsius", uuid="MIG-1") == 61  # shared with the parent
    assert not seen.all("tandem_gpu_utilization_ratio")


def test_a_lost_device_is_a_failure_and_the_others_are_told():
    nvml = FakeNvml(h200("GPU-a", lost=True), h200("GPU-b"))
    with rig(NvmlCollector("cuda", nvml=nvml)) as made:
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="nvml") == 0
        assert {labels["uuid"] for labels in seen.all("tandem_gpu_memory_used_bytes")} == {"GPU-b"}
        del nvml.devices[0]["lost"]
        seen = made.collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 1
    assert len(seen.all("tandem_gpu_memory_used_bytes")) == 2
    assert nvml.inits == 2  # afresh, as after a driver was reloaded


def test_a_machine_without_a_driver_is_fine_unless_there_was_one():
    nvml = FakeNvml(h200("GPU-a"))
    nvml.raises["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with rig(NvmlCollector("auto", nvml=nvml)) as made:
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="nvml") == 1
        assert not [name for name, _ in seen.samples if name.startswith("tandem_gpu_")]
        lost = nvml.raises.pop("nvmlInit")
        assert made.collect().get("tandem_collector_success", collector="nvml") == 1
        nvml.raises |= {"nvmlInit": lost, "nvmlDeviceGetCount": pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)}
        assert made.collect().get("tandem_collector_success", collector="nvml") == 0  # the driver stopped answering
        assert made.collect().get("tandem_collector_success", collector="nvml") == 0  # and is gone
    with rig(NvmlCollector("cuda", nvml=nvml)) as made:
        assert made.collect().get("tandem_collector_success", collector="nvml") == 0
    with rig(NvmlCollector("cpu", nvml=None)) as made:
        assert made.collect().get("tandem_collector_success", collector="nvml") == 1
