"""`tandem doctor` and `tandem preflight`: each runs a list of checks and reports them."""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.markup import escape

from tandem.cli import checks_deployment as deployment
from tandem.cli import checks_machine as machine
from tandem.cli.checks_machine import Check
from tandem.cli.common import Json, out, show
from tandem.config import Settings, load_settings
from tandem.errors import TandemError

Part = Callable[[Settings], Iterator[Check]]
Container = StrEnum("Container", ["ALL", "CONTROLLER", "TRAINER", "INFERENCE"])
_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(json: Json = False) -> None:
    """Check this machine and its deployment; each line says ok, warn or fail, and what to do. Exit status 1 on fail."""
    parts: list[Part] = [deployment.keys_checks, machine.volume_checks, machine.disk_checks, machine.device_checks]
    parts += [machine.damage_checks, deployment.model_checks, deployment.weights_checks]
    parts += [deployment.controller_checks, deployment.inference_checks]
    _report([*machine.installation_checks(), *_settings_checks(parts)], json)


def preflight(
    role: Annotated[
        Container, typer.Option(help="The container that starts; inference has the admin token.")
    ] = Container.ALL,
    devices_granted: Annotated[
        bool,
        typer.Option("--devices-granted", help="A scheduler assigns the GPUs, so the settings need not name them."),
    ] = False,
    json: Json = False,
) -> None:
    """Check the deployment's GPUs, secrets, volume and model before it starts. Exit status 1 on fail."""

    def secrets_checks(settings: Settings) -> Iterator[Check]:
        has_token = role in (Container.ALL, Container.INFERENCE) or settings.gpu_mode == "shared"
        return deployment.required_secrets(settings, admin=has_token)

    parts: list[Part] = [] if devices_granted else [deployment.gpu_checks]
    parts += [secrets_checks, machine.volume_checks, machine.spool_checks, machine.disk_checks, deployment.model_checks]
    _report(list(_settings_checks(parts)), json)


def _settings_checks(parts: list[Part]) -> Iterator[Check]:
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


def _report(checks: list[Check], json: bool) -> None:
    """Print the checks; exits with status 1 where one failed."""
    show([check._asdict() for check in checks], json, lambda _: _print(checks))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)


def _print(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for status, name, found, remedy in checks:
        out.print(f"[{_COLORS[status]}]{status:<4}[/]  {name:<{width}}  {escape(found)}", soft_wrap=True)
        if remedy:
            out.print(f"      {'':<{width}}  → {escape(remedy)}", soft_wrap=True, style="dim")
