"""`tandem doctor`: checks a machine and its deployment."""

from __future__ import annotations

from tandem.cli.checks import report, settings_checks
from tandem.cli.checks.gpus import device_checks
from tandem.cli.checks.installation import installation_checks
from tandem.cli.checks.model import model_checks
from tandem.cli.checks.secrets import keys_checks
from tandem.cli.checks.services import controller_checks, inference_checks
from tandem.cli.checks.volume import disk_checks, volume_checks
from tandem.cli.output import Json


def doctor(json: Json = False) -> None:
    """Check this machine and its deployment; each line says ok, warn or fail, and what to do. Exit status 1 on fail."""
    parts = [keys_checks, volume_checks, disk_checks, device_checks, model_checks, controller_checks, inference_checks]
    report([*installation_checks(), *settings_checks(parts)], json)
