"""Settings as the environment of child processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from tandem.config import Settings


def of(settings: Settings) -> dict[str, str]:
    """`TANDEM_*` variables from which a child reads the same settings; those left at their defaults are left out.

    Secrets are among them: an environment is seen by its own user only, a command line or a file by more.
    """
    variables = {"TANDEM_ROOT": str(settings.root.absolute())}
    for name in sorted(settings.model_fields_set - {"root"}):
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, SecretStr):
            text = value.get_secret_value()
        elif isinstance(value, bool):
            text = "1" if value else "0"
        elif isinstance(value, list):
            text = ",".join(value)
        elif isinstance(value, Path):
            text = str(value.absolute())
        else:
            text = str(value)
        variables[f"TANDEM_{name.upper()}"] = text
    return variables


def omp_waiting(environ: Mapping[str, str]) -> dict[str, str]:
    """What has OpenMP's threads (libgomp's, in torch and vLLM) wait for each other briefly, then sleep; nothing where
    `environ` says how they wait.

    By default they spin through 300 000 turns. That is lost as soon as another process wants their core, which then
    holds up every operation: training a tiny model on two cores, one of them busy, took 40 times as long.
    """
    return {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & environ.keys() else {"GOMP_SPINCOUNT": "1000"}
