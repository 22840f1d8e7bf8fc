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
    """A run's steps, oldest first."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.checkpoints(run), json, lambda found: _table(run, found))


@app.command()
def download(
    run: RunArgument,
    step: StepArgument,
    dest: Annotated[Path, typer.Argument(help="A new directory for it.")],
    json: Json = False,
) -> None:
    """Fetch a checkpoint: PEFT's adapter, the optimizer's state, the manifest. Every file's SHA-256 is checked."""
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
    """Make a new run whose step 0 is this checkpoint, optimizer state included."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.fork(run, step, name), json, run_details)


@app.command()
def rollback(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """Make STEP the newest again: the steps after it leave the chain. Refused while the run has jobs under way."""
    with Tandem(patience=PATIENCE) as tandem:
        done = tandem.rollback(run, step)
        gone = ", ".join(map(str, done.discarded)) or "none"
        show(done, json, lambda _: f"{run} is at step {done.newest_step}; discarded: {gone}")


def _table(run: str, found: list[CheckpointInfo]) -> object:
    rows = []
    for info in found:
        source = f"forked from {info.origin.run}@{info.origin.step}" if info.origin else info.job
        loss, reward = info.metrics.get("loss"), info.metrics.get("reward_mean")
        rows.append(
            (
                info.step,
                when(info.created),
                size(info.size),
                source or "the base model",
                None if loss is None else f"{loss:.4g}",
                None if reward is None else f"{reward:.4g}",
                info.damage,
            )
        )
    return table(f"Checkpoints of {run}", ["step#", "made", "size#", "by", "loss#", "reward#", "damage"], rows)
