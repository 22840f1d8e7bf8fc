"""A fake GPU that is a directory. Each file `<who>.<pid>` contains the MiB that a process uses, as
long as this process lives. The file also contains the start time of the process, because a busy
machine soon gives the same pid to another process.

A process that asks for more memory than is free gets an out-of-memory error.
"""

import os
from pathlib import Path

import fake_nvml
from fake_nvml import FakeNvml
from tandem.system import processes

TOTAL, AWAKE, ASLEEP, RANK = 80_000, 68_000, 900, 30_000
"""MiB of the device, of a vLLM that is awake, of a vLLM that sleeps, and of a rank. The device has
no room for a rank beside a vLLM that is awake."""
UUID = "GPU-aaaa1111"


def install(directory: Path) -> tuple[Path, FakeNvml]:
    """Creates a fake GPU. Returns the GPU's directory, and a fake driver. The fake driver reports
    the sum of the memory that processes use."""
    gpu = directory / "gpu"
    gpu.mkdir()
    return gpu, FakeNvml(directory, fake_nvml.gpu(UUID, memory_of=str(gpu)))


def living(gpu: Path) -> dict[int, int]:
    """Pid -> MiB in use, for each living process."""
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
    """Sets the memory that this process uses in all. If the memory doesn't fit, writes a line to
    the journal and raises MemoryError."""
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
