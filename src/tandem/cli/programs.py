"""The programs of the containers, one command each; `tandem up` runs all of them."""

from __future__ import annotations

import os
import sys
from typing import Annotated, get_args

import typer

from tandem.cli.output import print_error
from tandem.config import load_settings
from tandem.errors import InvalidInput


def up(
    role: Annotated[
        str, typer.Option(help="all; or what one container runs: trainer (runner), inference (vLLM, publisher)")
    ] = "all",
) -> None:
    """Start controller, trainer, vLLM and publisher on this machine, in the foreground; Ctrl-C stops everything.

    TANDEM_BASE_MODEL names the model, TANDEM_ROOT the spool's directory. Exit status: 0 stopped; 2
    wrong settings; 70 a program can't be started; 71 it crashes again and again; 72 supervisord ended.
    """
    from tandem.supervise.up import up as start  # late: only this command needs supervisord
    from tandem.system.role import Role

    chosen: Role | None = next((known for known in get_args(Role) if known == role), None)
    try:
        if chosen is None:
            raise InvalidInput(f"{role!r} is not a role; use one of {', '.join(get_args(Role))}", field="--role")
        status = start(load_settings(), chosen)
    except InvalidInput as error:
        print_error(error, json=False)
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def controller() -> None:
    """Run the HTTP API."""
    _become("tandem.controller")


def runner() -> None:
    """Run the trainer's runner: it claims jobs and starts the ranks that train."""
    _become("tandem.trainer.runner")


def serve() -> None:
    """Run vLLM with the deployment's settings."""
    _become("tandem.inference.server.serve")


def publisher() -> None:
    """Run the publisher: it loads new steps into vLLM and verifies them."""
    _become("tandem.inference.publisher")


def exporter() -> None:
    """Run the exporter: it serves the metrics of the trainer or of inference to Prometheus."""
    _become("tandem.metrics.exporter")


def _become(module: str) -> None:
    """Replace this process by the program, so that the program gets the signals and sets the exit status."""
    os.execv(sys.executable, [sys.executable, "-m", module])
