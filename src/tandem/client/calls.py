"""Every call of the API, and what is made of several calls (waiting); no I/O here, so both clients use it as it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_json

from tandem.client.wire import Call, Steps, send
from tandem.controller.schemas import CheckpointInfo, JobStatus, RolledBack, RunStatus
from tandem.data.trajectories import AdvantageSettings, Group, PackingSettings, SFTExample
from tandem.errors import JobFailed, NotServed
from tandem.spool.fs import new_ulid
from tandem.spool.schema import (
    TERMINAL,
    JobState,
    LoraShape,
    Manifest,
    OptimizerSettings,
    RLLoss,
    Served,
    SFTLoss,
)

JOB_SECONDS = 24 * 3600.0
SERVED_SECONDS = 600.0
# A submit is answered once its batch is packed, and others' batches before it.
PACKING_SECONDS = 900.0
_SERVED_POLL_SECONDS = 0.25
_ENDED_POLL_SECONDS = 0.05
LOG_OFFSET = "Tandem-Log-Offset"


class SFTOptions(TypedDict, total=False):
    """What a job may set; what is left out has the defaults of `tandem.controller.schemas.SFTRequest`."""

    id: str
    base_step: int
    loss: SFTLoss | Mapping[str, Any]
    optimizer: OptimizerSettings | Mapping[str, Any]
    packing: PackingSettings | Mapping[str, Any]
    deadline_seconds: float
    stall_seconds: float
    max_attempts: int
    labels: Mapping[str, str]


class RLOptions(TypedDict, total=False):
    """What a job may set; what is left out has the defaults of `tandem.controller.schemas.RLRequest`."""

    id: str
    base_step: int
    loss: RLLoss | Mapping[str, Any]
    advantage: AdvantageSettings | Mapping[str, Any]
    optimizer: OptimizerSettings | Mapping[str, Any]
    packing: PackingSettings | Mapping[str, Any]
    deadline_seconds: float
    stall_seconds: float
    max_attempts: int
    labels: Mapping[str, str]


@dataclass(frozen=True)
class LogPart:
    """Some of a job's log; `next_offset` is where the next part begins, in bytes."""

    data: bytes
    next_offset: int


def _reads[M: BaseModel](model: type[M]) -> Any:
    return lambda response: model.model_validate_json(response.content)


def _reads_list[M: BaseModel](model: type[M]) -> Any:
    adapter = TypeAdapter(list[model])  # type: ignore[valid-type]
    return lambda response: adapter.validate_json(response.content)


def _body(content: Mapping[str, Any]) -> bytes:
    # NaN goes out as NaN: the controller then says which field it is in.
    return to_json({key: value for key, value in content.items() if value is not None}, inf_nan_mode="constants")


def run_path(run: str, *more: str) -> str:
    """`/v1/runs/<run>/...`."""
    return "/".join(["/v1/runs", *(quote(part, safe="") for part in (run, *more))])


def job_path(job: str, *more: str) -> str:
    """`/v1/jobs/<id>/...`."""
    return "/".join(["/v1/jobs", *(quote(part, safe="") for part in (job, *more))])


# ---------------------------------------------------------------- runs


def create_run(
    name: str,
    base_model: str | None,
    lora: LoraShape | Mapping[str, Any] | None,
    weights: str | None,
    seed: int | None,
) -> Call[RunStatus]:
    if isinstance(lora, LoraShape):
        lora = lora.model_dump(exclude_unset=True)  # which targets are the default is the controller's to say
    body = _body({"name": name, "base_model": base_model, "lora": lora, "weights": weights, "seed": seed})
    return Call("POST", "/v1/runs", _reads(RunStatus), body=body)


def get_run(run: str) -> Call[RunStatus]:
    return Call("GET", run_path(run), _reads(RunStatus))


def list_runs() -> Call[list[RunStatus]]:
    return Call("GET", "/v1/runs", _reads_list(RunStatus))


def fork(run: str, step: int, name: str) -> Call[RunStatus]:
    return Call("POST", run_path(run, "fork"), _reads(RunStatus), body=_body({"step": step, "name": name}))


def rollback(run: str, step: int) -> Call[RolledBack]:
    body = _body({"step": step})
    return Call("POST", run_path(run, "rollback"), _reads(RolledBack), body=body, idempotent=False)


def checkpoints(run: str) -> Call[list[CheckpointInfo]]:
    return Call("GET", run_path(run, "checkpoints"), _reads_list(CheckpointInfo))


def checkpoint(run: str, step: int) -> Call[Manifest]:
    return Call("GET", run_path(run, "checkpoints", str(step)), _reads(Manifest))


# ---------------------------------------------------------------- jobs


def train_rl(run: str, groups: Sequence[Group | Mapping[str, Any]], options: RLOptions) -> Call[JobStatus]:
    return _train(run, {"kind": "rl", "groups": groups, **options})


def train_sft(run: str, examples: Sequence[SFTExample | Mapping[str, Any]], options: SFTOptions) -> Call[JobStatus]:
    return _train(run, {"kind": "sft", "examples": examples, **options})


def train(run: str, request: Mapping[str, Any]) -> Call[JobStatus]:
    """A whole request, `kind` and all."""
    return _train(run, request)


def _train(run: str, request: Mapping[str, Any]) -> Call[JobStatus]:
    # The id is ours, so a submit that is sent again after a lost answer is the same job.
    body = _body({**request, "id": request.get("id") or new_ulid()})
    return Call("POST", run_path(run, "train"), _reads(JobStatus), body=body, seconds=PACKING_SECONDS)


def get_job(job: str) -> Call[JobStatus]:
    return Call("GET", job_path(job), _reads(JobStatus))


def list_jobs(run: str | None, states: Sequence[JobState], limit: int) -> Call[list[JobStatus]]:
    params = {"state": list(states), "limit": limit} | ({} if run is None else {"run": run})
    return Call("GET", "/v1/jobs", _reads_list(JobStatus), params=params)


def cancel(job: str) -> Call[JobStatus]:
    return Call("POST", job_path(job, "cancel"), _reads(JobStatus))


def log_part(job: str, offset: int = 0, tail: int | None = None) -> Call[LogPart]:
    def answer(response: httpx.Response) -> LogPart:
        return LogPart(response.content, int(response.headers[LOG_OFFSET]))

    params = {"offset": offset} if tail is None else {"tail": tail}
    return Call("GET", job_path(job, "log"), answer, params=params)


def log(job: str, patience: float) -> Steps[str]:
    """The whole log, as far as it is written."""
    data, part = b"", LogPart(b"", 0)
    while True:
        part = yield from send(log_part(job, part.next_offset), patience)
        if not part.data:
            return data.decode(errors="replace")
        data += part.data


# ---------------------------------------------------------------- waiting


def ended(job: str, until: float, patience: float) -> Steps[JobStatus]:
    """The job once its state is terminal; the terminal event comes a moment earlier. Raises TimeoutError after the
    monotonic time `until`."""
    while True:
        status = yield from send(get_job(job), patience)
        if status.state in TERMINAL:
            return status
        if time.monotonic() > until:
            raise TimeoutError(f"job {job} is still {status.state}; it goes on")
        yield _ENDED_POLL_SECONDS


def outcome(status: JobStatus) -> JobStatus:
    """`status` of a job that succeeded; raises JobFailed for one that didn't."""
    if status.state == "succeeded":
        return status
    reason = status.error.type if status.error else status.state
    message = f"job {status.id} {status.state} in attempt {status.attempt}: {reason}"
    if status.error:
        message += f": {status.error.message}"
        if status.error.log_tail:
            message += f"\n--- end of its log ---\n{status.error.log_tail.rstrip()}"
    raise JobFailed(message, job_id=status.id, reason=reason)


def wait_served(run: str, step: int, timeout: float, patience: float) -> Steps[Served]:
    """Poll until vLLM serves `step` of `run`, or a later one, and the publisher has verified it.

    Raises NotServed when the publisher refused it, or after `timeout` seconds.
    """
    until = time.monotonic() + timeout
    while True:
        status = yield from send(get_run(run), patience)
        served = status.served
        if served is not None and served.step >= step:
            return served
        if served is not None and served.refused_step == step:
            raise NotServed(f"{run}@{step} was refused by the publisher: {served.refused_reason}")
        if time.monotonic() >= until:
            now = f"{run}@{served.step} is served" if served else "no step of it is"
            raise NotServed(
                f"{run}@{step} was not served within {timeout:g} s ({now}, its newest step is {status.newest_step}); "
                "are vLLM and the publisher running?"
            )
        yield _SERVED_POLL_SECONDS
