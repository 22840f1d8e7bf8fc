"""By which path NCCL can go between the trainer's GPUs and vLLM's, as far as it can be told from one container.

Measured (docs/operations.md): NVLink needs both sides' GPUs visible on both sides, one NCCL_HOSTID, one /dev/shm and
one network. Where one of the first two is missing it is TCP, 60 times slower; the others can't be seen from here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.system.gpus import Devices, Side

_TIMEOUT_SECONDS = 20.0
_HOW = {
    "PIX": "one PCIe bridge",
    "PXB": "PCIe bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe within a NUMA node",
    "SYS": "PCIe between CPU sockets",
}


def describe(settings: Settings, side: Side) -> str | None:
    """One line for the log of `side`'s container; None without GPUs, or where it can't be told."""
    other: Side = "inference" if side == "trainer" else "trainer"
    names = settings.inference_devices if other == "inference" else settings.trainer_devices
    try:
        own = Devices(settings, side)
    except InvalidInput:
        return None  # who needs the devices says what is wrong
    if not own.uuids:
        return None
    try:
        theirs = set(Devices(settings, other).uuids) - set(own.uuids) if names else set()
    except InvalidInput:
        theirs = set()  # named, but not here
    missing = [] if theirs else [f"the GPUs of {other} are not visible here"]
    if not os.environ.get("NCCL_HOSTID"):
        missing.append("NCCL_HOSTID is not set")
    if missing:
        why = " and ".join(missing)
        return f"NCCL to {other} would go over TCP: {why}; docker-compose.nvlink.yml has what NVLink needs"
    links = topology()
    between = {links.get((a, b), "unknown") for a in own.uuids for b in theirs}
    # The slowest link of a ring is what counts.
    slow = sorted(_HOW.get(link, link) for link in between if not re.fullmatch(r"NV\d+", link))
    how = " or ".join(slow) if slow else f"NVLink ({', '.join(sorted(between))})"
    return f"NCCL to {other} goes by {how}, where both containers share network and /dev/shm"


def topology() -> dict[tuple[str, str], str]:
    """(UUID, UUID) -> NV18, PIX, PXB, PHB, NODE or SYS, both ways; empty where nvidia-smi doesn't tell."""
    uuids = dict(re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", _ask("-L"), re.MULTILINE))
    header, *rows = re.sub(r"\x1b\[\d*m", "", _ask("topo", "-m")).splitlines() or [""]
    columns = [word.strip() for word in header.split("\t")][1:]
    found = {}
    for row in rows:
        name, *cells = [word.strip() for word in row.split("\t")]
        for column, cell in zip(columns, cells, strict=False):
            pair = tuple(uuids.get(gpu.removeprefix("GPU")) for gpu in (name, column) if gpu.startswith("GPU"))
            if len(pair) == 2 and pair[0] and pair[1] and cell != "X":
                found[pair[0], pair[1]] = cell
    return found


def _ask(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
