"""HTTP routes of Tinker's API about the server, sessions and checkpoints. Unsupported routes answer
with an explanation."""

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tandem.controller.deployment import Deployment
from tandem.controller.tinker import models
from tandem.controller.tinker.errors import PREFIX
from tandem.controller.tinker.futures import SNAPSHOT
from tandem.controller.tinker.names import (
    Name,
    SavedPath,
    model_of,
    model_of_run,
    path_of,
)
from tandem.controller.tinker.schemas import (
    CreateSession,
    Finish,
    SessionHeartbeat,
    WeightsInfo,
)
from tandem.controller.tinker.service import CurrentApi, gone
from tandem.errors import Conflict, NotFound
from tandem.spool.schema import RunSpec, SavedName
from tandem.system.api_keys import asking

router = APIRouter(prefix=PREFIX, tags=["tinker"], include_in_schema=False)
TESTED = "0.38"
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=10**6)]


@router.get("/healthz")
def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.post("/client/config")
def client_config() -> dict[str, bool]:
    """Flags of the package `tinker`. The package's own defaults suit a different server."""
    # Compression makes requests much smaller, because training data is mostly small integers.
    return {"proto_compress_fwdbwd": True}


@router.post("/client/dynamic_config")
def client_dynamic_config() -> dict[str, bool]:
    """Flags that the package asks for repeatedly."""
    return {"sample_cancel_enabled": True}


@router.get("/get_server_capabilities")
def get_server_capabilities(api: CurrentApi) -> dict[str, Any]:
    """The base model."""
    deployment = api.deployment
    model = {
        "model_name": deployment.base_model,
        "max_context_length": deployment.settings.max_model_len or deployment.arch.max_positions,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


@router.post("/create_session")
def create_session(request: CreateSession, api: CurrentApi) -> dict[str, Any]:
    """Create a session. The session's models train until the session ends."""
    labels = {"sdk": request.sdk_version} | (
        {"name": request.display_name} if request.display_name else {}
    )
    session = api.deployment.spool.sessions.create(submitted_by=asking.get() or None, labels=labels)
    answer = {
        "type": "create_session",
        "session_id": session.id,
        "info_message": "Tandem trains adapters of attention and MLPs: train_unembed is ignored",
    }
    if not f"{request.sdk_version}.".startswith(f"{TESTED}."):
        problem = f"this server is tested with tinker {TESTED}, not {request.sdk_version}"
        answer["warning_message"] = problem
    return answer


@router.post("/session_heartbeat", response_model=None)
def session_heartbeat(request: SessionHeartbeat, api: CurrentApi) -> dict[str, str] | Response:
    """Record that the session's client is alive."""
    try:
        api.deployment.spool.sessions.beat(request.session_id)
    except Conflict as error:
        return gone(error.message)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish")
async def finish_session(session_id: str, request: Finish, api: CurrentApi) -> dict[str, str]:
    """End the session: it accepts no further requests. If a session is finished several times, the
    first reason is kept."""
    reason = f"its client finished it: {request.reason.type}"
    reason += f" ({request.detail[:500]})" if request.detail else ""
    await api.run(api.deployment.spool.sessions.end, session_id, reason)
    api.samples.cancel_session(session_id)
    return {"status": "finished"}


@router.post("/telemetry")
def telemetry() -> dict[str, str]:
    """Accept the package's telemetry, and drop it."""
    return {"status": "accepted"}


@router.get("/sessions")
def list_sessions(api: CurrentApi, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Sessions, newest first."""
    return {"sessions": api.deployment.spool.sessions.ids()[::-1][offset : offset + limit]}


@router.get("/sessions/{session_id}")
def get_session(session_id: str, api: CurrentApi) -> dict[str, Any]:
    """A session's models and samplers."""
    sessions = api.deployment.spool.sessions
    record = sessions.get(session_id)
    runs = [model_of_run(run) for run in sessions.runs(session_id)]
    samplers = [str(Name(session_id, "sample", n)) for n in sessions.samplers(session_id)]
    return {
        "training_run_ids": [run for run in runs if run],
        "sampler_ids": samplers,
        "display_name": record.labels.get("name"),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(model: Name, saved: SavedName) -> dict[str, Any]:
    path = SavedPath(model, saved.group, saved.name)
    return {
        "checkpoint_id": "/".join(str(path).split("/")[-2:]),
        "checkpoint_type": "training" if saved.group == "weights" else "sampler",
        "time": _time(saved.created),
        "tinker_path": str(path),
        "public": False,
    }


def _checkpoints(deployment: Deployment, model: Name) -> list[dict[str, Any]]:
    names = deployment.spool.names.list(model.run)
    return [_checkpoint(model, one) for one in names if not one.name.startswith(SNAPSHOT)]


def _training_run(deployment: Deployment, model: Name, spec: RunSpec) -> dict[str, Any]:
    spool, found = deployment.spool, _checkpoints(deployment, model)
    last = {one["checkpoint_type"]: one for one in found}
    newest = spool.requests.last(model.run)
    when = spool.requests.get(model.run, newest).created if newest else spec.created
    return {
        "training_run_id": str(model),
        "base_model": spool.sessions.model(model.session, model.number).base_model,
        "model_owner": spool.sessions.get(model.session).submitted_by or "",
        "is_lora": True,
        "lora_rank": spec.lora.rank if spec.lora else None,
        "last_request_time": _time(when),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
    }


def _models(deployment: Deployment) -> list[Name]:
    """All models, with the newest session's models first."""
    sessions = deployment.spool.sessions
    names = [
        model_of_run(run)
        for session in reversed(sessions.ids())
        for run in reversed(sessions.runs(session))
    ]
    return [model_of(name) for name in names if name]


@router.get("/training_runs")
def list_training_runs(api: CurrentApi, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Models, newest first."""
    everything = _models(api.deployment)
    found = [
        _training_run(api.deployment, model, models.model_run(api.deployment, model))
        for model in everything[offset : offset + limit]
    ]
    return {"training_runs": found, "cursor": _cursor(offset, limit, len(everything))}


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


@router.get("/training_runs/{model_id}")
def get_training_run(model_id: str, api: CurrentApi) -> dict[str, Any]:
    """One model."""
    model = model_of(model_id)
    return _training_run(api.deployment, model, models.model_run(api.deployment, model))


@router.get("/training_runs/{model_id}/checkpoints")
def list_checkpoints(model_id: str, api: CurrentApi) -> dict[str, Any]:
    """A model's named checkpoints."""
    model = model_of(model_id)
    models.model_run(api.deployment, model)
    return {"checkpoints": _checkpoints(api.deployment, model)}


@router.get("/checkpoints")
def list_all_checkpoints(api: CurrentApi, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """The named checkpoints of all models."""
    found = [
        one for model in _models(api.deployment) for one in _checkpoints(api.deployment, model)
    ]
    found.sort(key=lambda one: one["time"], reverse=True)
    cursor = _cursor(offset, limit, len(found))
    return {"checkpoints": found[offset : offset + limit], "cursor": cursor}


@router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
def delete_checkpoint(model_id: str, kind: str, name: str, api: CurrentApi) -> dict[str, str]:
    """Forget a checkpoint's name. TANDEM_KEEP_CHECKPOINTS then decides when the checkpoint's files
    are removed."""
    path = path_of(f"tinker://{model_id}/{kind}/{name}", "checkpoint_id")
    models.saved_step(api.deployment, path, "checkpoint_id")
    api.deployment.spool.names.remove(path.model.run, path.group, path.name)
    return {"status": "deleted"}


@router.post("/weights_info")
def weights_info(request: WeightsInfo, api: CurrentApi) -> dict[str, Any]:
    """The base model and the adapter of a checkpoint."""
    path = path_of(request.tinker_path, "tinker_path")
    spec = models.model_run(api.deployment, path.model)
    models.saved_step(api.deployment, path, "tinker_path")
    record = api.deployment.spool.sessions.model(path.model.session, path.model.number)
    trained = models.trained_parts(spec)
    return {"base_model": record.base_model, "is_lora": True, **trained}


_UNSERVED = {
    "forward": "forward_backward is read as protobuf, and this is a part of it; install tinker"
    " 0.25 or newer",
    "unload_model": "the trainer leaves by itself when no request comes",
    "retrieve_futures": "one future at a time is asked for",
    "join_sampling_session": "copies of a sampler number their requests by themselves",
    "create_custom_loss": "losses are not uploaded here; the package computes them by itself",
    "save_weights_external": "`tandem export` writes a checkpoint in PEFT's format, or merged",
    "copy_weights": "there are no projects; load a checkpoint, or `tandem fork` its run",
    "auth": "there are no accounts; keys are the deployment's (TANDEM_API_KEY)",
    "billing": "nothing is billed",
    "audit": "the controller's log has each request with its key's name",
    "sessions": "there are no projects, traces or searches",
    "training_runs": "there are no owners, no expiry and no download; `tandem export` writes files",
}


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
def refuse_route(rest: str) -> None:
    """Refuse requests to all other routes of the package: they are not supported."""
    reason = _UNSERVED.get(rest.partition("/")[0], "docs/tinker.md lists what is")
    error = NotFound(f"{rest[:100]} is not served: {reason}")
    error.code = "not_served"
    raise error
