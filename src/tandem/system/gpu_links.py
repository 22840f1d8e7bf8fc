"""The path that NCCL can take between the trainer's GPUs and vLLM's, as far as one container can see it.

Measured (docs/operations.md): NVLink needs both sides' GPUs visible on both sides, one NCCL_HOSTID, one /dev/shm and
one network. Without either of the first two NCCL uses TCP, 60 times slower; the last two can't be seen from here.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError
from tandem.system.gpus import Devices, Side
from tandem.system.nvml import Driver


def describe(settings: Settings, side: Side) -> str | None:
    """One line for the log of `side`'s container; None without GPUs, or where the driver does not answer."""
    other: Side = "inference" if side == "trainer" else "trainer"
    try:
        own = set(Devices(settings, side).uuids)
        theirs = _visible(settings, other) - own if getattr(settings, f"{other}_devices") else set()
        with closing(Driver()) as driver:
            paths = {"NVLink" if driver.has_nvlink(a, b) else "PCIe" for a in own for b in theirs}
    except TandemError:
        return None  # the program that needs the devices reports the error
    if not own:
        return None
    missing = [] if theirs else [f"the GPUs of {other} are not visible here"]
    if not os.environ.get("NCCL_HOSTID"):
        missing.append("NCCL_HOSTID is not set")
    if missing:
        why = " and ".join(missing)
        return f"NCCL to {other} would go over TCP: {why}; docker-compose.nvlink.yml has what NVLink needs"
    return f"NCCL to {other} goes by {' and '.join(sorted(paths))}, where both containers share network and /dev/shm"


def _visible(settings: Settings, side: Side) -> set[str]:
    """The UUIDs of a side's GPUs; none where the settings name GPUs that this container does not have."""
    with suppress(InvalidInput):
        return set(Devices(settings, side).uuids)
    return set()
