"""`tandem memory`."""

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from tandem.cli.common import JobArgument, Json, connect, show, size, table
from tandem.client import AttemptMemory
from tandem.client.memory import KINDS

_GPU_COLUMNS = dict(zip(KINDS, ("allocated#", "reserved#", "device used#", "host pinned#", "peak#"), strict=True))
_CPU_COLUMNS = {"allocated": "resident set#", "peak": "peak#"}


def memory(job: JobArgument, json: Json = False) -> None:
    """Show the memory of each rank of a job after each phase, and what was left on the GPUs after its end."""
    show(connect().memory(job), json, lambda attempts: report(job, attempts))


def report(job: str, attempts: list[AttemptMemory]) -> object:
    """The tables of all attempts."""
    if not attempts:
        return f"Job {job} has not started."
    return Group(*(part for attempt in attempts for part in _attempt(job, attempt)))


def _attempt(job: str, attempt: AttemptMemory) -> Iterator[Table | str]:
    on_cpu = attempt.device == "cpu"
    columns = _CPU_COLUMNS if on_cpu else _GPU_COLUMNS
    so_far = "" if attempt.released else ", so far"
    rows = [(phase, rank, *(size(kinds.get(kind)) for kind in columns)) for phase, rank, kinds in _rows(attempt)]
    title = f"Memory of job {job}, attempt {attempt.attempt}{so_far}"
    phases = table(title, ["phase", "rank#", *columns.values()], rows)
    if on_cpu:
        phases.caption = "On the CPU: each rank's resident set. Nothing can be left on a device."
        phases.caption_justify = "left"
    yield phases
    if not attempt.released:
        return
    if not on_cpu:
        left = []
        for uuid in attempt.most | attempt.left:
            ranks = ", ".join(str(rank) for rank, memory in attempt.ranks.items() if memory.uuid == uuid)
            left.append((uuid, ranks, size(attempt.most.get(uuid)), size(attempt.left.get(uuid)) or "not measured"))
        yield table("Left on the device after the end", ["GPU", "ranks", "most in use#", "left#"], left)
    if attempt.processes:
        yield f"{attempt.processes} processes of the job survived SIGKILL."


def _rows(attempt: AttemptMemory) -> Iterator[tuple[str, object, dict[str, int]]]:
    """(phase, rank, bytes), in the order of the phases and within them of the ranks.

    A phase that each step repeats has two rows per rank: its last end, and the highest of all its ends.
    """
    ranks = attempt.ranks.items()
    for phase in dict.fromkeys(phase for memory in attempt.ranks.values() for phase in memory.phases):
        repeated = any(phase in memory.highest for memory in attempt.ranks.values())
        for rank, memory in ranks:
            if phase in memory.phases:
                yield f"{phase}, last" if repeated else phase, rank, memory.phases[phase]
        for rank, memory in ranks:
            if phase in memory.highest:
                yield f"{phase}, highest", rank, memory.highest[phase]
    for phase, kinds in attempt.last_step.items():
        yield f"{phase}, last", "fullest", kinds
