"""Runs: create, look, train, fork, roll back."""

from __future__ import annotations

import time
from pathlib import Path

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from tandem.controller.deployment import Deployment, Here
from tandem.controller.routes_jobs import job_status
from tandem.controller.schemas import CreateRun, Fork, JobStatus, Rollback, RolledBack, RunStatus
from tandem.controller.submit import check_run, lora_of, submit
from tandem.errors import Conflict
from tandem.families.identity import write_identity_adapter
from tandem.spool.schema import Origin, RunName, RunSpec

router = APIRouter(prefix="/v1/runs", tags=["runs"])


def run_status(here: Deployment, spec: RunSpec) -> RunStatus:
    """The run as the spool shows it now."""
    return RunStatus(
        spec=spec,
        newest_step=here.spool.checkpoints.newest(spec.name),
        served=here.spool.served.get(spec.name),
        pending=[job.spec.id for _, job in here.spool.jobs.pending(spec.name)],
    )


def same_run(one: RunSpec, other: RunSpec) -> bool:
    """Whether two specifications differ in nothing but the time."""
    return one.model_copy(update={"created": other.created}) == other


@router.post("", status_code=201, responses={200: {"model": RunStatus, "description": "It was there already."}})
def create_run(request: CreateRun, response: Response, here: Here) -> RunStatus:
    """Create a run. Its step 0 is made here, on the CPU, from the model's configuration alone."""
    base = request.base_model or here.base_model
    spec = RunSpec(
        name=request.name,
        base_model=here.base_model if here.is_base_model(base) else base,
        lora=lora_of(here, request.lora),
        weights=request.weights,
        seed=request.seed,
        created=time.time(),
    )
    check_run(here, spec)
    arch = here.arch()

    def write_adapter(directory: Path) -> None:
        write_identity_adapter(directory, arch, spec.lora, base_model=spec.base_model, seed=spec.seed)

    try:
        spec = here.spool.runs.create(spec, write_adapter)
    except Conflict:
        known = here.spool.runs.get(spec.name)
        if not same_run(spec, known):
            raise
        spec, response.status_code = known, 200
    return run_status(here, spec)


@router.get("")
def list_runs(here: Here) -> list[RunStatus]:
    """Every run."""
    return [run_status(here, spec) for spec in here.spool.runs.list()]


@router.get("/{run}")
def get_run(run: RunName, here: Here) -> RunStatus:
    """One run: its newest step, what is served, which jobs are under way."""
    return run_status(here, here.spool.runs.get(run))


@router.post(
    "/{run}/train",
    status_code=202,
    responses={200: {"model": JobStatus, "description": "This job was there already."}},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TrainRequest"}}},
        }
    },
)
async def train(run: RunName, request: Request, response: Response, here: Here) -> JobStatus:
    """Queue a job that starts from the run's newest step, after those queued before it, and makes the next one."""
    # The body is parsed and packed in a thread: a large batch would hold up everybody else here.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be application/json")
    body = await request.body()

    def work() -> tuple[JobStatus, bool]:
        job, new = submit(here, run, body)
        return job_status(here, job.spec.id), new

    status, new = await to_thread.run_sync(work, limiter=here.packing)
    if new:
        here.counts.inc("tandem_jobs_submitted_total", kind=status.kind)
    else:
        response.status_code = 200
    return status


@router.post("/{run}/fork", status_code=201, responses={200: {"model": RunStatus, "description": "It was there."}})
def fork_run(run: RunName, request: Fork, response: Response, here: Here) -> RunStatus:
    """A new run whose step 0 is a checkpoint of this one: adapter and optimizer state."""
    source = here.spool.runs.get(run)
    origin = Origin(run=run, step=request.step)
    new = source.model_copy(update={"name": request.name, "created": time.time(), "forked_from": origin})
    try:
        new = here.spool.checkpoints.fork(run, request.step, new)
    except Conflict:
        known = here.spool.runs.get(request.name)
        if not same_run(new, known):
            raise
        new, response.status_code = known, 200
    return run_status(here, new)


@router.post("/{run}/rollback")
def rollback_run(run: RunName, request: Rollback, here: Here) -> RolledBack:
    """Take the steps after `step` out of the chain; refused while jobs of the run are queued or running."""
    here.spool.runs.get(run)
    discarded = here.spool.checkpoints.rollback(run, request.step)
    return RolledBack(newest_step=here.spool.checkpoints.newest(run), discarded=discarded)
