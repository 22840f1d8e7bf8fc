"""What `tandem doctor` and `tandem preflight` check, one file for each thing; and how they report it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import typer
from rich.markup import escape

from tandem.cli.output import out, show
from tandem.config import Settings, load_settings
from tandem.errors import TandemError

Status = Literal["ok", "warn", "fail"]
_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Check(NamedTuple):
    """One line of the report."""

    status: Status
    name: str
    found: str
    remedy: str = ""


def settings_checks(parts: Sequence[Callable[[Settings], Iterator[Check]]]) -> Iterator[Check]:
    """Loads the settings and runs each part with them. An exception in a part is a failed check."""
    try:
        settings = load_settings()
    except TandemError as error:
        yield Check("fail", "settings", str(error), "correct the variable; docs/settings.md lists all of them")
        return
    yield Check("ok", "settings", "every TANDEM_* variable is valid")
    for part in parts:
        try:
            yield from part(settings)
        except (OSError, TandemError, ValueError) as error:
            yield Check("fail", part.__name__.removesuffix("_checks"), f"{type(error).__name__}: {error}")


def report(checks: Iterable[Check], json: bool) -> None:
    """Print the checks; exits with status 1 where one failed."""
    checks = list(checks)
    show([check._asdict() for check in checks], json, lambda _: _print(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for status, name, found, remedy in checks:
        out.print(f"[{_COLORS[status]}]{status:<4}[/]  {name:<{width}}  {escape(found)}", soft_wrap=True)
        if remedy:
            out.print(f"      {'':<{width}}  → {escape(remedy)}", soft_wrap=True, style="dim")
