"""HTTP routes that render and pack data: training requests, which go to the queue, and previews of
examples."""

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from tandem.config import Settings
from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.http_errors import parse_body
from tandem.controller.json_weight import json_weight
from tandem.controller.routes_jobs import job_status
from tandem.controller.schemas import (
    AnyRequest,
    DPORequest,
    ErrorBody,
    JobStatus,
    RenderRequest,
    RLRequest,
    TrainRequest,
)
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import Rendering
from tandem.data.prepare import prepare_dpo, prepare_rl, prepare_sft
from tandem.data.render import preview
from tandem.data.routing import Mixture
from tandem.errors import InvalidInput, RequestTooLarge
from tandem.spool import fs
from tandem.spool.schema import DPOJob, Job, JobSpec, RLJob, RunName, RunSpec, SFTJob
from tandem.system.api_keys import asking
from tandem.topology.sizes import Sizes

router = APIRouter()
MEMORY_BYTES = 256 * 2**10
# Bodies that take more than LARGE_WEIGHT bytes of memory after parsing are parsed one at a time.
LARGE_WEIGHT = 128 * 2**20
# A parsed body may take at most MOST_WEIGHT * TANDEM_MAX_REQUEST_BYTES bytes of memory: 3 GiB by
# default. By default, the controller may use 4 GiB of memory.
MOST_WEIGHT = 12
# Bytes of memory that a sequence of a few tokens takes while it is packed (measured: 2,800 to
# 3,160).
SEQUENCE_BYTES = 3200
_train_request: TypeAdapter[AnyRequest] = TypeAdapter(TrainRequest)
_render_request = TypeAdapter(RenderRequest)
_NOT_JSON: dict[int | str, dict[str, Any]] = {
    415: {"model": ErrorBody, "description": "The body is not declared as application/json."}
}


def _body(name: str) -> dict[str, Any]:
    """The reference to the schema of a body that the route parses itself. `app` adds the schema to
    the OpenAPI document."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


@router.post(
    "/v1/runs/{run}/train",
    tags=["runs"],
    status_code=202,
    responses={200: {"model": JobStatus, "description": "The job existed already."}, **_NOT_JSON},
    openapi_extra=_body("TrainRequest"),
)
async def train(
    run: RunName, request: Request, response: Response, deployment: CurrentDeployment
) -> JobStatus:
    """Queue a job that makes the run's next step. The job starts after all jobs that were queued
    earlier. The job continues from the step that is the run's newest step at that time."""

    def submit(body: bytes) -> tuple[JobStatus, bool]:
        job, new = queue_job(deployment, run, body)
        return (
            job_status(
                deployment, *(("queued", job) if new else deployment.spool.jobs.get(job.spec.id))
            ),
            new,
        )

    status, new = await _with_body(deployment, request, submit)
    if new:
        deployment.counts.inc("tandem_jobs_submitted_total", kind=status.kind)
    else:
        response.status_code = 200
    return status


@router.post(
    "/v1/data/render", tags=["data"], responses=_NOT_JSON, openapi_extra=_body("RenderRequest")
)
async def render_data(request: Request, deployment: CurrentDeployment) -> list[Rendering]:
    """Examples or pairs in the form in which they would be trained: their texts, and the parts of
    the texts that are trained."""

    def render(body: bytes) -> list[Rendering]:
        asked = parse_body(_render_request, body)
        tokenizer = load_tokenizer(deployment.model_path)
        return preview(tokenizer, asked.examples, asked.pairs, deployment.arch.vocab_size)

    return await _with_body(deployment, request, render)


async def _with_body[T](deployment: Deployment, request: Request, work: Callable[[bytes], T]) -> T:
    """Calls `work` with the request's body, and returns the result. `work` runs in a thread,
    because parsing and packing a large batch would block all other requests."""
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise HTTPException(415, "the body must be application/json")
    async with received(request, deployment.spool.paths.jobs) as body:
        small = body.tell() <= MEMORY_BYTES
        threads = deployment.small_packing_threads if small else deployment.packing_threads
        weight = await to_thread.run_sync(json_weight, body, limiter=threads)
        _check_weight(weight, deployment.settings)

        def read_and_work() -> T:
            body.seek(0)
            return work(body.read())

        async with deployment.large_bodies if weight > LARGE_WEIGHT else nullcontext():
            return await to_thread.run_sync(read_and_work, limiter=threads)


def _check_weight(weight: int, settings: Settings, field: str = "body") -> None:
    """Raises RequestTooLarge for a request that may take too much memory when it is parsed."""
    if weight > (most := MOST_WEIGHT * settings.max_request_bytes):
        problem = f"the request may take {weight} bytes of memory, and {most} is the most"
        remedy = "send fewer examples at once, or raise TANDEM_MAX_REQUEST_BYTES"
        raise RequestTooLarge(f"{problem}; {remedy}", field=field)


@asynccontextmanager
async def received(request: Request, directory: Path) -> AsyncIterator[SpooledTemporaryFile[bytes]]:
    """The request's whole body as a file. A body of up to MEMORY_BYTES is in memory. A larger body
    is in an unnamed file in `directory`.

    Raises SpoolUnusable if the volume can't store the body.
    """
    with SpooledTemporaryFile(MEMORY_BYTES, dir=str(directory), prefix=fs.TEMPORARY) as body:
        with fs.volume_errors(directory):
            async for part in request.stream():
                await to_thread.run_sync(body.write, part)
            await to_thread.run_sync(body.flush)
        yield body


def queue_job(deployment: Deployment, run: str, body: bytes) -> tuple[Job, bool]:
    """Queue the job that the JSON `body` asks for. Returns the job, and whether the job is new.

    Raises InvalidInput that names the wrong field, NotFound for an unknown run, and Conflict if the
    request's `id` or `base_step` conflicts with the run's jobs. A refused request leaves nothing on
    the spool.
    """
    of_run = deployment.spool.runs.get(run)
    base_model = of_run.base_model
    if not deployment.is_base_model(base_model):
        problem = (
            f"run {run!r} is of {base_model!r}, and this deployment trains"
            f" {deployment.base_model!r}"
        )
        raise InvalidInput(f"{problem}; TANDEM_BASE_MODEL chooses", field="run")
    request = parse_body(_train_request, body)
    _check(deployment, request)
    fingerprint = _fingerprint(run, request)

    def pack(job_id: str, base_step: int, directory: Path) -> JobSpec:
        names = ("deadline_seconds", "stall_seconds", "max_attempts", "labels", "loss", "optimizer")
        spec = {name: getattr(request, name) for name in names}
        spec |= {
            "id": job_id,
            "run": run,
            "base_step": base_step,
            "created": time.time(),
            "fingerprint": fingerprint,
            "submitted_by": asking.get() or None,
        }
        return _pack(deployment, request, spec, of_run, directory)

    return deployment.spool.queue.submit(
        pack,
        run=run,
        job_id=request.id,
        fingerprint=fingerprint,
        base_step=request.base_step,
        most_behind=getattr(request, "max_off_policy_steps", None),
    )


def _fingerprint(run: str, request: AnyRequest) -> str:
    """SHA-256 of the run and the request, with defaults filled in and without the request's id. Two
    spellings of the same JSON value give the same hash."""
    canonical = request.model_copy(update={"labels": dict(sorted(request.labels.items()))})
    content = canonical.model_dump_json(exclude={"id"})
    return hashlib.sha256(f"{run}\n{content}".encode()).hexdigest()


def _check(deployment: Deployment, request: AnyRequest) -> None:
    """Checks the request against the deployment. The checks do not read the run's state."""
    _check_sequences(request, deployment.settings)
    longest = deployment.arch.max_positions
    if request.packing.sequence_length > longest:
        problem = (
            f"{request.packing.sequence_length} is more than the base model's {longest} positions"
        )
        raise InvalidInput(problem, field="packing.sequence_length")
    data_parallel = Sizes.of(deployment.settings).data
    rows = request.optimizer.grad_accumulation_sequences
    if rows is not None and rows % data_parallel:
        problem = f"{rows} rows don't divide over {data_parallel} data-parallel ranks"
        remedy = f"use a multiple of {data_parallel}"
        raise InvalidInput(f"{problem}; {remedy}", field="optimizer.grad_accumulation_sequences")


def _check_sequences(request: AnyRequest, settings: Settings) -> None:
    if isinstance(request, RLRequest):
        trajectories = (one for group in request.groups for one in group.trajectories)
        field, count = "groups", sum(len(one.turns) for one in trajectories)
    elif isinstance(request, DPORequest):
        field, count = "pairs", 2 * len(request.pairs)
    else:
        field, count = "examples", len(request.examples)
    _check_weight(SEQUENCE_BYTES * count, settings, field)


def _pack(
    deployment: Deployment,
    request: AnyRequest,
    spec: dict[str, Any],
    of_run: RunSpec,
    directory: Path,
) -> JobSpec:
    """Write the packed arrays into `directory`. Returns the job's specification: `spec` with the
    data."""
    arguments: dict[str, Any] = {
        "vocab_size": deployment.arch.vocab_size,
        "packing": request.packing,
        "out": directory,
    }
    arguments["batch_size"] = request.optimizer.batch_size
    if isinstance(request, RLRequest):
        moe = deployment.arch.moe
        layers = deployment.arch.num_layers
        mixture = (
            Mixture(layers, moe.num_experts, moe.experts_per_token, moe.dense_layers)
            if moe
            else None
        )
        packed = prepare_rl(
            request.groups,
            advantage=request.advantage,
            base_step=spec["base_step"],
            mixture=mixture,
            max_off_policy_steps=request.max_off_policy_steps,
            **arguments,
        )
        return RLJob.model_validate(spec | {"data": packed})
    arguments |= {"tokenizer_path": deployment.model_path, "held_out": request.held_out}
    # Chat templates may contain today's date. In all jobs of a run, this date is the day on which
    # the run was created, even if the jobs are submitted on other days.
    arguments["day"] = datetime.fromtimestamp(of_run.created, UTC).date()
    if isinstance(request, DPORequest):
        return DPOJob.model_validate(spec | {"data": prepare_dpo(request.pairs, **arguments)})
    packed = prepare_sft(request.examples, signed=request.loss.normalisation == "sum", **arguments)
    return SFTJob.model_validate(spec | {"data": packed})
