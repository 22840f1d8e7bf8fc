"""`tandem train`: makes a chain of jobs from a file of examples or pairs (`sft`, `dpo`), or one job
from a file (`job`)."""

import json as jsonlib
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tandem.cli.common import (
    PATIENCE,
    Json,
    RunArgument,
    err,
    fields,
    out,
    read_toml,
    show,
    show_line,
)
from tandem.cli.jobs import job_details
from tandem.client import Event, JobStatus, Tandem
from tandem.client.chain import Chain
from tandem.data.chain_plan import DPOTraining, SFTTraining
from tandem.errors import InvalidInput

app = typer.Typer(
    help="Train a run: by a file of examples or pairs, or by one job.", no_args_is_help=True
)
_SHOWN = [
    "loss",
    "reward_mean",
    "pair_accuracy",
    "reward_margin",
    "learning_rate",
    "tokens_per_second",
]
_LINE_EVERY = 10  # optimizer steps between two lines, if the output is not a terminal
Wait = StrEnum("Wait", ["NO", "JOB", "SERVED"])
Run = Annotated[
    str | None, typer.Argument(metavar="RUN", help="The run; it is made if it does not exist.")
]
Data = Annotated[
    str | None,
    typer.Argument(metavar="DATA", help="A file or directory of examples (docs/data.md)."),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another setting, such as optimizer.beta2=0.95; repeatable.",
    ),
]


def _from_file(training: type[SFTTraining | DPOTraining]) -> Callable[..., None]:
    def command(
        run: Run = None,
        data: Data = None,
        config: Annotated[
            Path | None, typer.Option(help="TOML with the same names; options override it.")
        ] = None,
        format: Annotated[  # noqa: A002
            str | None, typer.Option(help="Of DATA.  \\[default: found by its first record]")
        ] = None,
        held_out: Annotated[
            str | None, typer.Option(help="A file, or a share of DATA as 0.02, to evaluate.")
        ] = None,
        epochs: Annotated[
            int | None, typer.Option(help="Passes over DATA.  \\[default: 1]")
        ] = None,
        batch_size: Annotated[
            int | None, typer.Option(help="Examples per optimizer step.  \\[default: 32]")
        ] = None,
        learning_rate: Annotated[
            float | None,
            typer.Option("--learning-rate", "--lr", help="\\[default: 2e-4; pairs: 2e-5]"),
        ] = None,
        schedule: Annotated[
            str | None, typer.Option(help="constant, linear or cosine.  \\[default: cosine]")
        ] = None,
        warmup: Annotated[
            float | None, typer.Option(help="Steps, or a share of all.  \\[default: 0.03]")
        ] = None,
        checkpoint_every: Annotated[
            int | None, typer.Option(help="Optimizer steps per job.  \\[default: 100]")
        ] = None,
        sequence_length: Annotated[
            int | None, typer.Option(help="Tokens of a row.  \\[default: 2048]")
        ] = None,
        too_long: Annotated[
            str | None,
            typer.Option(help="refuse or drop; sft also: truncate.  \\[default: refuse]"),
        ] = None,
        full: Annotated[
            bool, typer.Option("--full", help="A new run trains all weights instead of a LoRA.")
        ] = False,
        lora_rank: Annotated[
            int | None, typer.Option(help="Of a new run; alpha is twice that.")
        ] = None,
        seed: Annotated[
            int | None, typer.Option(help="Of the order of the examples.  \\[default: 0]")
        ] = None,
        setting: Assignments = None,
        json: Json = False,
    ) -> None:
        given: dict[str, Any] = {
            "run": run,
            "data": data,
            "format": format,
            "held_out": held_out,
            "epochs": epochs,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "schedule": schedule,
            "warmup": warmup,
            "checkpoint_every": checkpoint_every,
            "sequence_length": sequence_length,
            "too_long": too_long,
            "seed": seed,
            "trainable": "full" if full else None,
        }

        def change(settings: dict[str, Any]) -> None:
            settings |= {name: value for name, value in given.items() if value is not None}
            if lora_rank is not None and isinstance(settings.setdefault("lora", {}), dict):
                settings["lora"] |= {"rank": lora_rank, "alpha": 2 * lora_rank}
            for assignment in setting or []:
                apply_setting(settings, assignment)

        _run_chain(Chain(read_toml(config, training, change)), json)

    return command


def _progress(json: bool) -> Progress:
    """A progress bar on stderr, if stderr is a terminal. Each task of the bar needs the field
    `shown`, a text that the bar prints."""
    counted = SpinnerColumn(), "{task.description}", BarColumn(bar_width=24), MofNCompleteColumn()
    times = TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(
        *counted, "{task.fields[shown]}", *times, console=err, disable=json or not err.is_terminal
    )


def _run_chain(chain: Chain, json: bool) -> None:
    config = chain.config
    with Tandem() as tandem, _progress(json) as progress:
        task = progress.add_task(config.run, total=chain.total, shown="waits")
        if not json:
            err.print(
                f"{chain.examples} examples, {chain.total} optimizer steps in {len(chain.slices)}"
                " jobs"
            )
        held_out = ""

        def on_step(step: int, event: Event) -> None:
            nonlocal held_out
            if event.type not in ("step", "evaluated"):
                return
            metrics = event.data["metrics"]
            if event.type == "evaluated":
                held_out = shown = fields(metrics, ["held_out_loss", "held_out_pair_accuracy"])
            else:
                shown = f"{fields(metrics, _SHOWN)} {held_out}"
                progress.update(task, completed=step, shown=shown)
            if json:
                show_line({"step": step, "job": event.job, **metrics})
            elif not err.is_terminal and (
                event.type == "evaluated" or step % _LINE_EVERY == 0 or step == chain.total
            ):
                err.print(f"step {step}/{chain.total} {shown}", soft_wrap=True)

        try:
            job = chain.run(tandem, on_step)
            tandem.wait_served(config.run, job.spec.base_step + 1)
        except KeyboardInterrupt:
            err.print("The submitted jobs go on. The same command goes on with the rest.")
            raise
    if not json:
        out.print(f"vLLM serves {config.run}@{job.spec.base_step + 1}. {held_out}")


app.command(
    "sft",
    help="""Train on a file of examples: conversations, prompts with completions, texts or tokens.

    The same command again goes on where it was, after Ctrl-C or anything else.
    `tandem data check DATA` shows what is trained.
    """,
)(_from_file(SFTTraining))
app.command(
    "dpo",
    help="""Train on pairs of a chosen and a rejected answer: DPO; IPO and SimPO by loss.kind.

    The same command again goes on where it was, after Ctrl-C or anything else.
    """,
)(_from_file(DPOTraining))


@app.command()
def job(
    run: RunArgument,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="JSON or JSON lines (see above); '-' is standard input."
        ),
    ],
    setting: Assignments = None,
    id: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            help="Your own id for the job; sent twice with the same content it is one job."
        ),
    ] = None,
    base_step: Annotated[
        int | None,
        typer.Option(
            help="Refuse unless the job would start from this step.  \\[default: the newest]"
        ),
    ] = None,
    wait: Annotated[
        Wait,
        typer.Option(
            help="Return when the job is queued (no), has succeeded, or its step is served."
        ),
    ] = Wait.SERVED,
    json: Json = False,
) -> None:
    """Submit one job, which makes the next step of a run.

    FILE is one of: [bold]JSON lines[/bold] (or a JSON array), where each line is an example for SFT
    ({"messages": [...]}), a pair for DPO ({"prompt": ..., "chosen": ..., "rejected": ...}) or a
    group for RL ({"trajectories": [{"turns": [...], "reward": 1.0}, ...]}); or a whole
    [bold]request[/bold], {"kind": "rl", "groups": [...], "loss": {...}, ...}, as the HTTP API takes
    it.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {file}: {error}", field="FILE") from error
    request = read_request(text)
    for assignment in setting or []:
        apply_setting(request, assignment)
    if id is not None:
        request["id"] = id
    if base_step is not None:
        request["base_step"] = base_step
    with Tandem(patience=PATIENCE if wait is Wait.NO else 60.0) as tandem:
        status = tandem.train(run, request)
        if wait is not Wait.NO:
            status = _wait(tandem, status, served=wait is Wait.SERVED, json=json)
        show(status, json, job_details)


def read_request(text: str) -> dict[str, Any]:
    """The training request in a file's text. Raises InvalidInput; its field names the line or the
    list's item, if a single one is wrong."""
    whole = {"groups": "rl", "examples": "sft", "pairs": "dpo"}
    try:
        content = jsonlib.loads(text)
    except ValueError:
        items = list(_lines(text))
    else:
        if isinstance(content, dict) and content.keys() & {"kind", *whole}:
            kind = next((kind for name, kind in whole.items() if name in content), "sft")
            return {"kind": kind, **content}
        is_list = isinstance(content, list)
        items = (
            [(f"[{i}]", item) for i, item in enumerate(content)]
            if is_list
            else [("line 1", content)]
        )
    if not items:
        raise InvalidInput("the file is empty", field="FILE")
    # The keys by which an item's kind is recognised. Pairs come before examples, because a pair may
    # also have a prompt or messages.
    marks = {
        "groups": {"trajectories"},
        "pairs": {"chosen"},
        "examples": {"messages", "prompt", "text", "token_ids"},
    }
    kinds: dict[str, str] = {}  # kind -> place of the first item of this kind
    for place, item in items:
        keys = item.keys() if isinstance(item, dict) else set[str]()
        if not (kind := next((kind for kind, names in marks.items() if names & keys), "")):
            examples = '("messages", "prompt", "text" or "token_ids")'
            problem = (
                f'neither a group ("trajectories") nor a pair ("chosen") nor an example {examples}'
            )
            raise InvalidInput(problem, field=f"FILE {place}")
        kinds.setdefault(kind, place)
    if len(kinds) > 1:
        found = " and ".join(f"{kind} (from {place})" for kind, place in kinds.items())
        raise InvalidInput(f"{found} can't be in one job", field="FILE")
    return {"kind": whole[kind], kind: [item for _, item in items]}


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                yield f"line {number}", jsonlib.loads(line)
        except ValueError as error:
            raise InvalidInput(f"not JSON: {error}", field=f"FILE line {number}") from error


def apply_setting(request: dict[str, Any], assignment: str) -> None:
    """Set the value of an assignment such as `optimizer.learning_rate=1e-4` in the request. A value
    that is not valid JSON is used as a string. Raises InvalidInput (field `--set`) if the
    assignment is not NAME=VALUE, or if a parent in NAME is not an object."""
    name, equals, text = assignment.partition("=")
    if not equals or not name:
        raise InvalidInput(f"{assignment!r} is not NAME=VALUE", field="--set")
    try:
        value = jsonlib.loads(text)
    except ValueError:
        value = text
    *parents, last = name.split(".")
    inner: Any = request
    for parent in parents:
        inner = inner.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise InvalidInput(f"{name}: {parent} has no settings below it", field="--set")
    inner[last] = value


def _wait(tandem: Tandem, job: JobStatus, *, served: bool, json: bool) -> JobStatus:
    """Wait for the job, or until its step is served."""
    name = f"{job.run}@{job.spec.base_step + 1}"
    try:
        with _progress(json) as progress:
            task = progress.add_task(f"{name} {job.state}", total=None, shown="")

            def show_event(event: Event) -> None:
                progress.update(task, description=f"{name} {event.type}")
                if event.type == "step":
                    done, total = event.data["step"], event.data["steps"]
                    progress.update(
                        task,
                        completed=done,
                        total=total,
                        shown=fields(event.data["metrics"], _SHOWN),
                    )

            job = tandem.wait_job(job.id, on_event=show_event)
            if served:
                progress.update(task, description=f"{name} waits for vLLM")
                tandem.wait_served(job.run, job.spec.base_step + 1)
    except KeyboardInterrupt:
        err.print(f"The job goes on; follow it with: tandem logs -f {job.id}")
        raise
    return job
