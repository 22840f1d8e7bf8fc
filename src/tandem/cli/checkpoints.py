"""`tandem checkpoints`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.output import PATIENCE, Json, show, size, table, when
from tandem.cli.runs import RunArgument, run_details
from tandem.client import CheckpointInfo, Tandem

app = typer.Typer(help="List, download, fork and roll back the steps of a run.", no_args_is_help=True)
StepArgument = Annotated[int, typer.Argument(metavar="STEP", min=0, help="The checkpoint's step.")]


@app.command("list")
def list_checkpoints(run: RunArgument, json: Json = False) -> None:
    """List a run's checkpoints, oldest first."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.checkpoints(run), json, lambda checkpoints: _table(run, checkpoints))


@app.command()
def download(
    run: RunArgument,
    step: StepArgument,
    dest: Annotated[Path, typer.Argument(help="The new directory.")],
    json: Json = False,
) -> None:
    """Fetch a checkpoint: PEFT's adapter, the optimizer's state, the manifest. Checks each file's SHA-256."""
    with Tandem(patience=PATIENCE) as tandem:
        manifest = tandem.download(run, step, dest)
        total = sum(entry.size for entry in manifest.files.values())
        done = {"run": run, "step": step, "dest": str(dest), "bytes": total, "files": sorted(manifest.files)}
        show(done, json, lambda _: f"{run}@{step} is in {dest} ({size(total)}, {len(manifest.files)} files)")


@app.command()
def fork(
    run: RunArgument,
    step: StepArgument,
    name: Annotated[str, typer.Argument(help="The new run's name.")],
    json: Json = False,
) -> None:
    """Create a run whose step 0 is this checkpoint, optimizer state included."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.fork(run, step, name), json, run_details)


@app.command()
def rollback(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """Make STEP the newest again: later steps leave the chain. Refused while the run has queued or running jobs."""
    with Tandem(patience=PATIENCE) as tandem:
        done = tandem.rollback(run, step)
        gone = ", ".join(map(str, done.discarded)) or "none"
        show(done, json, lambda _: f"{run} is at step {done.newest_step}; discarded: {gone}")


def _table(run: str, checkpoints: list[CheckpointInfo]) -> object:
    rows = []
    for info in checkpoints:
        source = f"forked from {info.origin.run}@{info.origin.step}" if info.origin else info.job
        loss, reward = (f"{info.metrics[m]:.4g}" if m in info.metrics else None for m in ("loss", "reward_mean"))
        made = when(info.created), size(info.size), source or "the base model"
        rows.append((info.step, *made, loss, reward, info.damage))
    return table(f"Checkpoints of {run}", ["step#", "made", "size#", "by", "loss#", "reward#", "damage"], rows)
