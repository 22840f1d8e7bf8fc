"""`tandem train sft` and `tandem train dpo`: a file becomes a chain of jobs, with progress, checkpoints and resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn, TimeRemainingColumn

from tandem.cli.common import Json, err, fields, out, show_line
from tandem.cli.train import apply_setting
from tandem.client import Event, Tandem
from tandem.client.chain import Chain, DPOTraining, SFTTraining
from tandem.client.toml_file import read_toml

_SHOWN = ["loss", "pair_accuracy", "reward_margin", "learning_rate", "tokens_per_second"]
_LINE_EVERY = 10  # optimizer steps, where the output is no terminal

Run = Annotated[str | None, typer.Argument(metavar="RUN", help="The run; it is made if it does not exist.")]
Data = Annotated[str | None, typer.Argument(metavar="DATA", help="A file or directory of examples (docs/data.md).")]


def _command(training: type[SFTTraining | DPOTraining], summary: str) -> Callable[..., None]:
    def command(
        run: Run = None,
        data: Data = None,
        config: Annotated[
            Path | None, typer.Option(help="A TOML file with the same names; options override it.")
        ] = None,
        format: Annotated[str | None, typer.Option(help="Of DATA.  \\[default: found by its first record]")] = None,  # noqa: A002
        held_out: Annotated[str | None, typer.Option(help="A file, or a share of DATA as 0.02, to evaluate.")] = None,
        epochs: Annotated[int | None, typer.Option(help="Passes over DATA.  \\[default: 1]")] = None,
        batch_size: Annotated[int | None, typer.Option(help="Examples per optimizer step.  \\[default: 32]")] = None,
        learning_rate: Annotated[
            float | None, typer.Option("--learning-rate", "--lr", help="\\[default: 2e-4; pairs: 2e-5]")
        ] = None,
        schedule: Annotated[str | None, typer.Option(help="constant, linear or cosine.  \\[default: cosine]")] = None,
        warmup: Annotated[float | None, typer.Option(help="Steps, or a share of all.  \\[default: 0.03]")] = None,
        checkpoint_every: Annotated[int | None, typer.Option(help="Optimizer steps per job.  \\[default: 100]")] = None,
        sequence_length: Annotated[int | None, typer.Option(help="Tokens of a row.  \\[default: 2048]")] = None,
        too_long: Annotated[str | None, typer.Option(help="refuse, drop or truncate.  \\[default: refuse]")] = None,
        full: Annotated[bool, typer.Option("--full", help="A new run trains all weights instead of a LoRA.")] = False,
        lora_rank: Annotated[int | None, typer.Option(help="Of a new run; alpha is twice that.")] = None,
        seed: Annotated[int | None, typer.Option(help="Of the order of the examples.  \\[default: 0]")] = None,
        setting: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="Another setting, such as loss.beta=0.2."),
        ] = None,
        json: Json = False,
    ) -> None:
        given: dict[str, Any] = {
            "run": run, "data": data, "format": format, "held_out": _share(held_out), "epochs": epochs,
            "batch_size": batch_size, "learning_rate": learning_rate, "schedule": schedule, "warmup": warmup,
            "checkpoint_every": checkpoint_every, "sequence_length": sequence_length, "too_long": too_long,
            "lora": None if lora_rank is None else {"rank": lora_rank, "alpha": 2 * lora_rank}, "seed": seed,
            "trainable": "full" if full else None,
        }  # fmt: skip

        def change(settings: dict[str, Any]) -> None:
            settings |= {name: value for name, value in given.items() if value is not None}
            for assignment in setting or []:
                apply_setting(settings, assignment)

        _train(Chain(read_toml(config, training, change)), json)

    command.__doc__ = summary
    return command


def _share(held_out: str | None) -> str | float | None:
    try:
        return None if held_out is None else float(held_out)
    except ValueError:
        return held_out


def _train(chain: Chain, json: bool) -> None:
    config = chain.config
    bar = SpinnerColumn(), "{task.description}", BarColumn(bar_width=24), MofNCompleteColumn()
    columns = *bar, "{task.fields[shown]}", TimeElapsedColumn(), TimeRemainingColumn()
    with Tandem() as tandem, Progress(*columns, console=err, disable=json or not err.is_terminal) as progress:
        task = progress.add_task(config.run, total=chain.total, shown="waits")
        if not json:
            err.print(f"{chain.examples} examples, {chain.total} optimizer steps in {len(chain.slices)} jobs")
        held_out = ""

        def on_step(step: int, event: Event) -> None:
            nonlocal held_out
            if event.type == "evaluated":
                held_out = fields(event.data["metrics"], ["held_out_loss", "held_out_pair_accuracy"])
            metrics = event.data.get("metrics", {})
            if event.type in ("step", "evaluated") and json:
                show_line({"step": step, "job": event.job, **metrics})
            elif event.type == "step":
                shown = f"{fields(metrics, _SHOWN)} {held_out}"
                progress.update(task, completed=step, shown=shown)
                if not err.is_terminal and (step % _LINE_EVERY == 0 or step == chain.total):
                    err.print(f"step {step}/{chain.total} {shown}", soft_wrap=True)
            elif event.type == "evaluated" and not err.is_terminal:
                err.print(f"step {step}/{chain.total} {held_out}", soft_wrap=True)

        try:
            job = chain.run(tandem, on_step)
            tandem.wait_served(config.run, job.spec.base_step + 1)
        except KeyboardInterrupt:
            err.print("The submitted jobs go on. The same command goes on with the rest.")
            raise
    if not json:
        out.print(f"vLLM serves {config.run}@{job.spec.base_step + 1}. {held_out}")


sft = _command(SFTTraining, """Train on a file of examples: conversations, prompts with completions, texts or tokens.

    The same command again goes on where it was, after Ctrl-C or anything else. `tandem data check DATA` shows what is
    trained.
    """)  # fmt: skip
dpo = _command(DPOTraining, """Train on pairs of a chosen and a rejected answer: DPO; IPO and SimPO by loss.kind.

    The same command again goes on where it was, after Ctrl-C or anything else.
    """)  # fmt: skip
