"""`tandem jobs`, `tandem logs` and `tandem memory`."""

import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from typing import Annotated, cast, get_args

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from tandem.cli.common import (
    JobArgument,
    Json,
    details,
    err,
    fields,
    make_client,
    show,
    show_line,
    size,
    table,
    when,
)
from tandem.client import AttemptMemory, Event, JobStatus, Tandem
from tandem.client.http import raise_if_failed
from tandem.client.memory import KINDS
from tandem.spool.schema import TERMINAL, JobState, PackedData, SessionJob

app = typer.Typer(help="Look at training jobs, and stop them.", no_args_is_help=True)
_STATES = ", ".join(get_args(JobState))
_POLL_SECONDS = 0.5
# Event type -> the fields that are printed from the event's data.
_FIELDS = {
    "claimed": ["runner"],
    "waiting": ["seconds", "reason"],
    "slept": ["seconds"],
    "woken": ["seconds"],
    "started": ["device"],
    "offered": ["transport"],
    "checkpoint": ["step", "seconds"],
    "sent": ["transport", "bytes", "seconds"],
    "served": ["step", "model", "mean_abs_logprob_error"],
    "released": ["bytes", "processes"],
    "succeeded": ["step"],
}
_GPU_COLUMNS = dict(
    zip(KINDS, ("allocated#", "reserved#", "device used#", "host pinned#", "peak#"), strict=True)
)
_CPU_COLUMNS = {"allocated": "resident set#", "peak": "peak#"}


@app.command("list")
def list_jobs(
    run: Annotated[str | None, typer.Option(help="Only this run's.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help=f"Only in this state ({_STATES}); repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most this many, the newest.")] = 50,
    before: Annotated[
        str | None, typer.Option(help="Only jobs older than this one: the page before it.")
    ] = None,
    json: Json = False,
) -> None:
    """List jobs, oldest first."""
    show(
        make_client().list_jobs(run, cast(list[JobState], state or []), limit, before),
        json,
        _jobs_table,
    )


@app.command("show")
def show_job(job: JobArgument, json: Json = False) -> None:
    """Show a job: its state, its data, and why it failed."""
    show(make_client().get_job(job), json, job_details)


@app.command()
def cancel(job: JobArgument, json: Json = False) -> None:
    """Stop a job: a queued job at once, a running job within seconds. The job's run keeps its
    newest step."""
    show(make_client().cancel(job), json, job_details)


def logs(
    job: JobArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends; also its events.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=1, help="Only this many lines, the last.")
    ] = None,
    json: Json = False,
) -> None:
    """Print the output of a job's ranks. With -f, also print the job's events, until the job ends;
    the exit status is 3 if the job fails."""
    tandem = make_client()
    if follow:
        _follow(tandem, job, json)
        return
    text = tandem.logs(job)
    if lines is not None:
        text = "".join(text.splitlines(keepends=True)[-lines:])
    if json:
        show_line({"job": job, "log": text})
    else:
        sys.stdout.write(text)


def _follow(tandem: Tandem, job: str, json: bool) -> None:
    """Print log and events as they come, until the job ends. Raises JobFailed if the job fails."""
    offset, last_seq = 0, -1
    decode = getincrementaldecoder("utf-8")("replace").decode  # log parts may split a character
    while True:
        # The state is read before the events and the log: if the job has ended, the whole log and
        # all events have already been written.
        status = tandem.get_job(job)
        for event in tandem.job_events(job, last_seq):
            last_seq = event.seq
            if json:
                show_line({"event": event})
            else:
                err.print(
                    f"[dim]{when(event.time)}[/dim] {describe(event)}",
                    highlight=False,
                    soft_wrap=True,
                )
        while (part := tandem.log_part(job, offset)).data:
            offset, text = part.next_offset, decode(part.data)
            show_line({"log": text}) if json else print(text, end="", flush=True)
        if status.state in TERMINAL:
            return raise_if_failed(status)
        time.sleep(_POLL_SECONDS)


def describe(event: Event) -> str:
    """One line about an event, in rich's markup."""
    data = event.data
    if event.type == "step":
        names = ["loss", "reward_mean", "grad_norm", "entropy", "tokens_per_second"]
        metrics = fields(data.get("metrics", {}), names)
        return f"[cyan]step {data.get('step')}/{data.get('steps')} {metrics}[/cyan]"
    if event.type == "loaded":
        return f"loaded {fields(data.get('seconds', {}), list(data.get('seconds', {})))}"
    if error := data.get("error"):
        color = "yellow" if event.type == "requeued" else "red"
        return (
            f"[{color}]{event.type}[/{color}] {error.get('type')}:"
            f" {escape(error.get('message', ''))}"
        )
    color = "green" if event.type in ("succeeded", "served") else "bold"
    return f"[{color}]{event.type}[/{color}] {escape(fields(data, _FIELDS.get(event.type, [])))}"


def _jobs_table(jobs: list[JobStatus]) -> object:
    named = any(job.spec.submitted_by for job in jobs)
    rows = [
        (
            job.id,
            job.run,
            job.kind,
            _state(job),
            f"{job.spec.base_step} → {job.spec.base_step + 1}",
            f"{job.attempt}/{job.spec.max_attempts}",
            when(job.spec.created),
            *((job.spec.submitted_by,) if named else ()),
            job.error.type if job.error else None,
        )
        for job in jobs
    ]
    columns = ["job", "run", "kind", "state", "step", "attempt#", "created"]
    return table("Jobs", [*columns, *(["by"] if named else []), "error"], rows)


def _state(job: JobStatus) -> str:
    return f"{job.state} ({job.phase})" if job.phase else job.state


def _data_details(data: PackedData) -> list[tuple[str, object]]:
    rewards = (
        None if data.reward_mean is None else f"{data.reward_mean:.4g} ± {data.reward_std or 0:.3g}"
    )
    left_out = f"{data.dropped_groups} groups, {data.dropped_trajectories} trajectories"
    return [
        (
            "data",
            (
                f"{data.num_groups} groups, {data.num_trajectories} trajectories,"
                f" {data.num_tokens} tokens ({data.num_unshared_tokens} without sharing),"
                f" {data.num_rows} rows of {data.sequence_length}"
            ),
        ),
        ("left out", left_out if data.dropped_groups or data.dropped_trajectories else None),
        ("truncated", data.truncated_trajectories or None),
        ("rewards", rewards),
    ]


def job_details(job: JobStatus) -> object:
    error = job.error
    last = job.last_error if job.state not in TERMINAL else None
    return details(
        f"Job {job.id}",
        [
            ("run", job.run),
            ("state", _state(job)),
            ("cancel", "requested" if job.cancel_requested else None),
            ("kind", job.kind),
            ("from step", job.spec.base_step),
            ("made step", job.step),
            ("attempt", f"{job.attempt} of {job.spec.max_attempts}"),
            ("created", when(job.spec.created)),
            ("by", job.spec.submitted_by),
            ("finished", when(job.finished)),
            *([] if isinstance(job.spec, SessionJob) else _data_details(job.spec.data)),
            ("labels", " ".join(f"{k}={v}" for k, v in job.spec.labels.items()) or None),
            ("attempt before", f"{last.type}: {last.message}" if last else None),
            ("error", f"{error.type}: {error.message}" if error else None),
            ("end of its log", error.log_tail if error and error.log_tail else None),
        ],
    )


def memory(job: JobArgument, json: Json = False) -> None:
    """Show the memory of each rank of a job after each phase, and the memory left in use on the
    GPUs after the job's end."""
    show(make_client().memory(job), json, lambda attempts: memory_report(job, attempts))


def memory_report(job: str, attempts: list[AttemptMemory]) -> object:
    if not attempts:
        return f"Job {job} has not started."
    return Group(*(part for attempt in attempts for part in _attempt_memory(job, attempt)))


def _attempt_memory(job: str, attempt: AttemptMemory) -> Iterator[Table | str]:
    on_cpu = attempt.device == "cpu"
    columns = _CPU_COLUMNS if on_cpu else _GPU_COLUMNS
    so_far = "" if attempt.released else ", so far"
    rows = [
        (phase, rank, *(size(kinds.get(kind)) for kind in columns))
        for phase, rank, kinds in _memory_rows(attempt)
    ]
    title = f"Memory of job {job}, attempt {attempt.attempt}{so_far}"
    phases = table(title, ["phase", "rank#", *columns.values()], rows)
    if on_cpu:
        phases.caption = "On the CPU: each rank's resident set. Nothing can be left on a device."
        phases.caption_justify = "left"
    yield phases
    if not attempt.released:
        return
    if not on_cpu:
        left = []
        for uuid in attempt.most | attempt.left:
            ranks = ", ".join(
                str(rank) for rank, memory in attempt.ranks.items() if memory.uuid == uuid
            )
            left.append(
                (
                    uuid,
                    ranks,
                    size(attempt.most.get(uuid)),
                    size(attempt.left.get(uuid)) or "not measured",
                )
            )
        yield table(
            "Left on the device after the end", ["GPU", "ranks", "most in use#", "left#"], left
        )
    if attempt.processes:
        yield f"{attempt.processes} processes of the job survived SIGKILL."


def _memory_rows(attempt: AttemptMemory) -> Iterator[tuple[str, object, dict[str, int]]]:
    """The table's rows (phase, rank, bytes), sorted by phase. A phase that runs once has a row per
    rank. A phase that runs several times has two rows per rank: the memory after the phase's last
    run, and the maximum over all runs. A phase in `attempt.last_step` has one row, with the
    maximum over all ranks.
    """
    ranks = attempt.ranks.items()
    for phase in dict.fromkeys(
        phase for memory in attempt.ranks.values() for phase in memory.phases
    ):
        repeated = any(phase in memory.highest for memory in attempt.ranks.values())
        for rank, memory in ranks:
            if phase in memory.phases:
                yield f"{phase}, last" if repeated else phase, rank, memory.phases[phase]
        for rank, memory in ranks:
            if phase in memory.highest:
                yield f"{phase}, highest", rank, memory.highest[phase]
    for phase, kinds in attempt.last_step.items():
        yield f"{phase}, last", "fullest", kinds
