"""`tandem memory`: from a job's events, attempt by attempt, to tables."""

from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from tandem.cli import memory
from tandem.client.memory import KINDS, by_attempt
from tandem.spool.schema import Event

MIB = 2**20
A, B = "GPU-aaaa", "GPU-bbbb"


def held(allocated: int, **more: int) -> dict[str, int]:
    """Bytes of a phase from MiB; kinds that aren't named are told apart by a small number each."""
    mib = dict(zip(KINDS, (allocated, allocated + 1, allocated + 500, 0, allocated + 2), strict=True)) | more
    return {kind: size * MIB for kind, size in mib.items()}


def rank(number: int, uuid: str = A, *, steps: bool = True) -> dict[str, Any]:
    """What rank `number` tells: its `build` is 100 + number MiB, and so on."""
    phases = {"build": held(100 + number), "base_weights": held(200 + number, host_pinned=32)}
    highest = {}
    if steps:
        phases |= {"optimizer": held(300 + number), "checkpoint": held(400 + number)}
        highest = {"optimizer": held(350 + number)}
    return {"uuid": uuid, "phases": phases, "highest": highest}


def events(*told: tuple[str, int, dict[str, Any]]) -> list[Event]:
    return [
        Event.model_validate_json(
            Event(seq=i, time=0, job="j", type=kind, attempt=attempt, data=data).model_dump_json()
        )
        for i, (kind, attempt, data) in enumerate(told)
    ]


def ranks(*, steps: bool) -> dict[str, Any]:
    return {"0": rank(0, A, steps=steps), "1": rank(1, B, steps=steps)}


STEP = {"metrics": {"loss": 1.0, "seconds_optimizer": 2.0} | {
    f"memory_optimizer_{kind}_bytes": float(size) for kind, size in held(320).items()
}}  # fmt: skip
LOADED = [
    ("claimed", 1, {"runner": "r"}),
    ("started", 1, {"device": "cuda:0"}),
    ("loaded", 1, {"seconds": {"build": 1.0}, "memory": ranks(steps=False)}),
]
RELEASED = {
    "processes": 0, "before": {A: 900 * MIB, B: 901 * MIB}, "memory": ranks(steps=True), "bytes": 3 * MIB,
    "devices": {A: 0, B: 3 * MIB}, "seconds": 0.5,
}  # fmt: skip
DONE = [*LOADED, ("step", 1, STEP), ("checkpoint", 1, {"step": 1}), ("released", 1, RELEASED), ("succeeded", 1, {})]


def printed(*told: tuple[str, int, dict[str, Any]]) -> list[list[str]]:
    """The words of each line, cells apart."""
    file = io.StringIO()
    console = Console(width=150, file=file)
    console.print(memory.report("j", by_attempt(events(*told))))
    lines = file.getvalue().splitlines()
    return [[cell.strip() for cell in re.split("[│┃]", line.strip(" │┃"))] for line in lines]


def row(phase: str, number: object, allocated: int, pinned: str = "0 B") -> list[str]:
    sizes = (f"{allocated + more:.1f} MiB" for more in (0, 1, 500, 2))
    first, second, third, peak = sizes
    return [phase, str(number), first, second, third, pinned, peak]


def test_every_phase_and_rank_then_what_was_left() -> None:
    lines = printed(*DONE)
    heads = [line for line in lines if line[:1] in (["phase"], ["GPU"])]
    assert heads == [
        ["phase", "rank", "allocated", "reserved", "device used", "host pinned", "peak"],
        ["GPU", "ranks", "most in use", "left"],
    ]
    cells = [line for line in lines if len(line) in (4, 7) and line not in heads and "─" not in line[0]]
    assert cells == [
        row("build", 0, 100), row("build", 1, 101),
        row("base_weights", 0, 200, "32.0 MiB"), row("base_weights", 1, 201, "32.0 MiB"),
        row("optimizer, last", 0, 300), row("optimizer, last", 1, 301),
        row("optimizer, highest", 0, 350), row("optimizer, highest", 1, 351),
        row("checkpoint", 0, 400), row("checkpoint", 1, 401),
        [A, "0", "900.0 MiB", "0 B"], [B, "1", "901.0 MiB", "3.0 MiB"],
    ]  # fmt: skip
    assert lines[0] == ["Memory of job j, attempt 1"]


def test_a_running_job_shows_what_is_known_so_far() -> None:
    assert printed(*LOADED[:1])[0] == ["Memory of job j, attempt 1, so far"]
    lines = printed(*LOADED, ("step", 1, STEP))
    assert lines[0] == ["Memory of job j, attempt 1, so far"]
    assert row("build", 1, 101) in lines
    assert row("optimizer, last", "fullest", 320) in lines
    assert not any("left" in line[0] for line in lines if line)
    assert printed() == [["Job j has not started."]]


def test_attempts_are_kept_apart() -> None:
    died = RELEASED | {"memory": {"1": rank(1, B, steps=False)}, "devices": {A: None, B: 0}, "processes": 2}
    again = [(kind, 2, data) for kind, _, data in DONE]
    told = by_attempt(events(*LOADED, ("released", 1, died), ("requeued", 1, {}), *again))
    assert [(attempt.attempt, attempt.released, attempt.processes) for attempt in told] == [(1, True, 2), (2, True, 0)]
    first, second = told
    assert first.ranks.keys() == {0, 1}  # the one that left no sign of life is known from before
    assert "checkpoint" not in first.ranks[0].phases
    assert first.left == {A: None, B: 0}
    assert second.ranks[1].phases["checkpoint"]["allocated"] == 401 * MIB
    lines = printed(*LOADED, ("released", 1, died), ("requeued", 1, {}), *again)
    titles = [line[0] for line in lines if line and line[0].startswith("Memory of")]
    assert titles == ["Memory of job j, attempt 1", "Memory of job j, attempt 2"]
    assert [A, "0", "900.0 MiB", "not measured"] in lines
    assert ["2 processes of the job survived SIGKILL."] in lines


def test_on_the_cpu_it_is_the_resident_set_and_says_so() -> None:
    cpu = {"0": rank(0, "cpu")}
    released = {"processes": 0, "before": {}, "memory": cpu, "bytes": 0, "devices": {}, "seconds": 0.0}
    lines = printed(("claimed", 1, {}), ("started", 1, {"device": "cpu"}), ("released", 1, released))
    assert ["phase", "rank", "resident set", "peak"] in lines
    assert ["build", "0", "100.0 MiB", "102.0 MiB"] in lines
    assert any("On the CPU: each rank's resident set." in line[0] for line in lines if line)
    assert not any("Left on the device" in line[0] for line in lines if line)
