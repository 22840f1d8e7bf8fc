"""Prints a benchmark's rows as a table, and writes them as JSON to bench/results/."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def report(name: str, title: str, rows: list[dict[str, Any]]) -> None:
    """Prints `rows`, which all have the same keys. Also writes the rows and a description of the
    machine to `<name>.json`."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(
            *(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    # If the output is no terminal, the table gets a width that is enough for all columns.
    Console(width=None if sys.stdout.isatty() else 40 + 14 * len(rows[0])).print(table)
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"title": title, **machine, "rows": rows}, indent=2) + "\n"
    )
