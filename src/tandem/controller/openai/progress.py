"""Reads the progress of a fine-tuning from its run and from the jobs of its chain: status, names,
events, checkpoints and metrics. This module changes nothing on the volume."""

import csv
import io
import re
from contextlib import suppress
from typing import Any

from tandem.controller.deployment import Deployment
from tandem.controller.openai.schemas import ORGANIZATION
from tandem.data.chain_plan import Slice, slices
from tandem.errors import CheckpointDamaged, NotFound
from tandem.spool import Spool
from tandem.spool.schema import Event, Job, JobState
from tandem.spool.schema.tuning import Tuning, TuningPlan

_RESULTS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
_MORE_RESULTS = ("learning_rate",)
_LOSSES = {"step": ("training", "train_loss"), "evaluated": ("validation", "full_valid_loss")}
"""Type of an event -> the word for its loss in messages, and OpenAI's name of the metric."""


def model_name(deployment: Deployment, tuning: Tuning, step: int) -> str:
    """The model's name in OpenAI's API: `ft:<base>:<organization>:<suffix>:<run>@<step>`. The last
    part, `<run>@<step>`, is the model's name in vLLM."""
    base = slug(deployment.base_model.rstrip("/").rsplit("/", 1)[-1], 64)
    return f"ft:{base}:{ORGANIZATION}:{slug(tuning.suffix or '', 64)}:{tuning.run}@{step}"


def slug(text: str, most: int) -> str:
    """The text, cut to `most` characters. A dash replaces each series of characters other than
    letters, digits and dots."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:most].strip("-.")


def run_name(tuning_id: str, suffix: str | None) -> str:
    """The name of the fine-tuning's run: `ft-<suffix>-<end of the id>`."""
    parts = ["ft", slug(suffix or "", 40).lower(), tuning_id[-12:].lower()]
    return "-".join(part for part in parts if part)


def part_id(tuning: Tuning, part: int, pauses: int) -> str:
    """The id of the job that trains one part of the chain. A pause cancels the queued job of a
    part. After the pause, the part gets a new job with another id.

    Args:
        part: the part's number, from 0.
        pauses: the number of pauses before the job.
    """
    again = f".{pauses}" if pauses else ""
    return f"{tuning.id}.{part:05}{again}"


def slices_of(plan: TuningPlan) -> list[Slice]:
    """The parts of the chain, as ranges of optimizer steps."""
    epochs = plan.hyperparameters.n_epochs
    assert epochs != "auto"
    return slices(plan.steps, plan.steps // epochs, plan.checkpoint_every)


def part_jobs(spool: Spool, tuning: Tuning, part: int) -> list[tuple[JobState, Job]]:
    """The jobs of a part, oldest first. A part has several jobs if the fine-tuning was paused.

    Args:
        part: the part's number, from 0.
    """
    found = []
    for pauses in range(tuning.pauses + 1):
        with suppress(NotFound):
            found.append(spool.jobs.get(part_id(tuning, part, pauses)))
    return found


def steps_made(spool: Spool, tuning: Tuning) -> int:
    """The number of parts that have made their checkpoints. Raises NotFound if the run does not
    exist. Raises CheckpointDamaged if another job made the run's newest step."""
    newest = spool.checkpoints.newest(tuning.run)
    made = spool.checkpoints.manifest(tuning.run, newest).job if newest else None
    if made is not None and not made.startswith(f"{tuning.id}."):
        raise CheckpointDamaged(
            f"the run {tuning.run} was trained by {made}, which is not a part of {tuning.id}",
            field="run",
        )
    return newest


def status_of(spool: Spool, tuning: Tuning) -> str:
    """The fine-tuning's status, as a word of OpenAI's API."""
    if tuning.end is not None:
        return tuning.end.status
    if tuning.cancelled is not None:
        return "cancelled"
    if tuning.plan is None:
        return "validating_files"
    done = 0
    with suppress(NotFound, CheckpointDamaged):
        done = steps_made(spool, tuning)
    running = any(state == "running" for state, _ in part_jobs(spool, tuning, done))
    # OpenAI's clients have no status for a paused job.
    return "running" if running or (done and not tuning.paused) else "queued"


def job_events(spool: Spool, tuning: Tuning) -> list[tuple[Slice, Job, list[Event]]]:
    """The events of each job of the chain, in the order of the parts."""
    found = []
    for part in slices_of(tuning.plan) if tuning.plan else ():
        jobs = part_jobs(spool, tuning, part.number)
        found += [(part, job, spool.events.read(job.spec.id)) for _, job in jobs]
        if not jobs:
            with suppress(NotFound, CheckpointDamaged):
                if steps_made(spool, tuning) > part.number:
                    continue  # the part's jobs were removed meanwhile
            break
    return found


def measured(spool: Spool, tuning: Tuning) -> dict[int, dict[str, float]]:
    """OpenAI's metrics of each optimizer step. If a step ran in several attempts, the metrics of
    the last attempt count."""
    rows: dict[int, dict[str, float]] = {}
    for part, _, events in job_events(spool, tuning):
        for event in events:
            if event.type == "step":
                step = part.first + int(event.data["step"])
                rows[step] = {"step": step, **_named(event.data["metrics"])}
            elif event.type == "evaluated":
                step = part.first + int(event.data["step"])
                rows.setdefault(step, {"step": step}).update(_named(event.data["metrics"]))
    return dict(sorted(rows.items()))


_NAMES = {
    "loss": "train_loss",
    "pair_accuracy": "train_accuracy",
    "reward_margin": "train_reward_margin",
    "tokens": "train_tokens",
    "learning_rate": "learning_rate",
    "held_out_loss": "full_valid_loss",
    "held_out_pair_accuracy": "full_valid_accuracy",
}


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[key] for key, name in _NAMES.items() if metrics.get(key) is not None}


def results(rows: dict[int, dict[str, float]]) -> bytes:
    """The result file: CSV with OpenAI's columns and the learning rate. A cell without a value is
    empty."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_RESULTS + _MORE_RESULTS)
    for row in rows.values():
        values = row | {"valid_loss": row.get("full_valid_loss", "")}
        table.writerow([values.get(name, "") for name in _RESULTS + _MORE_RESULTS])
    return text.getvalue().encode()


def tuning_events(spool: Spool, tuning: Tuning) -> list[dict[str, Any]]:
    """The fine-tuning's events as objects of OpenAI's API, oldest first. The id of an event never
    changes."""
    own = tuning.id.removeprefix("ftjob-")
    found: list[tuple[float, int, dict[str, Any]]] = []

    def add(at: float, name: str, message: str, level: str = "info", data: Any = None) -> None:
        event = {
            "object": "fine_tuning.job.event",
            "id": f"ftevent-{own}-{name}",
            "created_at": int(at),
            "level": level,
            "message": message,
            "type": "metrics" if data else "message",
            "data": data,
        }
        found.append((at, len(found), event))

    files = " and ".join(filter(None, (tuning.training_file, tuning.validation_file)))
    add(tuning.created, "created", f"Created fine-tuning job: {tuning.id}")
    add(tuning.created, "validating", f"Validating {files}")
    if plan := tuning.plan:
        add(plan.made, "validated", "Files validated, moving job to queued state")
    for number, notice in enumerate(tuning.notices):
        add(notice.time, f"notice-{number}", notice.text, notice.level)
    total = tuning.plan.steps if tuning.plan else 0
    for part, job, events in job_events(spool, tuning):
        job_name = job.spec.id.removeprefix(f"{tuning.id}.")
        for event in events:
            name, step = f"{job_name}-{event.seq}", part.first + int(event.data.get("step") or 0)
            if event.type == "claimed" and part.number == 0 and event.attempt == 1:
                add(event.time, name, "Fine-tuning job started")
            elif event.type in _LOSSES:
                what, key = _LOSSES[event.type]
                values = {"step": step, "total_steps": total, **_named(event.data["metrics"])}
                loss = values.get(key)
                shown = "?" if loss is None else f"{loss:.4f}"
                message = f"Step {step}/{total}: {what} loss={shown}"
                add(event.time, name, message, data=values)
            elif event.type == "waiting":
                add(event.time, name, f"The job waits: {event.data.get('reason')}")
            elif event.type == "requeued":
                reason = event.data.get("error", {}).get("message", "it was stopped")
                add(event.time, name, f"An attempt ended ({reason}) and is made again", "warn")
            elif event.type == "checkpoint":
                add(event.time, name, f"Checkpoint created at step {part.last}")
    if end := tuning.end:
        last = {
            "succeeded": ("The job has successfully completed", "info"),
            "cancelled": ("The job was cancelled", "info"),
            "failed": (f"The job failed: {end.message}", "error"),
        }
        add(end.finished, "end", *last[end.status])
    return [event for *_, event in sorted(found, key=lambda one: one[:2])]


def checkpoints_of(deployment: Deployment, tuning: Tuning) -> list[dict[str, Any]]:
    """The fine-tuning's checkpoints that exist, as objects of OpenAI's API, newest first."""
    found: list[dict[str, Any]] = []
    if tuning.plan is None:
        return found
    spool, rows = deployment.spool, measured(deployment.spool, tuning)
    parts = slices_of(tuning.plan)
    with suppress(NotFound):
        for step in reversed(spool.checkpoints.steps(tuning.run)):
            with suppress(NotFound, CheckpointDamaged):
                manifest = spool.checkpoints.manifest(tuning.run, step)
                if not (manifest.job or "").startswith(f"{tuning.id}."):
                    continue
                last = parts[step - 1].last
                found.append(
                    {
                        "object": "fine_tuning.job.checkpoint",
                        "id": f"ftckpt-{tuning.id.removeprefix('ftjob-')}-{step}",
                        "created_at": int(manifest.created),
                        "fine_tuned_model_checkpoint": model_name(deployment, tuning, step),
                        "fine_tuning_job_id": tuning.id,
                        "step_number": last,
                        "metrics": rows.get(last, {"step": last}),
                    }
                )
    return found
