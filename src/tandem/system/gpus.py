"""GPUs as seen from outside the processes that use them: by UUID, through nvidia-smi, without a CUDA context.

An index restarts at 0 in each container and the pids NVML reports are the host's, so only UUIDs and bytes are used.
On a machine without GPUs there are no devices, and "free" means that no process of ours is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Literal, Self

from tandem.config import Settings
from tandem.errors import InvalidInput

MIB = 2**20
FREE_BYTES = 256 * MIB
"""A device with less than this in use is free: a CUDA context alone takes more, a driver's own bookkeeping less."""

STAYING_BYTES = 8 * 2**30
"""Most that a trainer's resident ranks may keep of a device that vLLM uses too: CUDA contexts, NCCL's buffers."""

NOTHING: Mapping[str, int] = MappingProxyType({})
"""The floor of devices on which nothing may stay."""
_TIMEOUT_SECONDS = 20.0
Side = Literal["trainer", "inference"]


class Devices:
    """The GPUs of one side: those that TANDEM_<SIDE>_DEVICES or else CUDA_VISIBLE_DEVICES names, or all."""

    def __init__(self, settings: Settings, side: Side) -> None:
        """Raises InvalidInput where the settings name devices that are not there."""
        self.uuids: tuple[str, ...] = ()
        if settings.device == "cpu":
            return
        found = _query()
        if not found:
            if settings.device == "cuda":
                raise InvalidInput(
                    "nvidia-smi finds no GPU; give the container one, or set TANDEM_DEVICE=cpu", field="TANDEM_DEVICE"
                )
            return
        self.uuids = _selected(settings, side, {index: uuid for index, uuid, _ in found})

    def first(self, count: int) -> Self:
        """Only the first `count` of them."""
        chosen = copy(self)
        chosen.uuids = self.uuids[:count]
        return chosen

    def used(self) -> dict[str, int | None]:
        """Bytes in use per UUID, whoever uses them; None where nvidia-smi doesn't tell."""
        if not self.uuids:
            return {}
        found = {uuid: used for _, uuid, used in _query()}
        return {uuid: found.get(uuid) for uuid in self.uuids}

    def busy(self, floor: Mapping[str, int] = NOTHING) -> dict[str, int | None]:
        """The devices that are not free, or can't be asked, as in `used`."""
        return over(self.used(), floor)

    def wait_free(self, timeout: float, floor: Mapping[str, int] = NOTHING) -> dict[str, int | None]:
        """`used` once every device is free, or after `timeout` seconds: the driver frees a dead process's memory a
        little after it is gone."""
        end = time.monotonic() + timeout
        while over(used := self.used(), floor) and time.monotonic() <= end:
            time.sleep(0.2)
        return used


def over(used: Mapping[str, int | None], floor: Mapping[str, int] = NOTHING) -> dict[str, int | None]:
    """Of `used`, the devices that are not free: FREE_BYTES or more beyond their floor, the bytes that may stay in use
    (of a vLLM that sleeps, of ranks that stay); or nobody tells."""
    return {uuid: size for uuid, size in used.items() if size is None or size >= floor.get(uuid, 0) + FREE_BYTES}


def beyond(used: Mapping[str, int | None], floor: Mapping[str, int]) -> dict[str, int | None]:
    """Bytes in use on each device beyond its floor; None where nobody tells."""
    return {uuid: None if size is None else max(size - floor.get(uuid, 0), 0) for uuid, size in used.items()}


def _selected(settings: Settings, side: Side, by_index: dict[str, str]) -> tuple[str, ...]:
    names = settings.trainer_devices if side == "trainer" else settings.inference_devices
    where = f"TANDEM_{side.upper()}_DEVICES"
    if not names and (visible := os.environ.get("CUDA_VISIBLE_DEVICES", "")):
        names, where = visible.split(","), "CUDA_VISIBLE_DEVICES"
    if not names:
        return tuple(by_index.values())
    uuids = []
    for name in names:
        # CUDA accepts a UUID's unambiguous beginning too.
        matches = [uuid for index, uuid in by_index.items() if name == index or uuid.startswith(name)]
        if len(matches) != 1:
            raise InvalidInput(f"{name!r} is none of the GPUs here, which are {by_index}", field=where)
        uuids.append(matches[0])
    return tuple(uuids)


def _query() -> list[tuple[str, str, int]]:
    """(index, UUID, bytes in use) of each GPU; empty without nvidia-smi, without a GPU, or when it doesn't answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in answer.splitlines() if line.count(", ") == 2)
    return [(index, uuid, int(used) * MIB) for index, uuid, used in rows if used.isdigit()]
