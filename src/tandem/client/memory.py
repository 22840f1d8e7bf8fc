"""The memory that a job's events report, attempt by attempt."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tandem.spool.schema import Event, RankMemory
from tandem.system.gpus import beyond

KINDS = ("allocated", "reserved", "device_used", "host_pinned", "peak")
"""The kinds of bytes in `RankMemory`."""


class AttemptMemory(BaseModel):
    """Memory of one attempt, in bytes, as far as its events report it."""

    attempt: int
    device: str | None = None  # "cpu", "cuda:0", ...; None until the ranks have started
    ranks: dict[int, RankMemory] = Field(default_factory=dict)
    last_step: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Phase -> kind -> bytes, the largest of all ranks: phases of the last optimizer step that `ranks` lacks."""
    released: bool = False  # the ranks have ended; until then `most` and `left` are empty
    processes: int = 0  # processes that survived SIGKILL
    most: dict[str, int] = Field(default_factory=dict)  # UUID -> most bytes in use, by any process, while ranks ran
    left: dict[str, int | None] = Field(default_factory=dict)  # UUID -> bytes left in use; None: not measured


def by_attempt(events: Iterable[Event]) -> list[AttemptMemory]:
    """The memory of each attempt that began, oldest first."""
    attempts: dict[int, dict[str, Mapping[str, Any]]] = {}  # number -> event's type -> data of the last such event
    for event in events:
        if event.type == "claimed":
            attempts[event.attempt] = {}
        if event.attempt in attempts:
            attempts[event.attempt][event.type] = event.data
    return [_memory(number, defaultdict(dict, found)) for number, found in attempts.items()]


def _memory(attempt: int, found: Mapping[str, Mapping[str, Any]]) -> AttemptMemory:
    released = found["released"]
    # A rank that wrote no heartbeat after `loaded` keeps what `loaded` reported.
    ranks = dict(sorted((_ranks(found["loaded"]) | _ranks(released)).items()))
    last_step = _step_memory(found["step"].get("metrics") or {})
    for phase in {phase for memory in ranks.values() for phase in memory.phases}:
        last_step.pop(phase, None)
    return AttemptMemory(
        attempt=attempt,
        device=found["started"].get("device"),
        ranks=ranks,
        last_step=last_step,
        released=bool(released),
        processes=released.get("processes") or 0,
        most=released.get("before") or {},
        left=beyond(released.get("devices") or {}, released.get("floor") or {}),
    )


def _ranks(data: Mapping[str, Any]) -> dict[int, RankMemory]:
    return {int(rank): RankMemory.model_validate(memory) for rank, memory in (data.get("memory") or {}).items()}


def _step_memory(metrics: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes, of the metrics named `memory_<phase>_<kind>_bytes`."""
    phases: dict[str, dict[str, int]] = {}
    for name, value in metrics.items():
        if value is not None and (match := re.fullmatch(rf"memory_(.+)_({'|'.join(KINDS)})_bytes", name)):
            phases.setdefault(match[1], {})[match[2]] = int(value)
    return phases
