"""Commands about a run: `tandem run`, `tandem checkpoints`, `tandem export`, `tandem track`."""

import math
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.common import (
    Json,
    RunArgument,
    Targets,
    data_extra,
    details,
    err,
    make_client,
    show,
    size,
    table,
    when,
)
from tandem.client import CheckpointInfo, RunStatus, Tandem
from tandem.client.download import partial_directory
from tandem.errors import InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, misread_by_peft
from tandem.families.model_config import model_directory
from tandem.system.safetensors_header import read_header

app = typer.Typer(
    help="Create runs and look at them. A run is an adapter or a model, and all its steps.",
    no_args_is_help=True,
)
checkpoints = typer.Typer(
    help="List, download, fork and roll back the steps of a run.", no_args_is_help=True
)
StepArgument = Annotated[int, typer.Argument(metavar="STEP", min=0, help="The checkpoint's step.")]


@app.command()
def create(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A new name: lower-case letters, digits, '.', '_' and '-'."
        ),
    ],
    rank: Annotated[int | None, typer.Option(help="Rank of the LoRA.  \\[default: 16]")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Alpha of the LoRA.  \\[default: twice the rank]")
    ] = None,
    target: Targets = None,
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights instead of a LoRA.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of step 0's weights and of the order of training data.")
    ] = 0,
    base_model: Annotated[
        str | None, typer.Option(help="The deployment's base model; no other is accepted.")
    ] = None,
    json: Json = False,
) -> None:
    """Create a run. Step 0 of the run equals the base model; `tandem train` makes later steps."""
    if full and (rank is not None or alpha is not None or target):
        raise typer.BadParameter(
            "--full trains all weights; leave --rank, --alpha and --target out"
        )
    lora = {"rank": 16 if rank is None else rank, "alpha": alpha, "targets": target or None}
    lora = {name: value for name, value in lora.items() if value is not None}
    trained: dict[str, Any] = {"trainable": "full"} if full else {"lora": lora}
    show(
        make_client().create_run(name, base_model=base_model, seed=seed, **trained),
        json,
        run_details,
    )


@app.command("list")
def list_runs(json: Json = False) -> None:
    """List all runs."""
    show(make_client().list_runs(), json, _runs_table)


@app.command("show")
def show_run(run: RunArgument, json: Json = False) -> None:
    """Show a run: its newest step, what vLLM serves, its queued and running jobs."""
    show(make_client().get_run(run), json, run_details)


@app.command()
def delete(
    run: RunArgument,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel its queued and running jobs first.")
    ] = False,
    json: Json = False,
) -> None:
    """Delete a run with its checkpoints and ended jobs. There is no way back.

    The controller refuses the deletion while the run has queued or running jobs. vLLM unloads the
    run's steps.
    """
    make_client().delete_run(run, cancel_jobs=cancel)
    show({"deleted": run}, json, lambda _: f"{run} is deleted")


def _runs_table(runs: list[RunStatus]) -> object:
    rows = [
        (
            run.spec.name,
            run.newest_step,
            run.served.model if run.served else None,
            len(run.pending),
            run.spec.lora.rank if run.spec.lora else "full",
            size(run.size),
            when(run.spec.created),
        )
        for run in runs
    ]
    return table(
        "Runs", ["run", "newest step#", "served", "jobs#", "rank#", "size#", "created"], rows
    )


def run_details(run: RunStatus) -> object:
    spec, lora, fork, served = run.spec, run.spec.lora, run.spec.forked_from, run.served
    shape = (
        f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, {' '.join(lora.targets)}"
        if lora
        else "all weights"
    )
    took = (
        ", ".join(f"{part} {seconds:.2g} s" for part, seconds in served.seconds.items())
        if served
        else ""
    )
    no = run.refused_step()
    refused = f"step {no.step}: {no.reason}" if no else None
    return details(
        spec.name,
        [
            ("base model", spec.base_model),
            ("trains", shape),
            ("created", when(spec.created)),
            ("forked from", f"{fork.run}@{fork.step}" if fork else None),
            ("newest step", run.newest_step),
            ("on the volume", size(run.size)),
            (
                "served",
                f"{served.model}, verified {when(served.verified)}" if served else "nothing yet",
            ),
            ("weights", f"{served.weights}, by {served.transport}" if served else spec.weights),
            ("publication", took or None),
            ("log-prob error", f"{served.mean_abs_logprob_error:.2g} nats" if served else None),
            ("refused", refused),
            ("queued or running jobs", ", ".join(run.pending) or "none"),
        ],
    )


@checkpoints.command("list")
def list_checkpoints(run: RunArgument, json: Json = False) -> None:
    """List a run's checkpoints, oldest first."""
    show(make_client().checkpoints(run), json, lambda infos: _checkpoints_table(run, infos))


@checkpoints.command()
def download(
    run: RunArgument,
    step: StepArgument,
    dest: Annotated[Path, typer.Argument(metavar="DIR", help="The new directory.")],
    json: Json = False,
) -> None:
    """Fetch a checkpoint: PEFT's adapter, the optimizer's state, the manifest. Checks each file's
    SHA-256."""
    manifest = make_client().download(run, step, dest)
    total = sum(entry.size for entry in manifest.files.values())
    done = {
        "run": run,
        "step": step,
        "dest": str(dest),
        "bytes": total,
        "files": sorted(manifest.files),
    }
    show(
        done,
        json,
        lambda _: f"{run}@{step} is in {dest} ({size(total)}, {len(manifest.files)} files)",
    )
    if WEIGHTS_FILE in manifest.files and misread_by_peft(read_header(dest / WEIGHTS_FILE)):
        problem = "PEFT 0.21 does not load adapters on a mixture's MLPs right"
        remedy = f"`tandem export {run} {step} DIR` makes a merged model"
        err.print(f"{problem}; {remedy}", soft_wrap=True)


@checkpoints.command()
def fork(
    run: RunArgument,
    step: StepArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new run's name.")],
    json: Json = False,
) -> None:
    """Create a run whose step 0 is this checkpoint, optimizer state included."""
    show(make_client().fork(run, step, name), json, run_details)


@checkpoints.command("delete")
def delete_checkpoint(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """Delete a checkpoint that is not step 0, the newest, pinned, served, or needed by a job."""
    make_client().delete_checkpoint(run, step)
    show({"deleted": f"{run}@{step}"}, json, lambda _: f"{run}@{step} is deleted")


@checkpoints.command()
def pin(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """Keep a checkpoint, whatever TANDEM_KEEP_CHECKPOINTS says."""
    make_client().pin(run, step)
    show({"pinned": f"{run}@{step}"}, json, lambda _: f"{run}@{step} is pinned")


@checkpoints.command()
def unpin(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """End the pin of a checkpoint."""
    make_client().unpin(run, step)
    show({"unpinned": f"{run}@{step}"}, json, lambda _: f"{run}@{step} is not pinned")


@checkpoints.command()
def rollback(run: RunArgument, step: StepArgument, json: Json = False) -> None:
    """Make STEP the run's newest step again, and discard later steps. A rollback is refused while
    the run has queued or running jobs."""
    done = make_client().rollback(run, step)
    gone = ", ".join(map(str, done.discarded)) or "none"
    show(done, json, lambda _: f"{run} is at step {done.newest_step}; discarded: {gone}")


def export(
    run: RunArgument,
    step: StepArgument,
    dest: Annotated[Path, typer.Argument(metavar="DIR", help="The new directory.")],
    base_model: Annotated[
        str | None,
        typer.Option(
            help="The base model on this machine: directory or hub name.  \\[default: the run's]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a step as a Hugging Face model: the base model's files with the adapter merged into the
    weights. If the run trains all weights, the step's own files are written.

    transformers and vLLM load the directory as they load the base model. The directory appears only
    when the model is complete.
    """
    with data_extra("tandem export"):
        # The import is here, because only this command needs NumPy.
        from tandem.inference.merged_model import write_merged_model

    with partial_directory(dest) as directory:
        tandem, staged = make_client(), Path(directory)
        spec = tandem.get_run(run).spec
        base = base_model or spec.base_model
        if spec.lora is not None:
            with data_extra("a base model of the hub"):
                base = str(model_directory(base))
        manifest = tandem.download(run, step, staged / "step", weights_only=True)
        if spec.lora is not None:
            total = write_merged_model(staged / "model", Path(base), staged / "step", spec.lora)
        elif not manifest.files:
            raise InvalidInput(
                f"step 0 of {run} is the base model, {spec.base_model}", field="step"
            )
        else:
            (staged / "step" / "manifest.json").unlink()
            (staged / "step").rename(staged / "model")
            total = sum(entry.size for entry in manifest.files.values())
        (staged / "model").replace(dest)
    done = {"run": run, "step": step, "dest": str(dest), "base_model": base, "bytes": total}
    made = f"{run}@{step}" if spec.lora is None else f"{run}@{step}, merged into {base},"
    show(done, json, lambda _: f"{made} is in {dest} ({size(total)})")


def track(
    run: RunArgument,
    to: Annotated[
        list[str],
        typer.Option(help="tensorboard:DIR, wandb, wandb:PROJECT, mlflow:URI; repeatable"),
    ],
    follow: Annotated[bool, typer.Option(help="Go on with jobs to come, until Ctrl-C.")] = True,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="The file of samples of `tandem rl`.  \\[default: this run's in this directory]"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a run's metrics to experiment trackers, once for each optimizer step, and write a table
    of samples for each checkpoint.

    The same command continues after the last row that it wrote, even after a kill. Keys come from
    the environment (WANDB_API_KEY, ...).
    """
    from tandem.client.rl.samples import find_samples
    from tandem.client.track import track as start

    # SIGTERM raises KeyboardInterrupt, so that W&B is closed and then writes its buffered rows.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # `get_run` fails immediately if the controller's address or the run's name is wrong. The
    # tracking itself waits for the controller without a time limit.
    make_client().get_run(run)
    with Tandem(patience=math.inf) as tandem:
        # `tandem rl` may create its file of samples later.
        written = start(
            tandem, run, to, lambda: samples or find_samples(run, Path()), follow=follow
        )
    show(
        written,
        json,
        lambda rows: "\n".join(f"{place}: {count} new rows" for place, count in rows.items()),
    )


def _checkpoints_table(run: str, infos: list[CheckpointInfo]) -> object:
    rows = []
    for info in infos:
        source = f"forked from {info.origin.run}@{info.origin.step}" if info.origin else info.job
        loss, reward = (
            f"{info.metrics[m]:.4g}" if m in info.metrics else None for m in ("loss", "reward_mean")
        )
        made = when(info.created), size(info.size), source or "the base model"
        rows.append(
            (info.step, *made, loss, reward, "pinned" if info.pinned else None, info.damage)
        )
    return table(
        f"Checkpoints of {run}",
        ["step#", "made", "size#", "by", "loss#", "reward#", "", "damage"],
        rows,
    )
