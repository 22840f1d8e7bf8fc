"""`tandem run`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tandem.cli.output import PATIENCE, Json, details, show, table, when
from tandem.client import RunStatus, Tandem

app = typer.Typer(help="Create runs and look at them. A run is one adapter and all its steps.", no_args_is_help=True)
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="A new name: lower-case letters, digits, '.', '_' and '-'.")],
    rank: Annotated[int, typer.Option(help="Rank of the LoRA.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="Alpha of the LoRA.  \\[default: twice the rank]")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A layer to adapt (q_proj, ..., down_proj); repeatable.  \\[default: all]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of step 0's weights and of the order of training data.")] = 0,
    base_model: Annotated[str | None, typer.Option(help="The deployment's base model; no other is accepted.")] = None,
    json: Json = False,
) -> None:
    """Create a run. Its step 0 equals the base model; `tandem train` makes the next ones."""
    lora: dict[str, Any] = {"rank": rank, "alpha": 2.0 * rank if alpha is None else alpha}
    if target:
        lora["targets"] = target
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.create_run(name, base_model=base_model, lora=lora, seed=seed), json, run_details)


@app.command("list")
def list_runs(json: Json = False) -> None:
    """List all runs."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.list_runs(), json, _runs_table)


@app.command("show")
def show_run(run: RunArgument, json: Json = False) -> None:
    """Show a run: its newest step, what vLLM serves, its queued and running jobs."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.get_run(run), json, run_details)


def _runs_table(runs: list[RunStatus]) -> object:
    rows = []
    for run in runs:
        spec, served = run.spec, run.served.model if run.served else None
        rows.append((spec.name, run.newest_step, served, len(run.pending), spec.lora.rank, when(spec.created)))
    return table("Runs", ["run", "newest step#", "served", "jobs#", "rank#", "created"], rows)


def run_details(run: RunStatus) -> object:
    """A run as a table of names and values."""
    spec, fork, served = run.spec, run.spec.forked_from, run.served
    refused = f"step {served.refused_step}: {served.refused_reason}" if served and served.refused_step else None
    return details(
        spec.name,
        [
            ("base model", spec.base_model),
            ("LoRA", f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}, {' '.join(spec.lora.targets)}"),
            ("created", when(spec.created)),
            ("forked from", f"{fork.run}@{fork.step}" if fork else None),
            ("newest step", run.newest_step),
            ("served", f"{served.model}, verified {when(served.verified)}" if served else "nothing yet"),
            ("log-prob error", f"{served.mean_abs_logprob_error:.2g} nats" if served else None),
            ("refused", refused),
            ("queued or running jobs", ", ".join(run.pending) or "none"),
        ],
    )
