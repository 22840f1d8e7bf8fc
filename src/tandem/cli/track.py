"""`tandem track`: writes a run's metrics to TensorBoard, Weights & Biases or MLflow."""

import math
import signal
from typing import Annotated

import typer

from tandem.cli.common import Json, RunArgument, connect, show
from tandem.client import Tandem


def track(
    run: RunArgument,
    to: Annotated[list[str], typer.Option(help="tensorboard:DIR, wandb, wandb:PROJECT, mlflow:URI; repeatable")],
    follow: Annotated[bool, typer.Option(help="Go on with jobs to come, until Ctrl-C.")] = True,
    json: Json = False,
) -> None:
    """Write a run's metrics to experiment trackers, each optimizer step once.

    Started again, also after a kill, it goes on where it stopped. Keys come from the environment (WANDB_API_KEY, ...).
    """
    from tandem.client.track import track as start

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # W&B writes what it holds when it is closed
    connect().get_run(run)  # a wrong address or name is told at once; later the controller may be away for long
    with Tandem(patience=math.inf) as tandem:
        written = start(tandem, run, to, follow=follow)
    show(written, json, lambda rows: "\n".join(f"{place}: {count} new rows" for place, count in rows.items()))
