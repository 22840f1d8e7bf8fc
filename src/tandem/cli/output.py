"""What every command shares: tables for people, JSON for programs, errors on stderr, exit statuses."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.errors import JobFailed, NotServed, TandemError, Unreachable

# Seconds that a controller which does not answer is asked again: a restart goes by unnoticed, a wrong URL soon shows.
PATIENCE = 10.0
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text, for programs.")]


def show[T](data: T, json: bool, render: Callable[[T], object]) -> None:
    """Print `data` as one JSON document, or what `render` makes of it."""
    if json:
        print(to_json(data, indent=2, inf_nan_mode="constants").decode())
        return
    rendered = render(data)
    if rendered is not None:
        out.print(rendered)


def show_line(data: object) -> None:
    """Print `data` as one line of JSON, at once."""
    print(to_json(data, inf_nan_mode="constants").decode(), flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table; columns whose name ends with `#` are numbers, to the right."""
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column.removesuffix("#"), justify="right" if column.endswith("#") else "left")
    for row in rows:
        made.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    return made


def details(title: str, pairs: Sequence[tuple[str, object]]) -> Table:
    """Names and values, one below the other; values that are None are left out."""
    made = Table(title=title, title_justify="left", show_header=False)
    made.add_column(style="bold")
    made.add_column()
    for name, value in pairs:
        if value is not None:
            made.add_row(name, escape(str(value)))
    return made


def when(seconds: float | None) -> str | None:
    """A time, in this machine's zone."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(count: int | None) -> str | None:
    """Bytes as people read them."""
    if count is None:
        return None
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def tell_error(error: Exception, *, json: bool) -> None:
    """The error on stderr: the offending field first, where there is one."""
    kind = error.code if isinstance(error, TandemError) else "timeout"
    field = error.field if isinstance(error, TandemError) else None
    message = error.message if isinstance(error, TandemError) else str(error)
    if json:
        print(jsonlib.dumps({"error": {"type": kind, "message": message, "field": field}}), file=sys.stderr)
        return
    where = f"[bold]{escape(field)}[/bold]: " if field else ""
    err.print(f"[bold red]error[/bold red] ({kind}): {where}{escape(message)}", soft_wrap=True)


def exit_code(error: Exception) -> int:
    """The exit status for an error, as `tandem --help` lists them."""
    codes: list[tuple[type[Exception], int]] = [(JobFailed, 3), (NotServed, 4), (TimeoutError, 4), (Unreachable, 5)]
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def fields(data: dict[str, Any], names: Sequence[str]) -> str:
    """The named values that `data` has, as `name=value`, numbers short."""
    parts = []
    for name in names:
        value = data.get(name)
        if isinstance(value, float):
            parts.append(f"{name}={value:.4g}")
        elif value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)
