"""The GPUs that the trainer or vLLM uses, and whether they are free. Tandem asks the driver about
the GPUs, and does not ask the processes that use the GPUs.

On a machine without GPUs there are no devices, and "free" means that all of Tandem's processes have
ended.
"""

import os
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Literal

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError
from tandem.system.logs import Log
from tandem.system.nvml import Driver, DriverFailed, Gpu

log = Log("gpus")

STAYING_BYTES = 8 * 2**30
"""The most bytes that a trainer's resident ranks may keep on a device that vLLM uses too, for CUDA
contexts and NCCL's buffers."""

Side = Literal["trainer", "inference"]


class Devices:
    """The GPUs of one side, trainer or inference: the GPUs that TANDEM_<SIDE>_DEVICES names. If
    TANDEM_<SIDE>_DEVICES is not set, the side uses the GPUs that CUDA_VISIBLE_DEVICES names. If
    CUDA_VISIBLE_DEVICES is not set either, the side uses all GPUs."""

    def __init__(self, settings: Settings, side: Side, most: int | None = None) -> None:
        """Raises InvalidInput if the settings name GPUs that this machine does not have. Raises
        DriverFailed if the driver does not list its GPUs.

        Args:
            most: use only the first `most` devices.
        """
        self.uuids: tuple[str, ...] = ()
        self.free_bytes = settings.free_gpu_bytes
        self._failure = ""
        if settings.device == "cpu":
            return
        with closing(Driver()) as driver:
            gpus, failures = driver.gpus()
        if gpus or failures:
            self.uuids = _selected(settings, side, gpus, failures)[:most]
            return
        names = ", ".join(getattr(settings, f"{side}_devices"))
        # Without the error below, TANDEM_DEVICE=auto would silently choose the CPU although GPUs
        # are named.
        if settings.device == "cuda" or names:
            message = "NVML finds no GPU; give the container one, or set TANDEM_DEVICE=cpu"
            raise InvalidInput(
                f"names {names}; {message}" if names else message,
                field=f"TANDEM_{side.upper()}_DEVICES" if names else "TANDEM_DEVICE",
            )

    def smallest(self) -> int:
        """The smallest device's memory in bytes; 0 if there is no device, or if the driver does not
        report the memory."""
        with suppress(TandemError), closing(Driver()) as driver:
            memory = [driver.memory(driver.handle(uuid)) for uuid in self.uuids]
            return min((sizes["total"] for sizes in memory if sizes), default=0)
        return 0

    def used(self) -> dict[str, int | None]:
        """For each device's UUID, the bytes that any processes use; None for a device that does not
        answer."""
        if not self.uuids:
            return {}
        used: dict[str, int | None] = dict.fromkeys(self.uuids)
        failures = []
        try:
            with closing(Driver()) as driver:
                for uuid in self.uuids:
                    try:
                        used[uuid] = (driver.memory(driver.handle(uuid)) or {}).get("used")
                    except DriverFailed as error:
                        failures.append(f"{uuid}: {error}")
        except DriverFailed as error:
            failures.append(str(error))
        failure = "; ".join(failures)
        if failure and failure != self._failure:
            log.error("can't measure the memory in use", error=failure)
        self._failure = failure
        return used

    def busy(self, floor: Mapping[str, int]) -> dict[str, int | None]:
        """The devices that are not free or do not answer, each with its bytes in use. `floor`: for
        each UUID, the bytes that may stay in use."""
        return self.over(self.used(), floor)

    def wait_free(self, timeout: float, floor: Mapping[str, int]) -> dict[str, int | None]:
        """Waits until every device is free, for at most `timeout` seconds. A device's memory
        becomes free a little after the device's processes have ended. Returns the last result of
        `used`."""
        end = time.monotonic() + timeout
        while self.over(used := self.used(), floor) and time.monotonic() <= end:
            time.sleep(0.2)
        return used

    def over(
        self, used: Mapping[str, int | None], floor: Mapping[str, int]
    ) -> dict[str, int | None]:
        """The devices of `used` that are not free or do not answer. A device is not free if at
        least `free_bytes` are in use above the device's floor."""
        left = beyond(used, floor)
        return {
            uuid: used[uuid]
            for uuid, size in left.items()
            if size is None or size >= self.free_bytes
        }


def check_apart(settings: Settings) -> None:
    """Raises InvalidInput if TANDEM_GPU_MODE=dedicated but trainer and vLLM would use the same GPU
    of this machine. Jobs would wait for ever for a GPU that vLLM uses. Raises no error if the
    driver does not answer."""
    if settings.gpu_mode == "shared":
        return
    with suppress(DriverFailed):
        trainer = Devices(settings, "trainer")
        most = settings.local_replicas * settings.inference_tensor_parallel
        inference = Devices(settings, "inference", most=most)
        if both := ", ".join(uuid for uuid in trainer.uuids if uuid in inference.uuids):
            raise InvalidInput(
                f"dedicated, but trainer and vLLM would both use {both}; set TANDEM_TRAINER_DEVICES"
                " and TANDEM_INFERENCE_DEVICES to different GPUs, or TANDEM_GPU_MODE=shared",
                field="TANDEM_GPU_MODE",
            )


def beyond(used: Mapping[str, int | None], floor: Mapping[str, int]) -> dict[str, int | None]:
    """For each device's UUID, the bytes in use above the device's `floor`; None for a device that
    does not answer."""
    return {
        uuid: None if size is None else max(size - floor.get(uuid, 0), 0)
        for uuid, size in used.items()
    }


def _selected(
    settings: Settings, side: Side, gpus: list[Gpu], failures: list[str]
) -> tuple[str, ...]:
    names: list[str] = getattr(settings, f"{side}_devices")
    field = f"TANDEM_{side.upper()}_DEVICES"
    if not names and (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        field = "CUDA_VISIBLE_DEVICES"
        if not visible and settings.device == "cuda":
            raise InvalidInput(
                "empty, which hides every GPU; unset it, or set TANDEM_DEVICE=cpu", field=field
            )
        if not visible:
            return ()
        names = visible.split(",")
    if not names:
        if failures:
            raise DriverFailed("; ".join(failures))
        return tuple(gpu.uuid for gpu in gpus)
    uuids = []
    for name in names:
        matches = [gpu.uuid for gpu in gpus if gpu.has_name(name)]
        if len(matches) != 1:
            known = ", ".join([f"{gpu.index} ({gpu.uuid})" for gpu in gpus] + failures)
            raise InvalidInput(f"{name!r} does not name one of the GPUs here: {known}", field=field)
        uuids.append(matches[0])
    return tuple(uuids)


def nccl_path(settings: Settings, side: Side) -> str | None:
    """One line for the log of `side`'s container: whether NCCL reaches the other side's GPUs over
    NVLink, PCIe or TCP. The line reports only what this container can see. Returns None if there
    are no GPUs, or if the driver does not answer. NVLink requires that all GPUs are visible on both
    sides, and that both sides share NCCL_HOSTID, /dev/shm and the network. If GPUs are not visible
    on both sides, or NCCL_HOSTID differs, NCCL uses TCP, which is 60 times slower
    (docs/operations.md). This function can't check whether both sides share /dev/shm and the
    network."""
    other: Side = "inference" if side == "trainer" else "trainer"
    theirs: set[str] = set()
    try:
        own = set(Devices(settings, side).uuids)
        if getattr(settings, f"{other}_devices"):
            with suppress(InvalidInput):  # this container lacks the other side's GPUs
                theirs = set(Devices(settings, other).uuids) - own
        with closing(Driver()) as driver:
            paths = {"NVLink" if driver.has_nvlink(a, b) else "PCIe" for a in own for b in theirs}
    except TandemError:
        return None  # the program that uses the devices reports the error
    if not own:
        return None
    missing = [] if theirs else [f"the GPUs of {other} are not visible here"]
    if not os.environ.get("NCCL_HOSTID"):
        missing.append("NCCL_HOSTID is not set")
    if missing:
        why = " and ".join(missing)
        return (
            f"NCCL to {other} would go over TCP: {why}; docker-compose.nvlink.yml has what NVLink"
            " needs"
        )
    return (
        f"NCCL to {other} goes by {' and '.join(sorted(paths))}, where both containers share"
        " network and /dev/shm"
    )
