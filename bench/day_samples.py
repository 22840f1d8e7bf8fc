"""What a deployment's programs and directories hold at one moment, and whether that grows."""

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tandem.system import processes

WARM_UP_JOBS = 200
"""Caches, pools and counters fill during these."""
GROWTH_MIB = 2.0
"""Memory of a process may grow by less than this in 1,000 jobs."""
MEMORY = (
    "RSS MiB",
    "PSS MiB",
    "USS MiB",
)  # pages of files count less while others map them, so no verdict rests on these
OWN = "anonymous MiB"
_RANK_WORDS = {"forkserver": "fork server", "torchrun_agent": "agent", "bootstrap": "rank"}

Sample = dict[tuple[str, str], float]
"""(program or directory, quantity) -> value."""


def of_process(pid: int) -> dict[str, float]:
    """Memory in MiB, and counts. OSError if the process is gone."""
    lines = (
        line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    )
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "RSS MiB": kib["Rss"] / 1024,
        "PSS MiB": kib["Pss"] / 1024,
        "USS MiB": (kib["Private_Clean"] + kib["Private_Dirty"]) / 1024,
        OWN: kib["Anonymous"] / 1024,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status.partition("Threads:")[2].split()[0]),
        "children": len(processes.descendants(pid)),
    }


def of_runner(pid: int) -> dict[str, int]:
    """The processes that stay between jobs: what the runner started, by what they are."""
    found = {}
    for process in processes.descendants(pid):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{process.pid}/cmdline").read_text()
            found[
                next(
                    (name for word, name in _RANK_WORDS.items() if word in command), process.command
                )
            ] = process.pid
    return found


def of_files(root: Path) -> tuple[Counter[str], int]:
    """How many files each directory has in it and below, by names two levels deep (`jobs/ids`, of a
    run `runs/checkpoints`); and the bytes of all."""
    counts: Counter[str] = Counter()
    size = 0
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                parts = path.relative_to(root).parts[:-1]
                counts[
                    "/".join(
                        (parts[0], parts[2]) if parts[:1] == ("runs",) and parts[2:] else parts[:2]
                    )
                ] += 1
                size += path.stat().st_size
    return counts, size


def rows(way: str, samples: list[tuple[int, Sample]]) -> list[dict[str, object]]:
    """A row for each quantity: medians of the first and of the last quarter of the jobs after the
    warm-up, the slope per 1,000 jobs, and whether it is flat. `samples`: (jobs done, sample)."""
    warm = [(done, sample) for done, sample in samples if done >= WARM_UP_JOBS] or samples
    found = []
    for key in warm[0][1]:
        points = [(done, sample[key]) for done, sample in warm if key in sample]
        values = [value for _, value in points]
        quarter = max(1, len(values) // 4)
        slope = (
            1000 * statistics.linear_regression(*zip(*points, strict=True)).slope
            if len(points) > 1
            else 0.0
        )
        found.append(
            {
                "way": way,
                "of": key[0],
                "what": key[1],
                "first quarter": statistics.median(values[:quarter]),
                "last quarter": statistics.median(values[-quarter:]),
                "per 1,000 jobs": slope,
                "flat": _flat(key[1], values, quarter, slope),
            }
        )
    return found


def _flat(what: str, values: list[float], quarter: int, slope: float) -> str:
    if what == OWN:
        return "yes" if slope < GROWTH_MIB else "NO"
    if what == "beyond what is kept":
        return "yes" if max(values) == 0 else "NO"
    if what in (*MEMORY, "bytes", "kept", "names"):
        return ""
    return (
        "yes"
        if statistics.median(values[-quarter:]) <= statistics.median(values[:quarter])
        else "NO"
    )


def grown(found: Iterable[dict[str, object]]) -> list[str]:
    """What is not flat."""
    return [f"{row['way']}: {row['of']}, {row['what']}" for row in found if row["flat"] == "NO"]
