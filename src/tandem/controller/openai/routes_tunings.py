"""HTTP routes of fine-tuning jobs: create, list, retrieve, events, checkpoints, cancel, pause,
resume. Unsupported routes answer with an explanation."""

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Query, Request

from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.openai.errors import BadRequest, at_param
from tandem.controller.openai.hyperparameters import SLICE_BYTES
from tandem.controller.openai.progress import (
    checkpoints_of,
    model_name,
    run_name,
    status_of,
    tuning_events,
)
from tandem.controller.openai.routes_files import After, after_id
from tandem.controller.openai.schemas import CreateTuning, job_object, page
from tandem.controller.openai.tuner import cancel_jobs, spec_of
from tandem.controller.routes_runs import check_run
from tandem.errors import InvalidInput, NotFound, TandemError
from tandem.spool.schema import Origin
from tandem.spool.schema.base import RUN_NAME_PATTERN
from tandem.spool.schema.tuning import Hyperparameters, Notice, Tuning, TuningMethod, Upload
from tandem.spool.tunings import new_id
from tandem.system.api_keys import asking

router = APIRouter(prefix="/v1/fine_tuning", tags=["openai"], include_in_schema=False)
uploads = APIRouter(prefix="/v1/uploads", tags=["openai"], include_in_schema=False)
VLLMS_BASE = "base"
MOST_NOTICES = 100
_is_step = re.compile(rf"({RUN_NAME_PATTERN[1:-1]})@([0-9]{{1,8}})").fullmatch
Limit = Annotated[int, Query(ge=1, le=1000)]


def status_object(deployment: Deployment, tuning: Tuning) -> dict[str, Any]:
    """The job's present state as OpenAI's object."""
    status, model = status_of(deployment.spool, tuning), None
    if status == "succeeded" and tuning.plan is not None:
        model = model_name(deployment, tuning, tuning.plan.parts)
    return job_object(tuning, status, model)


@router.post("/jobs")
def create_tuning(request: CreateTuning, deployment: CurrentDeployment) -> dict[str, Any]:
    """Create a fine-tuning job. The tuner later validates the job's files, and trains the job's run
    by a chain of Tandem's jobs."""
    if request.integrations:
        raise BadRequest(
            "the server sends nothing to Weights & Biases. Follow the run from where your key is:"
            " tandem track RUN --to wandb",
            param="integrations",
        )
    method, hyperparameters = _method(request)
    tuning_id = new_id("ftjob")
    tuning = Tuning(
        id=tuning_id,
        created=time.time(),
        model=request.model,
        run=run_name(tuning_id, request.suffix),
        origin=_origin(deployment, request.model),
        method=method,
        hyperparameters=hyperparameters,
        seed=int.from_bytes(os.urandom(4)) >> 1 if request.seed is None else request.seed,
        suffix=request.suffix,
        training_file=_upload(deployment, request.training_file, "training_file", method).id,
        validation_file=_validation_file(deployment, request.validation_file, method),
        metadata=request.metadata,
        submitted_by=asking.get() or None,
    )
    _check_run(deployment, tuning)
    with deployment.spool.tunings.lock():  # while this lock is held, no file is deleted
        _upload(deployment, tuning.training_file, "training_file", method)
        _validation_file(deployment, tuning.validation_file, method)
        deployment.spool.tunings.create(tuning)
    return status_object(deployment, tuning)


def _method(request: CreateTuning) -> tuple[TuningMethod, Hyperparameters]:
    if (asked := request.method) is None:
        given = request.hyperparameters
        return "supervised", given.record() if given else Hyperparameters()
    if request.hyperparameters is not None:
        raise BadRequest(
            "goes with no method; give hyperparameters within method", param="hyperparameters"
        )
    if asked.type == "reinforcement":
        raise BadRequest(
            "reinforcement with graders is not served; `tandem rl` trains by rewards of your own"
            " environment",
            param="method.type",
            code="unsupported_method",
        )
    for name in ("supervised", "dpo", "reinforcement"):
        if name != asked.type and getattr(asked, name) is not None:
            raise BadRequest(f"method.type is {asked.type}; leave it out", param=f"method.{name}")
    settings = asked.supervised if asked.type == "supervised" else asked.dpo
    given = settings.hyperparameters if settings else None
    return asked.type, given.record() if given else Hyperparameters()


def _origin(deployment: Deployment, model: str) -> Origin | None:
    """The checkpoint of the fine-tuned model with the name `model`; None for the base model."""
    if model == VLLMS_BASE or deployment.is_base_model(model):
        return None
    code = "model_not_available"
    if not (found := _is_step(model.rpartition(":")[2])):
        problem = f"{model[:100]!r} can't be fine-tuned here"
        remedy = f"the base model is {deployment.base_model!r}, and a fine-tuned model goes on too"
        raise BadRequest(f"{problem}; {remedy}", param="model", code=code)
    origin = Origin(run=found[1], step=int(found[2]))
    try:
        deployment.spool.checkpoints.manifest(origin.run, origin.step)
        base = deployment.spool.runs.get(origin.run).base_model
    except TandemError as error:
        raise BadRequest(error.message, param="model", code=code) from error
    if not deployment.is_base_model(base):
        raise BadRequest(
            f"{origin.run} is of another base model, {base!r}", param="model", code=code
        )
    return origin


def _check_run(deployment: Deployment, tuning: Tuning) -> None:
    """Raises BadRequest if this deployment can't train or serve the fine-tuning's run."""
    spec = spec_of(deployment, tuning)
    if tuning.origin is not None:
        spec = deployment.spool.runs.get(tuning.origin.run).model_copy(update={"name": tuning.run})
    try:
        check_run(deployment, spec)
    except InvalidInput as error:
        raise at_param(error, "model") from error


def _upload(deployment: Deployment, file_id: str, param: str, method: TuningMethod) -> Upload:
    try:
        upload = deployment.spool.uploads.get(file_id)
    except NotFound as error:
        raise BadRequest(error.message, param=param, code=f"invalid_{param}") from error
    if upload.method != method:
        has = {"supervised": "conversations", "dpo": "pairs", None: "results of a job"}
        problem = f"{file_id} has {has[upload.method]}, and {method} trains {has[method]}"
        raise BadRequest(
            f"{problem}; choose another file or method", param=param, code=f"invalid_{param}"
        )
    return upload


def _validation_file(
    deployment: Deployment, file_id: str | None, method: TuningMethod
) -> str | None:
    if file_id is None:
        return None
    upload = _upload(deployment, file_id, "validation_file", method)
    if upload.size > SLICE_BYTES:
        problem = f"it has {upload.size} bytes, and {SLICE_BYTES} is the most of a validation file"
        raise BadRequest(f"{problem}; send a sample of it", param="validation_file")
    return file_id


@router.get("/jobs")
def list_tunings(
    request: Request, deployment: CurrentDeployment, after: After = None, limit: Limit = 20
) -> dict[str, Any]:
    """List jobs, newest first. `metadata[key]=value`: only jobs with these entries;
    `metadata=null`: only jobs without metadata."""
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    without = request.query_params.get("metadata") == "null"
    found: list[dict[str, Any]] = []
    spool = deployment.spool
    for tuning_id in after_id(spool.tunings.ids(), after):
        with suppress(NotFound):  # the fine-tuning was removed meanwhile
            tuning = spool.tunings.get(tuning_id)
            if not (wanted.items() <= (tuning.metadata or {}).items()):
                continue
            if without and tuning.metadata:
                continue
            if len(found) == limit:
                return page(found, has_more=True)
            found.append(status_object(deployment, tuning))
    return page(found, has_more=False)


@router.get("/jobs/{job_id}")
def retrieve_tuning(job_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """One job."""
    return status_object(deployment, deployment.spool.tunings.get(job_id))


@router.get("/jobs/{job_id}/events")
def list_tuning_events(
    job_id: str,
    deployment: CurrentDeployment,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 20,
) -> dict[str, Any]:
    """The job's events, newest first."""
    tuning = deployment.spool.tunings.get(job_id)
    return _page_of(tuning_events(deployment.spool, tuning)[::-1], after, limit)


@router.get("/jobs/{job_id}/checkpoints")
def list_tuning_checkpoints(
    job_id: str, deployment: CurrentDeployment, after: After = None, limit: Limit = 10
) -> dict[str, Any]:
    """The job's checkpoints that exist, newest first."""
    return _page_of(checkpoints_of(deployment, deployment.spool.tunings.get(job_id)), after, limit)


def _page_of(everything: list[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    rest = after_id([one["id"] for one in everything], after)
    found = everything[len(everything) - len(rest) :]
    return page(found[:limit], has_more=len(found) > limit)


@router.post("/jobs/{job_id}/cancel")
def cancel_tuning(job_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """Cancel a fine-tuning job. The fine-tuning's queued Tandem jobs end at once, and its running
    Tandem job ends soon. A cancelled fine-tuning job can't be resumed."""

    def cancel(now: Tuning) -> Tuning:
        return now if now.cancelled else now.model_copy(update={"cancelled": time.time()})

    tuning = _change(deployment, job_id, cancel, refuse="cancelled")
    cancel_jobs(deployment.spool, tuning)
    return status_object(deployment, tuning)


@router.post("/jobs/{job_id}/pause")
def pause_tuning(job_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """Pause a fine-tuning job. The Tandem job that trains at the moment continues to its
    checkpoint. The next Tandem job is submitted only after `resume`."""

    def pause(now: Tuning) -> Tuning:
        if now.paused or now.cancelled:
            return now
        text = "The job is paused; a part that trains goes on to its checkpoint"
        return _noticed(now, text).model_copy(update={"paused": True})

    tuning = _change(deployment, job_id, pause, refuse="")
    if tuning.paused:
        cancel_jobs(deployment.spool, tuning, states=("queued",))
    return status_object(deployment, tuning)


@router.post("/jobs/{job_id}/resume")
def resume_tuning(job_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """Resume a paused job at its newest checkpoint."""

    def resume(now: Tuning) -> Tuning:
        if not now.paused or now.cancelled:
            return now
        if now.pauses == MOST_NOTICES:
            raise BadRequest(f"a job can be paused {MOST_NOTICES} times; cancel it", param=None)
        update = {"paused": False, "pauses": now.pauses + 1}
        return _noticed(now, "The job is resumed").model_copy(update=update)

    return status_object(deployment, _change(deployment, job_id, resume, refuse=""))


def _change(
    deployment: Deployment, job_id: str, update: Callable[[Tuning], Tuning], *, refuse: str
) -> Tuning:
    """Changes the job's record by `update`. Raises BadRequest if the job has ended, unless it has
    ended with the status `refuse`."""
    tuning = deployment.spool.tunings.change(job_id, update)
    if tuning.end is not None and tuning.end.status != refuse:
        problem = f"{job_id} has ended already: {tuning.end.status}"
        raise BadRequest(problem, param="fine_tuning_job_id", code="invalid_state")
    return tuning


def _noticed(tuning: Tuning, text: str) -> Tuning:
    notices = [*tuning.notices, Notice(time=time.time(), text=text)]
    return tuning.model_copy(update={"notices": notices})


def _not_served(message: str) -> NoReturn:
    error = NotFound(message)
    error.code = "not_served"
    raise error


_METHODS = ["GET", "POST", "DELETE"]


@router.api_route("/alpha/{rest:path}", methods=_METHODS)
def refuse_graders(rest: str) -> None:
    """Refuse requests about graders: they are not supported."""
    _not_served(
        f"{rest[:64]}: graders are of reinforcement fine-tuning, which is not served; `tandem rl`"
        " trains by rewards of your own environment"
    )


@router.api_route("/checkpoints/{rest:path}", methods=_METHODS)
def refuse_permissions(rest: str) -> None:
    """Refuse requests about permissions: they are not supported."""
    _not_served(f"{rest[:64]}: all keys of this deployment may sample from all of its models")


@uploads.api_route("{rest:path}", methods=_METHODS)
def refuse_uploads(rest: str) -> None:
    """Refuse uploads in several parts: they are not supported."""
    _not_served(f"uploads{rest[:64]}: send the file at once, to /v1/files")
