"""`tandem memory`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.table import Table

from tandem.cli.jobs import JobArgument
from tandem.cli.output import PATIENCE, Json, show, size, table
from tandem.client import AttemptMemory, Tandem
from tandem.client.memory import KINDS

_GPU = dict(zip(KINDS, ("allocated#", "reserved#", "device used#", "host pinned#", "peak#"), strict=True))
_CPU = {"allocated": "resident set#", "peak": "peak#"}


def memory(job: JobArgument, json: Json = False) -> None:
    """What each rank of a job held after each phase, and what was left on the GPUs after its end."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.memory(job), json, lambda attempts: _report(job, attempts))


def _report(job: str, attempts: list[AttemptMemory]) -> object:
    if not attempts:
        return f"Job {job} has not begun."
    return Group(*(part for attempt in attempts for part in _attempt(job, attempt)))


def _attempt(job: str, attempt: AttemptMemory) -> Iterator[Table | str]:
    cpu = attempt.device == "cpu"
    columns = _CPU if cpu else _GPU
    so_far = "" if attempt.released else ", so far"
    made = table(f"Memory of job {job}, attempt {attempt.attempt}{so_far}", ["phase", "rank#", *columns.values()],
                 [(phase, rank, *(size(kinds.get(kind)) for kind in columns))
                  for phase, rank, kinds in _rows(attempt)])  # fmt: skip
    made.caption_justify = "left"
    if cpu:
        made.caption = "On the CPU: each rank's resident set. There is no device on which memory could be left."
    yield made
    if not attempt.released:
        return
    if not cpu:
        uuids = attempt.most | attempt.left
        ranks = {uuid: [str(r) for r, told in attempt.ranks.items() if told.uuid == uuid] for uuid in uuids}
        yield table("Left on the device after the end", ["GPU", "ranks", "most in use#", "left#"], [
            (uuid, ", ".join(ranks[uuid]), size(attempt.most.get(uuid)), size(attempt.left.get(uuid)) or "not measured")
            for uuid in uuids
        ])  # fmt: skip
    if attempt.processes:
        yield f"{attempt.processes} processes of the job survived SIGKILL."


def _rows(attempt: AttemptMemory) -> Iterator[tuple[str, object, dict[str, int]]]:
    """(phase, rank, bytes): phases as they came, ranks within them; a phase of every step as it last ended, then the
    highest of all steps."""
    for phase in dict.fromkeys(phase for told in attempt.ranks.values() for phase in told.phases):
        often = any(phase in told.highest for told in attempt.ranks.values())
        for rank, told in attempt.ranks.items():
            if phase in told.phases:
                yield f"{phase}, last" if often else phase, rank, told.phases[phase]
        for rank, told in attempt.ranks.items():
            if phase in told.highest:
                yield f"{phase}, highest", rank, told.highest[phase]
    for phase, kinds in attempt.last_step.items():
        yield f"{phase}, last", "fullest", kinds
