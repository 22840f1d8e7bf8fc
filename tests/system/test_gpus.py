"""The tests read from NVML which GPUs the settings select, whether they are free, and how they are
connected."""

import pytest

from fake_nvml import MIB, gpu
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.system.gpus import Devices, check_apart, nccl_path
from tandem.system.nvml import DriverFailed

A, B, C = "GPU-aaaa1111", "GPU-bbbb2222", "GPU-bbcc3333"
USED = 70000 * MIB
GPU_IS_LOST, LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, TIMEOUT = 15, 12, 9, 10


@pytest.fixture
def three(nvml):
    nvml.set(gpu(A, 3 * MIB), gpu(B, USED), gpu(C))
    return nvml


def devices(*names: str, device: str = "cuda") -> Devices:
    return Devices(Settings(device=device, trainer_devices=list(names)), "trainer")


def test_devices_are_known_by_uuid(three, monkeypatch):
    assert devices().uuids == (A, B, C)
    assert devices("1", "GPU-aa").uuids == (B, A)
    with pytest.raises(InvalidInput, match="TANDEM_TRAINER_DEVICES: '7' does not name one"):
        devices("7")
    with pytest.raises(InvalidInput):
        devices("GPU-bb")  # two UUIDs begin with GPU-bb
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert devices().uuids == (C,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # an empty value means no GPUs, as for CUDA
    assert devices(device="auto").uuids == ()
    assert devices("1").uuids == (B,)
    with pytest.raises(InvalidInput, match="CUDA_VISIBLE_DEVICES: empty"):
        devices()


def test_a_mig_device_is_known_by_its_own_uuid_and_measured_by_itself(nvml):
    migs = [gpu("MIG-1", 5 * MIB), gpu("MIG-2", USED)]
    nvml.set(
        gpu(A, nvmlDeviceGetMigMode=[1, 1], nvmlDeviceGetMaxMigDeviceCount=7, migs=migs), gpu(B)
    )
    assert devices().uuids == ("MIG-1", "MIG-2", B)
    assert devices("MIG-2", "1").used() == {"MIG-2": USED, B: 0}
    with pytest.raises(InvalidInput, match="MIG-1"):
        devices("0")  # both MIG devices are on GPU 0


def test_in_use_and_not_answering_are_both_not_free(three, caplog):
    ours = devices("0", "1")
    assert ours.used() == {A: 3 * MIB, B: USED}
    assert list(ours.busy({})) == [B]
    three.set(gpu(A, 3 * MIB), gpu(B, lost=True))
    assert ours.busy({}) == {B: None}
    three.set(gpu(A), gpu(B), nvmlInit=TIMEOUT)
    assert ours.busy({}) == ours.busy({}) == {A: None, B: None}
    assert [record.fields["error"] for record in caplog.records if record.name == "gpus"] == [
        f"{B}: nvmlDeviceGetMemoryInfo: GPU is lost",
        "NVML does not start: Timeout; check the driver with `nvidia-smi`",
    ]


def test_a_gpu_for_both_is_refused_unless_it_is_shared(three):
    def sides(trainer: list[str], inference: list[str], **more: object) -> Settings:
        return Settings(device="cuda", trainer_devices=trainer, inference_devices=inference, **more)

    for trainer, inference in ([], []), ([], ["2"]), (["0"], []), (["GPU-aaaa1111"], ["0"]):
        with pytest.raises(InvalidInput, match=r"TANDEM_GPU_MODE: dedicated, but .* both use GPU-"):
            check_apart(sides(trainer, inference))
    check_apart(sides(["1", "2"], []))  # vLLM takes the first GPU
    check_apart(sides(["1"], ["0", "2"], inference_tensor_parallel=2))
    check_apart(sides([], [], gpu_mode="shared"))
    check_apart(Settings(device="cpu"))
    three.set(gpu(A), nvmlInit=TIMEOUT)
    check_apart(sides([], []))


def test_bytes_up_to_the_floor_are_no_trouble(three):
    ours = devices("0", "1")
    free = 256 * MIB
    assert ours.busy({B: USED - free}) == {B: USED}
    floor = {B: USED - free + 1}
    assert ours.busy(floor) == {}
    assert ours.wait_free(0, floor)[B] == USED
    three.set(nvmlInit=TIMEOUT)
    assert list(ours.busy(floor)) == [A, B]


def test_a_gpu_that_shows_a_desktop_is_free_up_to_what_the_setting_says(nvml):
    nvml.set(gpu(A, 900 * MIB))
    assert devices().busy({}) == {A: 900 * MIB}
    desktop = Devices(Settings(device="cuda", free_gpu_bytes=1000 * MIB), "trainer")
    assert desktop.busy({}) == {}
    nvml.set(gpu(A, 1000 * MIB))
    assert desktop.busy({}) == {A: 1000 * MIB}


@pytest.mark.parametrize(
    "raises", [{}, {"nvmlInit": LIBRARY_NOT_FOUND}, {"nvmlInit": DRIVER_NOT_LOADED}]
)
def test_a_machine_without_gpus_is_refused_only_where_one_is_asked_for(nvml, raises):
    nvml.set(**raises)
    with pytest.raises(InvalidInput, match="TANDEM_DEVICE"):
        devices()
    assert devices(device="auto").uuids == ()


def test_a_driver_in_trouble_is_never_a_machine_without_gpus(three):
    three.set(gpu(A), gpu(B, lost=True))
    assert devices("0", device="auto").uuids == (A,)
    with pytest.raises(InvalidInput, match=r"GPU 1: nvmlDeviceGetMigMode: GPU is lost"):
        devices("1", device="auto")
    with pytest.raises(DriverFailed, match="GPU is lost"):
        devices(device="auto")
    three.set(gpu(A), nvmlInit=TIMEOUT)
    with pytest.raises(DriverFailed, match="Timeout"):
        devices(device="auto")


def describe(trainer: str, inference: str, side: str = "trainer") -> str | None:
    return nccl_path(
        Settings(device="auto", trainer_devices=trainer, inference_devices=inference), side
    )


def test_the_path_of_nccl(nvml, monkeypatch):
    assert describe("", "") is None
    nvml.set(nvmlInit=TIMEOUT)
    assert describe("", "") is None
    nvml.set(gpu(A, nvlinks=[B]), gpu(B, nvlinks=[A]), gpu(C))
    monkeypatch.setenv("NCCL_HOSTID", "tandem")
    assert describe("0", "1").startswith("NCCL to inference goes by NVLink, ")
    assert describe("GPU-aa", "1", "inference").startswith("NCCL to trainer goes by NVLink, ")
    assert describe("0,1", "2").startswith("NCCL to inference goes by PCIe, ")
    for inference in ("", "7", "GPU-7777"):
        path = describe("0", inference)
        assert path.startswith(
            "NCCL to inference would go over TCP: the GPUs of inference are not visible here; "
        )
    monkeypatch.delenv("NCCL_HOSTID")
    assert describe("0", "1").startswith("NCCL to inference would go over TCP: NCCL_HOSTID is not")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_named_devices_on_a_machine_without_a_gpu_are_refused(nvml, device) -> None:
    nvml.set()
    settings = Settings(device=device, inference_devices=["1"])
    with pytest.raises(
        InvalidInput, match=r"names 1; NVML finds no GPU; .* TANDEM_DEVICE=cpu"
    ) as no:
        Devices(settings, "inference")
    assert no.value.field == "TANDEM_INFERENCE_DEVICES"
    assert Devices(Settings(device="auto"), "inference").uuids == ()
    assert Devices(Settings(device="cpu", inference_devices=["1"]), "inference").uuids == ()
