"""`tandem train job`: makes a job of a file of examples or groups, and shows its progress."""

import json as jsonlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn

from tandem.cli.common import PATIENCE, Json, RunArgument, err, fields, show
from tandem.cli.jobs import job_details
from tandem.client import Event, JobStatus, Tandem
from tandem.errors import InvalidInput

Wait = StrEnum("Wait", ["NO", "JOB", "SERVED"])


def job(
    run: RunArgument,
    file: Annotated[str, typer.Argument(help="JSON or JSON lines (see above); '-' is standard input.")],
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A setting, such as optimizer.learning_rate=1e-4; repeatable."
        ),
    ] = None,
    id: Annotated[  # noqa: A002
        str | None, typer.Option(help="Your own id for the job; sent twice with the same content it is one job.")
    ] = None,
    base_step: Annotated[
        int | None, typer.Option(help="Refuse unless the job would start from this step.  \\[default: the newest]")
    ] = None,
    wait: Annotated[
        Wait, typer.Option(help="Return when the job is queued (no), has succeeded, or its step is served.")
    ] = Wait.SERVED,
    json: Json = False,
) -> None:
    """Train a run by one job of yours, which makes its next step.

    FILE is one of: [bold]JSON lines[/bold] (or a JSON array), where each line is an example for SFT
    ({"messages": [...]}) or a group for RL ({"trajectories": [{"turns": [...], "reward": 1.0}, ...]}); or a whole
    [bold]request[/bold], {"kind": "rl", "groups": [...], "loss": {...}, ...}, as the HTTP API takes it.
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
            status = _wait(tandem, status, served=wait is Wait.SERVED, show_progress=err.is_terminal and not json)
        show(status, json, job_details)


def read_request(text: str) -> dict[str, Any]:
    """The training request in a file's text; raises InvalidInput with the line as its field."""
    try:
        content = jsonlib.loads(text)
    except ValueError:
        items = list(_lines(text))
    else:
        if isinstance(content, dict) and content.keys() & {"kind", "groups", "examples"}:
            return {"kind": "rl" if "groups" in content else "sft", **content}
        is_list = isinstance(content, list)
        items = [(f"[{i}]", item) for i, item in enumerate(content)] if is_list else [("line 1", content)]
    if not items:
        raise InvalidInput("the file is empty", field="FILE")
    kinds: dict[str, str] = {}  # kind -> place of the first item of this kind
    for place, item in items:
        if not isinstance(item, dict) or not {"trajectories", "messages", "token_ids"} & item.keys():
            problem = 'neither a group ("trajectories") nor an example ("messages" or "token_ids")'
            raise InvalidInput(problem, field=f"FILE {place}")
        kinds.setdefault("groups" if "trajectories" in item else "examples", place)
    if len(kinds) == 2:
        problem = f"groups (from {kinds['groups']}) and examples (from {kinds['examples']}) can't be in one job"
        raise InvalidInput(problem, field="FILE")
    return {"kind": "rl" if "groups" in kinds else "sft", next(iter(kinds)): [item for _, item in items]}


def _lines(text: str) -> Iterator[tuple[str, Any]]:
    """Each line's place and JSON."""
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.strip():
                yield f"line {number}", jsonlib.loads(line)
        except ValueError as error:
            raise InvalidInput(f"not JSON: {error}", field=f"FILE line {number}") from error


def apply_setting(request: dict[str, Any], assignment: str) -> None:
    """Set `optimizer.learning_rate=1e-4` in the request; the value is JSON, else text."""
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


def _wait(tandem: Tandem, job: JobStatus, *, served: bool, show_progress: bool) -> JobStatus:
    """Wait for the job, or until its step is served, behind a progress bar on stderr."""
    name = f"{job.run}@{job.spec.base_step + 1}"
    texts = "{task.completed:.0f}/{task.total:.0f}", "{task.fields[metrics]}"
    columns = SpinnerColumn(), "{task.description}", BarColumn(bar_width=30), *texts, TimeElapsedColumn()
    try:
        with Progress(*columns, console=err, disable=not show_progress) as progress:
            task = progress.add_task(f"{name} {job.state}", total=1, metrics="")

            def show_event(event: Event) -> None:
                phase = {"requeued": "queued again", "loaded": "training", "step": "training"}
                progress.update(task, description=f"{name} {phase.get(event.type, event.type)}")
                if event.type == "step":
                    metrics = fields(event.data["metrics"], ["loss", "reward_mean", "tokens_per_second"])
                    progress.update(task, completed=event.data["step"], total=event.data["steps"], metrics=metrics)

            job = tandem.wait_job(job.id, on_event=show_event)
            if served:
                progress.update(task, description=f"{name} waits for vLLM")
                tandem.wait_served(job.run, job.spec.base_step + 1)
                progress.update(task, description=f"{name} served")
    except KeyboardInterrupt:
        err.print(f"The job goes on; follow it with: tandem logs -f {job.id}")
        raise
    return job
