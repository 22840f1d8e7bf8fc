"""`tandem doctor` and `tandem preflight`: a report of checks."""

from typing import Annotated

import typer
from rich.markup import escape

from tandem.cli.checks import Answer, Asked, Command, Container, answers
from tandem.cli.common import Json, out, show

_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(json: Json = False) -> None:
    """Check this machine and its deployment; each line says ok, warn or fail, and what to do. Exit
    status 1 on fail."""
    _report(Asked(Command.DOCTOR), json)


def preflight(
    role: Annotated[
        Container,
        typer.Option(
            help="What starts. Inference and a trainer on shared GPUs need the admin token."
        ),
    ] = Container.ALL,
    devices_granted: Annotated[
        bool,
        typer.Option(
            "--devices-granted",
            help="A scheduler assigns the GPUs, so the settings need not name them.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check the deployment's GPUs, secrets, volume and model before the deployment starts. Exit
    status 1 on fail.

    A full volume that has a spool is only a warning: the programs start, and wait for space.
    """

    _report(Asked(Command.PREFLIGHT, role=role, devices_granted=devices_granted), json)


def _report(asked: Asked, json: bool) -> None:
    """Print the answers. Exits with status 1 if an answer is a failure."""
    found = list(answers(asked))
    show([answer._asdict() for answer in found], json, lambda _: _print(found))
    if any(answer.status == "fail" for answer in found):
        raise typer.Exit(1)


def _print(found: list[Answer]) -> None:
    width = max(len(answer.name) for answer in found)
    for status, name, what, remedy in found:
        out.print(
            f"[{_COLORS[status]}]{status:<4}[/]  {name:<{width}}  {escape(what)}", soft_wrap=True
        )
        if remedy:
            out.print(f"      {'':<{width}}  → {escape(remedy)}", soft_wrap=True, style="dim")
