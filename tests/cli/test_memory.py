"""`tandem memory` makes tables of each attempt's memory from a job's events."""

import io
import re
from typing import Any

from rich.console import Console

from tandem.cli.jobs import memory_report
from tandem.client import AttemptMemory
from tandem.client.memory import KINDS, by_attempt
from tandem.spool.schema import Event

MIB = 2**20
A, B = "GPU-aaaa", "GPU-bbbb"


def sizes(allocated: int, pinned: int = 0) -> dict[str, int]:
    """For each kind of memory, the bytes in a phase. Every kind has a different value. `allocated`
    and `pinned` are in MiB."""
    mib = (allocated, allocated + 1, allocated + 500, pinned, allocated + 2)
    return {kind: size * MIB for kind, size in zip(KINDS, mib, strict=True)}


def rank(number: int, uuid: str) -> dict[str, Any]:
    """The memory that rank `number` reports at its end. The rank has 100 + `number` MiB allocated
    after `build`, and other amounts in later phases."""
    phases = {"build": sizes(100 + number), "optimizer": sizes(300 + number, pinned=32)}
    return {"uuid": uuid, "phases": phases, "highest": {"optimizer": sizes(350 + number)}}


def attempts(*events: tuple[str, int, dict[str, Any]]) -> list[AttemptMemory]:
    """Builds the memory of each attempt from events, each given as (type, attempt, data)."""
    return by_attempt(
        Event(seq=seq, time=0, job="j", type=kind, attempt=attempt, data=data)
        for seq, (kind, attempt, data) in enumerate(events)
    )


LOADED = {
    str(n): {"uuid": uuid, "phases": {"build": sizes(100 + n)}, "highest": {}}
    for n, uuid in enumerate((A, B))
}
METRICS = {f"memory_optimizer_{kind}_bytes": float(size) for kind, size in sizes(320).items()}
RUNNING = [
    ("claimed", 1, {"runner": "r"}),
    ("started", 1, {"device": "cuda:0"}),
    ("loaded", 1, {"seconds": {"build": 1.0}, "memory": LOADED}),
    ("step", 1, {"metrics": {"loss": 1.0, "seconds_optimizer": 2.0} | METRICS}),
]
RELEASED = {
    "processes": 0,
    "before": {A: 900 * MIB, B: 901 * MIB},
    "memory": {"0": rank(0, A), "1": rank(1, B)},
    "devices": {A: 0, B: 3 * MIB},
    "bytes": 3 * MIB,
    "seconds": 0.5,
}
DONE = [*RUNNING, ("released", 1, RELEASED), ("succeeded", 1, {})]


def printed(*events: tuple[str, int, dict[str, Any]]) -> list[list[str]]:
    """The words of each printed line, cell by cell."""
    file = io.StringIO()
    Console(width=150, file=file).print(memory_report("j", attempts(*events)))
    lines = file.getvalue().splitlines()
    return [[cell.strip() for cell in re.split("[│┃]", line.strip(" │┃"))] for line in lines]


def row(phase: str, number: object, allocated: int, pinned: str = "0 B") -> list[str]:
    first, second, third, peak = (f"{allocated + more:.1f} MiB" for more in (0, 1, 500, 2))
    return [phase, str(number), first, second, third, pinned, peak]


def test_a_job_that_runs_and_its_end() -> None:
    assert printed() == [["Job j has not started."]]
    lines = printed(*RUNNING)
    assert lines[0] == ["Memory of job j, attempt 1, so far"]
    assert [cells for cells in lines if len(cells) == 7][1:] == [
        row("build", 0, 100),
        row("build", 1, 101),
        row("optimizer, last", "fullest", 320),
    ]
    lines = printed(*DONE)
    assert lines[0] == ["Memory of job j, attempt 1"]
    assert [cells for cells in lines if len(cells) in (4, 7) and "─" not in cells[0]] == [
        ["phase", "rank", "allocated", "reserved", "device used", "host pinned", "peak"],
        row("build", 0, 100),
        row("build", 1, 101),
        row("optimizer, last", 0, 300, "32.0 MiB"),
        row("optimizer, last", 1, 301, "32.0 MiB"),
        row("optimizer, highest", 0, 350),
        row("optimizer, highest", 1, 351),
        ["GPU", "ranks", "most in use", "left"],
        [A, "0", "900.0 MiB", "0 B"],
        [B, "1", "901.0 MiB", "3.0 MiB"],
    ]


def test_attempts_are_kept_apart() -> None:
    died = RELEASED | {"memory": {"1": LOADED["1"]}, "devices": {A: None, B: 0}, "processes": 2}
    events = [
        *RUNNING,
        ("released", 1, died),
        ("requeued", 1, {}),
        *[(kind, 2, data) for kind, _, data in DONE],
    ]
    first, second = attempts(*events)
    # Rank 0 died without a heartbeat. The event `loaded` reports the memory of rank 0.
    assert first.ranks.keys() == {0, 1}
    assert ("optimizer" in first.ranks[1].phases, "optimizer" in second.ranks[1].phases) == (
        False,
        True,
    )
    lines = printed(*events)
    titles = [line[0] for line in lines if line and line[0].startswith("Memory of")]
    assert titles == ["Memory of job j, attempt 1", "Memory of job j, attempt 2"]
    assert [A, "0", "900.0 MiB", "not measured"] in lines
    assert ["2 processes of the job survived SIGKILL."] in lines


def test_on_the_cpu_it_is_the_resident_set() -> None:
    released = RELEASED | {"before": {}, "memory": {"0": rank(0, "cpu")}, "bytes": 0, "devices": {}}
    lines = printed(
        ("claimed", 1, {}), ("started", 1, {"device": "cpu"}), ("released", 1, released)
    )
    assert ["phase", "rank", "resident set", "peak"] in lines
    assert ["build", "0", "100.0 MiB", "102.0 MiB"] in lines
    assert not any("Left on the device" in line[0] for line in lines if line)
