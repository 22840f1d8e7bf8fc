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
    rank: Annotated[int, typer.Option(help="The LoRA's rank.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="The LoRA's alpha.  \\[default: twice the rank]")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A layer to adapt (q_proj, ..., down_proj); may be repeated.  \\[default: all]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of step 0's weights and the order of training data.")] = 0,
    base_model: Annotated[str | None, typer.Option(help="Must be the deployment's, which is the default.")] = None,
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
    """All runs."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.list_runs(), json, _runs)


@app.command("show")
def show_run(run: RunArgument, json: Json = False) -> None:
    """One run: its newest step, what vLLM serves, which jobs are under way."""
    with Tandem(patience=PATIENCE) as tandem:
        show(tandem.get_run(run), json, run_details)


def _runs(runs: list[RunStatus]) -> object:
    rows = [
        (
            run.spec.name,
            run.newest_step,
            run.served.model if run.served else None,
            len(run.pending),
            run.spec.lora.rank,
            when(run.spec.created),
        )
        for run in runs
    ]
    return table("Runs", ["run", "newest step#", "served", "jobs#", "rank#", "created"], rows)


def run_details(run: RunStatus) -> object:
    """A run for people."""
    spec, served = run.spec, run.served
    fork = spec.forked_from
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
            (
                "refused",
                f"step {served.refused_step}: {served.refused_reason}" if served and served.refused_step else None,
            ),
            ("jobs under way", ", ".join(run.pending) or "none"),
        ],
    )
