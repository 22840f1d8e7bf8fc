"""The programs of the containers, one command each; `tandem up` runs all of them."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, get_args

import typer

from tandem.cli.common import print_error
from tandem.config import load_settings
from tandem.errors import InvalidInput

# Command -> its module and its help.
PROGRAMS = {
    "controller": ("tandem.controller", "Run the HTTP API."),
    "runner": ("tandem.trainer.runner", "Run the trainer's runner: it claims jobs and starts the ranks that train."),
    "serve": ("tandem.inference.server.serve", "Run vLLM with the deployment's settings."),
    "publisher": ("tandem.inference.publisher", "Run the publisher: it loads new steps into vLLM and verifies them."),
    "exporter": ("tandem.metrics.exporter",
                 "Run the exporter: it serves the metrics of the trainer or of inference to Prometheus."),
}  # fmt: skip


def become(module: str) -> Callable[[], None]:
    """A command that replaces this process by a program, which then gets the signals and sets the exit status."""
    return lambda: os.execv(sys.executable, [sys.executable, "-m", module])


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
    from tandem.system.environment import Role

    chosen: Role | None = next((known for known in get_args(Role) if known == role), None)
    try:
        if chosen is None:
            raise InvalidInput(f"{role!r} is not a role; use one of {', '.join(get_args(Role))}", field="--role")
        status = start(load_settings(), chosen)
    except InvalidInput as error:
        print_error(error, json=False)
        raise typer.Exit(2) from error
    raise typer.Exit(status)
