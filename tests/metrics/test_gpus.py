"""NVML's answers become series; an answer that a device does not support gives no series."""

import pytest

import fake_nvml
from fake_nvml import pynvml
from metrics.metric_tools import Exported
from tandem.metrics.gpus import NvmlCollector

GIB = 2**30


def h200(uuid: str, **more) -> dict:
    return fake_nvml.gpu(uuid, 40 * GIB) | {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetPciInfo": {"busId": "00000000:19:00.0"},
        "nvmlDeviceGetComputeRunningProcesses": [4711],
        "nvmlDeviceGetUtilizationRates": {"gpu": 37, "memory": 12},
        "nvmlDeviceGetTemperatureV": 61,
        "nvmlDeviceGetTotalEnergyConsumption": 5_000_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetCurrentClocksEventReasons": pynvml.real.nvmlClocksEventReasonSwPowerCap | 1,
        "nvmlDeviceGetTotalEccErrors": 2,
        **more,
    }


def test_everything_a_device_reports_has_its_uuid(nvml):
    nvml.set(h200("GPU-a"), h200("GPU-b"))
    seen = Exported(NvmlCollector("cuda")).collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 1
    info = {
        "uuid": "GPU-a",
        "index": "0",
        "name": "NVIDIA H200",
        "driver_version": "580.95.05",
        "cuda_version": "13.1",
        "pci_bus_id": "00000000:19:00.0",
        "mig_profile": "",
    }
    assert seen.get("tandem_gpu_info", **info) == 1
    for part, size in {"total": 100, "free": 59, "reserved": 1, "used": 40}.items():
        assert seen.get(f"tandem_gpu_memory_{part}_bytes", uuid="GPU-a") == size * GIB
    seen.check(
        {"uuid": "GPU-b"},
        gpu_utilization_ratio=0.37,
        gpu_temperature_celsius=61,
        gpu_power_limit_watts=700,
        gpu_energy_joules_total=5000.5,
        gpu_compute_processes=1,
        gpu_ecc_uncorrected_errors_total=2,
    )
    throttled = {"hw_thermal": 0, "sw_thermal": 0, "hw_power_brake": 0, "sw_power_cap": 1}
    assert seen.by("reason", "tandem_gpu_throttle_active") == throttled


def test_an_answer_that_is_not_supported_is_left_out_and_no_failure(nvml):
    nvml.set({"nvmlDeviceGetUUID": "GPU-a", "nvmlDeviceGetTemperature": 55})
    seen = Exported(NvmlCollector("cuda")).collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 1
    assert {labels["uuid"] for labels in seen.all("tandem_gpu_info")} == {"GPU-a"}
    names = {name for name in seen.names if name.startswith("tandem_gpu_")}
    # Older drivers have another function for this value.
    assert names == {"tandem_gpu_info", "tandem_gpu_temperature_celsius"}


@pytest.mark.parametrize(
    ("selected", "expected"),
    [((), {"GPU-a", "GPU-b"}), (("1",), {"GPU-b"}), (("GPU-a",), {"GPU-a"})],
)
def test_only_the_roles_own_devices_are_measured(nvml, selected, expected):
    nvml.set(h200("GPU-a"), h200("GPU-b"))
    seen = Exported(NvmlCollector("cuda", selected)).collect()
    assert seen.by("uuid", "tandem_gpu_memory_used_bytes").keys() == expected


def test_mig_devices_have_their_own_uuids_and_memory(nvml):
    migs = [
        fake_nvml.gpu(
            f"MIG-{n}",
            7 * GIB,
            nvmlDeviceGetName="NVIDIA H200 MIG 1g.18gb",
            nvmlDeviceGetUtilizationRates={"gpu": 1, "memory": 1},
        )
        for n in (1, 2)
    ]
    nvml.set(
        h200("GPU-a", nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, migs=migs)
    )
    seen = Exported(NvmlCollector("cuda")).collect()
    infos = {labels["uuid"]: labels for labels in seen.all("tandem_gpu_info")}
    assert infos.keys() == {"MIG-1", "MIG-2"}
    assert (infos["MIG-2"]["index"], infos["MIG-2"]["mig_profile"]) == ("0:1", "1g.18gb")
    assert seen.get("tandem_gpu_memory_used_bytes", uuid="MIG-1") == 7 * GIB
    # A MIG device has the temperature of its whole GPU.
    assert seen.get("tandem_gpu_temperature_celsius", uuid="MIG-1") == 61
    assert not seen.all("tandem_gpu_utilization_ratio")


def test_a_lost_device_is_a_failure_and_the_others_are_measured(nvml):
    nvml.set(h200("GPU-a", lost=True), h200("GPU-b"))
    before = pynvml.inits
    exported = Exported(NvmlCollector("cuda"))
    seen = exported.collect()
    assert seen.get("tandem_collector_success", collector="nvml") == 0
    assert seen.by("uuid", "tandem_gpu_memory_used_bytes").keys() == {"GPU-b"}
    nvml.set(h200("GPU-a"), h200("GPU-b"))
    for _ in range(2):
        seen = exported.collect()
        assert seen.get("tandem_collector_success", collector="nvml") == 1
        assert len(seen.all("tandem_gpu_memory_used_bytes")) == 2
    # NVML is initialised again after the failure, because a reloaded driver needs a new
    # initialisation. After the second initialisation NVML stays open.
    assert pynvml.inits - before == 2


def test_a_machine_without_a_driver_is_fine_unless_there_was_one(nvml):
    absent = {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    nvml.set(**absent)
    exported = Exported(NvmlCollector("auto"))
    assert exported.works("nvml")
    nvml.set(h200("GPU-a"))
    assert exported.works("nvml")
    nvml.set(nvmlDeviceGetCount=pynvml.NVML_ERROR_UNKNOWN)  # the driver stops answering
    assert not exported.works("nvml")
    nvml.set(**absent)  # and is gone
    assert not exported.works("nvml")
    assert not Exported(NvmlCollector("cuda")).works("nvml")
    assert Exported(NvmlCollector("cpu")).works("nvml")
    nvml.set(h200("GPU-a"))
    # The settings name a device that the machine does not have.
    assert not Exported(NvmlCollector("auto", ("GPU-z",))).works("nvml")
