"""The programs of the containers, one command each; `tandem up` runs all of them."""

from __future__ import annotations

import os
import sys

import typer

from tandem.config import load_settings
from tandem.errors import InvalidInput


def up() -> None:
    """Start controller, trainer, vLLM and publisher on this machine, in the foreground; Ctrl-C stops everything.

    TANDEM_BASE_MODEL names the model, TANDEM_ROOT the directory where everything is kept.
    """
    from tandem.up import up as start  # late: only this command needs supervisord

    settings = load_settings()
    if settings.base_model is None:
        raise InvalidInput("not set: name a Hugging Face directory or a hub name", field="TANDEM_BASE_MODEL")
    raise typer.Exit(start(settings))


def controller() -> None:
    """Run the HTTP API."""
    _become("tandem.controller")


def runner() -> None:
    """Run the trainer's runner: it claims jobs and starts the ranks that train."""
    _become("tandem.trainer.runner")


def serve() -> None:
    """Run vLLM as the deployment's settings say."""
    _become("tandem.inference.serve")


def publisher() -> None:
    """Run the publisher: it loads new steps into vLLM and verifies them."""
    _become("tandem.inference.publisher")


def exporter() -> None:
    """Run the exporter: what Prometheus scrapes of the trainer and of inference."""
    _become("tandem.metrics.exporter")


def _become(module: str) -> None:
    """This process becomes the program, so that signals and the exit status are its own."""
    os.execv(sys.executable, [sys.executable, "-m", module])
