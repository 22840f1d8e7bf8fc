"""What a job's events tell about memory, put together attempt by attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field

from tandem.spool.schema import Event, RankMemory
from tandem.system.gpus import beyond

KINDS = ("allocated", "reserved", "device_used", "host_pinned", "peak")
"""Of the bytes in `RankMemory`."""


class AttemptMemory(BaseModel):
    """Memory of one attempt, in bytes, as far as its events have come."""

    attempt: int
    device: str | None = None  # "cpu", "cuda:0", ...; None: the ranks have not met yet
    ranks: dict[int, RankMemory] = Field(default_factory=dict)
    last_step: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Phase -> bytes, each the largest over the ranks, for phases of the last optimizer step that `ranks` lacks."""
    released: bool = False  # the ranks are gone; without it nothing is known of `most` and `left`
    processes: int = 0  # that survived
    most: dict[str, int] = Field(default_factory=dict)  # UUID -> most in use while the ranks ran, by anybody
    left: dict[str, int | None] = Field(default_factory=dict)  # UUID -> in use afterwards; None: could not be measured


def by_attempt(events: Iterable[Event]) -> list[AttemptMemory]:
    """One for each attempt that began, oldest first. Events of older versions, which tell less, are understood."""
    found: dict[int, AttemptMemory] = {}
    for event in events:
        data = event.data
        if event.type == "claimed":
            found[event.attempt] = AttemptMemory(attempt=event.attempt)
        now = found.get(event.attempt)
        if now is None:
            continue
        if event.type == "started":
            now.device = data.get("device")
        elif event.type == "step":
            now.last_step = _flat(data.get("metrics") or {}, "memory_", "_bytes")
        elif event.type == "loaded":
            now.ranks = _ranks(data.get("memory") or {})
        elif event.type == "released":
            # A rank that left no sign of life after `loaded` is still known from there.
            now.ranks = dict(sorted((now.ranks | _ranks(data.get("memory") or {})).items()))
            now.released, now.processes = True, data.get("processes") or 0
            now.most, now.left = data.get("before") or {}, beyond(data.get("devices") or {}, data.get("floor") or {})
    for now in found.values():
        told = {phase for memory in now.ranks.values() for phase in memory.phases}
        now.last_step = {phase: kinds for phase, kinds in now.last_step.items() if phase not in told}
    return list(found.values())


def _ranks(memory: Mapping[str, Any]) -> dict[int, RankMemory]:
    if any(isinstance(value, int) for value in memory.values()):
        return {0: RankMemory(phases=_flat(memory))}  # as it was once: "<phase>_<kind>", of rank 0 only
    return {int(rank): RankMemory.model_validate(told) for rank, told in memory.items()}


def _flat(values: Mapping[str, Any], before: str = "", after: str = "") -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes, from names like `<before><phase>_<kind><after>`."""
    found: dict[str, dict[str, int]] = {}
    for name, value in values.items():
        for kind in KINDS:
            ending = f"_{kind}{after}"
            if name.startswith(before) and name.endswith(ending) and value is not None:
                found.setdefault(name.removeprefix(before).removesuffix(ending), {})[kind] = int(value)
    return found
