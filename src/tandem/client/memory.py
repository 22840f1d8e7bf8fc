"""Reads the memory that a job's events report, for each attempt of the job."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tandem.spool.schema import Event, RankMemory
from tandem.system.gpus import beyond

KINDS = ("allocated", "reserved", "device_used", "host_pinned", "peak")
"""The kinds of bytes in `RankMemory`."""


class AttemptMemory(BaseModel):
    """The memory of one attempt, in bytes, as far as the attempt's events report it."""

    attempt: int
    device: str | None = None  # "cpu", "cuda:0", ...; None until the ranks have started
    ranks: dict[int, RankMemory] = Field(default_factory=dict)
    last_step: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Phase -> kind -> bytes, the maximum over all ranks. `last_step` has the phases of the last
    optimizer step that are missing in `ranks`."""
    released: bool = False  # whether the ranks have ended; until then `most` and `left` are empty
    processes: int = 0  # number of processes that survived SIGKILL

    # UUID of a device -> the most bytes that all processes together used on the device while ranks
    # ran.
    most: dict[str, int] = Field(default_factory=dict)
    # UUID of a device -> bytes in use after the ranks ended, minus the bytes in use before the
    # ranks started; None: not measured.
    left: dict[str, int | None] = Field(default_factory=dict)


def by_attempt(events: Iterable[Event]) -> list[AttemptMemory]:
    """The memory of each attempt that began, oldest first."""
    attempts: dict[int, AttemptMemory] = {}
    for event in events:
        if event.type == "claimed":
            attempts[event.attempt] = AttemptMemory(attempt=event.attempt)
        if (attempt := attempts.get(event.attempt)) is None:
            continue
        data = event.data
        if event.type == "started":
            attempt.device = data.get("device")
        elif event.type == "step":
            attempt.last_step = _step_memory(data.get("metrics") or {})
        elif event.type in ("loaded", "released"):
            # A rank that wrote no heartbeat after the event `loaded` keeps the memory that `loaded`
            # reported.
            attempt.ranks = dict(sorted((attempt.ranks | _ranks(data)).items()))
        if event.type == "released":
            attempt.released, attempt.processes = True, data.get("processes") or 0
            attempt.most = data.get("before") or {}
            attempt.left = beyond(data.get("devices") or {}, data.get("floor") or {})
    for attempt in attempts.values():
        for phase in {phase for memory in attempt.ranks.values() for phase in memory.phases}:
            attempt.last_step.pop(phase, None)
    return list(attempts.values())


def _ranks(data: Mapping[str, Any]) -> dict[int, RankMemory]:
    return {
        int(rank): RankMemory.model_validate(memory)
        for rank, memory in (data.get("memory") or {}).items()
    }


def _step_memory(metrics: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes, from the metrics named `memory_<phase>_<kind>_bytes`."""
    phases: dict[str, dict[str, int]] = {}
    for name, value in metrics.items():
        if value is not None and (
            match := re.fullmatch(rf"memory_(.+)_({'|'.join(KINDS)})_bytes", name)
        ):
            phases.setdefault(match[1], {})[match[2]] = int(value)
    return phases
