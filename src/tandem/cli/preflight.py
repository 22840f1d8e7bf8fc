"""`tandem preflight`: the checks that compose and the chart run once, without a GPU, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from tandem.cli.checks import Check, report, settings_checks
from tandem.cli.checks.gpus import gpu_checks
from tandem.cli.checks.model import model_checks
from tandem.cli.checks.secrets import required_secrets
from tandem.cli.checks.volume import disk_checks, spool_checks, volume_checks
from tandem.cli.output import Json
from tandem.config import Settings


def preflight(
    role: Annotated[
        str,
        typer.Option(help="The container that starts: controller, trainer or inference, which has the admin token."),
    ] = "all",
    devices_granted: Annotated[
        bool,
        typer.Option("--devices-granted", help="A scheduler assigns the GPUs, so the settings need not name them."),
    ] = False,
    json: Json = False,
) -> None:
    """Check the deployment's GPUs, secrets, volume and model before it starts. Exit status 1 on fail."""

    def secrets_checks(settings: Settings) -> Iterator[Check]:
        admin = role in ("all", "inference") or settings.gpu_mode == "shared"
        return required_secrets(settings, admin=admin)

    parts = [secrets_checks, volume_checks, spool_checks, disk_checks, model_checks]
    report(settings_checks(parts if devices_granted else [gpu_checks, *parts]), json)
