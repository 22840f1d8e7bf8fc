"""A GPU that is a directory: each file `<who>.<pid>` holds the MiB that a process uses for as long
as it lives. The file also contains the start time of the process, because a busy machine soon gives
the same pid to another process.

A process that asks for more than there is gets an out-of-memory error.
"""

import os
from pathlib import Path

import fake_nvml
from fake_nvml import FakeNvml
from tandem.system import processes

TOTAL, AWAKE, ASLEEP, RANK = 80_000, 68_000, 900, 30_000
"""MiB of the device, of a vLLM awake and asleep, and of a rank: a rank and a vLLM that is awake
don't fit."""
UUID = "GPU-aaaa1111"


def install(directory: Path) -> tuple[Path, FakeNvml]:
    """The GPU's directory, and the driver that adds up what processes use there."""
    gpu = directory / "gpu"
    gpu.mkdir()
    return gpu, FakeNvml(directory, fake_nvml.gpu(UUID, memory_of=str(gpu)))


def living(gpu: Path) -> dict[int, int]:
    """Pid -> MiB in use, of living processes."""
    found = {}
    for path in gpu.glob("*.[0-9]*"):
        pid, (mib, started) = int(path.suffix[1:]), map(int, path.read_text().split())
        if (process := processes.read_process(pid)) is not None and process.started == started:
            found[pid] = mib
    return found


def others(gpu: Path) -> int:
    """MiB in use by living processes other than this one."""
    return sum(mib for pid, mib in living(gpu).items() if pid != os.getpid())


def use(gpu: Path, who: str, mib: int) -> None:
    """Sets the memory that this process uses in all. If it doesn't fit, the journal records it and
    MemoryError is raised."""
    if (in_use := others(gpu)) + mib > TOTAL:
        tell(gpu, f"{who}: out of memory")
        raise MemoryError(f"CUDA Error: out of memory: {who} wants {mib} MiB, {in_use} are in use")
    own = processes.read_process(os.getpid())
    assert own is not None
    staged = gpu / f".{who}"
    staged.write_text(f"{mib} {own.started}\n")
    staged.replace(gpu / f"{who}.{os.getpid()}")


def tell(gpu: Path, what: str) -> None:
    """Writes a line to the journal, which shows the order of events."""
    with (gpu / "journal").open("a") as file:
        file.write(f"{what}\n")
