"""`tandem train`: a file of examples or groups becomes a job, and the terminal shows how it gets on."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tandem.cli.jobs import job_details
from tandem.cli.output import PATIENCE, Json, err, fields, show
from tandem.cli.runs import RunArgument
from tandem.client import Event, JobStatus, Tandem
from tandem.errors import InvalidInput


class Wait(StrEnum):
    """What the command waits for."""

    NO = "no"
    JOB = "job"
    SERVED = "served"


def train(
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
        Wait, typer.Option(help="Return when the job is queued, has succeeded, or is served.")
    ] = Wait.SERVED,
    json: Json = False,
) -> None:
    """Train a run by one job, which makes its next step.

    FILE is one of: [bold]JSON lines[/bold] (or a JSON array), where each line is an example for SFT
    ({"messages": [...]}) or a group for RL ({"trajectories": [{"turns": [...], "reward": 1.0}, ...]}); or a whole
    [bold]request[/bold], {"kind": "rl", "groups": [...], "loss": {...}, ...}, as the HTTP API takes it.
    """
    request = read_request(sys.stdin.read() if file == "-" else _read(Path(file)))
    for assignment in setting or []:
        apply_setting(request, assignment)
    if id is not None:
        request["id"] = id
    if base_step is not None:
        request["base_step"] = base_step
    with Tandem(patience=PATIENCE if wait is Wait.NO else 60.0) as tandem:
        status = tandem.train(run, request)
        if wait is not Wait.NO:
            status = _watch(tandem, status, wait, quiet=json)
        show(status, json, job_details)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {path}: {error}", field="FILE") from error


def read_request(text: str) -> dict[str, Any]:
    """The training request in a file's text; InvalidInput (field: the line) where it is none."""
    try:
        whole = jsonlib.loads(text)
    except ValueError:
        return _from_items(_lines(text))
    if isinstance(whole, list):
        return _from_items([(f"[{i}]", item) for i, item in enumerate(whole)])
    if isinstance(whole, dict) and ("kind" in whole or "groups" in whole or "examples" in whole):
        return {"kind": "rl" if "groups" in whole else "sft", **whole}
    return _from_items([("line 1", whole)])


def _lines(text: str) -> list[tuple[str, Any]]:
    items = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                items.append((f"line {number}", jsonlib.loads(line)))
            except ValueError as error:
                raise InvalidInput(f"not JSON: {error}", field=f"FILE line {number}") from error
    return items


def _from_items(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if not items:
        raise InvalidInput("the file is empty", field="FILE")
    kinds: dict[str, str] = {}
    for where, item in items:
        if not isinstance(item, Mapping) or not {"trajectories", "messages", "token_ids"} & item.keys():
            raise InvalidInput('neither a group ("trajectories") nor an example ("messages" or "token_ids")',
                               field=f"FILE {where}")  # fmt: skip
        kinds.setdefault("rl" if "trajectories" in item else "sft", where)
    if len(kinds) == 2:
        raise InvalidInput(f"groups (from {kinds['rl']}) and examples (from {kinds['sft']}) can't be in one job",
                           field="FILE")  # fmt: skip
    content = [item for _, item in items]
    return {"kind": "rl", "groups": content} if "rl" in kinds else {"kind": "sft", "examples": content}


def apply_setting(request: dict[str, Any], assignment: str) -> None:
    """`optimizer.learning_rate=1e-4` into the request; the value is JSON, or text where it is none."""
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


class JobBar:
    """A live progress bar fed by events; where stderr is no terminal, nothing but the end is shown."""

    def __init__(self, status: JobStatus, quiet: bool) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            console=err,
            disable=quiet or not err.is_terminal,
        )
        self._name = f"{status.run}@{status.spec.base_step + 1}"
        self._task = self._progress.add_task(f"{self._name} {status.state}", total=1, metrics="")

    def __enter__(self) -> JobBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def event(self, event: Event) -> None:
        """Show what an event says."""
        data = event.data
        if event.type == "step":
            metrics = fields(data.get("metrics", {}), ["loss", "reward_mean", "tokens_per_second"])
            self._progress.update(
                self._task,
                completed=data.get("step", 0),
                total=data.get("steps", 1),
                metrics=metrics,
                description=f"{self._name} training",
            )
        else:
            self.say({"requeued": "queued again", "loaded": "training"}.get(event.type, event.type))

    def say(self, what: str) -> None:
        """Show what is being waited for."""
        self._progress.update(self._task, description=f"{self._name} {what}")


def _watch(tandem: Tandem, status: JobStatus, wait: Wait, *, quiet: bool) -> JobStatus:
    try:
        with JobBar(status, quiet) as bar:
            status = tandem.wait_job(status.id, on_event=bar.event)
            if wait is Wait.SERVED:
                bar.say("waits for vLLM")
                tandem.wait_served(status.run, status.spec.base_step + 1)
                bar.say("served")
    except KeyboardInterrupt:
        err.print(f"The job goes on; follow it with: tandem logs -f {status.id}")
        raise
    return status
