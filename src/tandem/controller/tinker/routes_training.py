"""HTTP routes of Tinker's API that create models and train them."""

from collections.abc import Callable
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from tandem.controller.deployment import Deployment
from tandem.controller.routes_train import received
from tandem.controller.tinker import models
from tandem.controller.tinker.errors import PREFIX
from tandem.controller.tinker.futures import SNAPSHOT
from tandem.controller.tinker.losses import pack_pass
from tandem.controller.tinker.names import (
    CREATED,
    Name,
    check_saved_name,
    model_of,
    path_of,
)
from tandem.controller.tinker.passes import Pass, read_pass
from tandem.controller.tinker.schemas import (
    CreateModel,
    LoadWeights,
    LoraConfig,
    OfModel,
    OptimStep,
    SaveForSampler,
    SaveWeights,
)
from tandem.controller.tinker.service import CurrentApi, TinkerApi
from tandem.errors import InvalidInput
from tandem.spool.schema import (
    AnyRequest,
    ClientSampler,
    LoadRequest,
    SaveRequest,
    StepRequest,
)

router = APIRouter(prefix=PREFIX, tags=["tinker"], include_in_schema=False)


def _future(model: Name, number: int | str) -> dict[str, Any]:
    return {"request_id": f"{model}:{number}", "model_id": str(model)}


@router.post("/create_model")
def create_model(request: CreateModel, api: CurrentApi) -> dict[str, Any]:
    """A new LoRA adapter on the base model."""
    deployment = api.deployment
    name = models.base_name(deployment, request.base_model)
    models.check_optimizer(request.optimizer_config, "optimizer_config.type")
    config = request.lora_config or LoraConfig(rank=32)
    lora = models.lora_shape(deployment, config)
    deployment.spool.sessions.check_open(request.session_id)
    model = Name(request.session_id, "train", request.model_seq_id)
    models.make_model(deployment, model, name, lora, config.seed)
    return _future(model, CREATED)


@router.post("/load_weights")
def create_from_weights(request: LoadWeights, api: CurrentApi) -> dict[str, Any]:
    """A new model from a checkpoint."""
    if request.session_id is None or request.model_seq_id is None:
        problem = "LoadWeights is not permitted on a model that exists"
        remedy = "make a client by create_training_client_from_state, or ..._with_optimizer"
        raise InvalidInput(f"{problem}; {remedy}", field="model_id")
    models.check_optimizer(request.optimizer_config, "optimizer_config.type")
    deployment = api.deployment
    path = path_of(request.path)
    origin = models.model_run(deployment, path.model)
    step = models.saved_step(deployment, path, "path")
    if request.optimizer and path.group == "sampler":
        problem = "a sampler's checkpoint is for sampling; its optimizer state is not loaded"
        raise InvalidInput(f"{problem}; load one of save_state", field="path")
    known = deployment.spool.sessions.model(path.model.session, path.model.number).base_model
    name = models.base_name(deployment, request.base_model or known)
    deployment.spool.sessions.check_open(request.session_id)
    model = Name(request.session_id, "train", request.model_seq_id)
    assert origin.lora is not None
    models.make_model(deployment, model, name, origin.lora, seed=0)
    load = LoadRequest(run=origin.name, step=step, optimizer=request.optimizer)
    deployment.spool.requests.append(model.run, 1, load)
    return _future(model, CREATED)


@router.post("/get_info")
def get_info(request: OfModel, api: CurrentApi) -> dict[str, Any]:
    """A model's base model and adapter."""
    model = model_of(request.model_id)
    spec = models.model_run(api.deployment, model)
    name = api.deployment.spool.sessions.model(model.session, model.number).base_model
    return {
        "type": "get_info",
        "model_id": str(model),
        "model_name": name,
        "model_data": {"arch": api.deployment.arch.model_type, "model_name": name},
        "is_lora": True,
        "lora_rank": spec.lora.rank if spec.lora else None,
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, api: CurrentApi) -> dict[str, Any]:
    """Gradients of a loss over some data; with `forward_only`, log-probs without gradients."""
    headers, deployment = request.headers, api.deployment

    def log(body: bytes) -> dict[str, Any]:
        asked = read_pass(
            headers.get("content-type", ""),
            headers.get("content-encoding", ""),
            body,
            deployment.settings.max_request_bytes,
        )
        model = model_of(asked.model_id)
        return _log(api, model, asked.seq, lambda: _pack(deployment, asked))

    async with received(request, deployment.spool.paths.jobs / "data") as body:

        def read_and_log() -> dict[str, Any]:
            body.seek(0)
            return log(body.read())

        return await to_thread.run_sync(read_and_log, limiter=deployment.packing_threads)


Packed = tuple[AnyRequest, Callable[..., str] | None]


def _pack(deployment: Deployment, asked: Pass) -> Packed:
    return pack_pass(deployment, asked)


def _log(api: TinkerApi, model: Name, seq: int, make: Callable[[], Packed]) -> dict[str, Any]:
    """Logs the request that `make` returns. A `VoidRequest` takes the number of a refused request,
    so that the numbers have no gap."""
    models.model_run(api.deployment, model)
    if seq < 1:
        raise InvalidInput("requests are numbered from 1", field="seq_id")
    requests = api.deployment.spool.requests
    try:
        request, write = make()
        requests.append(model.run, api.numbers.logged(model.run, seq), request, write)
    except InvalidInput as error:
        api.numbers.void(model.run, seq, str(error))
        raise
    return _future(model, seq)


@router.post("/optim_step")
def optim_step(request: OptimStep, api: CurrentApi) -> dict[str, Any]:
    """An optimizer step with the gradients that were computed since the last optimizer step."""

    def make() -> Packed:
        models.check_optimizer(request.optimizer_params, "optimizer_params.type")
        if (adam := request.adam_params) is None:
            raise InvalidInput("is missing; add it", field="adam_params")
        values = adam.model_dump(exclude={"grad_clip_norm"})
        return StepRequest(**values, max_grad_norm=adam.grad_clip_norm or None), None

    return _log(api, model_of(request.model_id), request.seq_id, make)


@router.post("/save_weights")
def save_weights(request: SaveWeights, api: CurrentApi) -> dict[str, Any]:
    """A checkpoint with a name: weights and optimizer state."""
    model = model_of(request.model_id)

    def make() -> Packed:
        name = check_saved_name(request.path)
        _check_new(api, model, request.seq_id, name, overwrite=request.overwrite)
        return SaveRequest(name=name, group="weights"), None

    return _log(api, model, request.seq_id, make)


def _check_new(api: TinkerApi, model: Name, seq: int, name: str, *, overwrite: bool) -> None:
    spool, logged = api.deployment.spool, api.numbers.logged(model.run, seq)
    # the client may have repeated the request
    if overwrite or logged <= spool.requests.last(model.run):
        return
    if any((one.group, one.name) == ("weights", name) for one in spool.names.list(model.run)):
        problem = f"{model} has a checkpoint {name!r}"
        raise InvalidInput(f"{problem}; choose another name, or overwrite it", field="path")


@router.post("/save_weights_for_sampler")
def save_for_sampler(request: SaveForSampler, api: CurrentApi) -> dict[str, Any]:
    """Makes a checkpoint that vLLM serves. The checkpoint has a name, or belongs to one sampler."""
    model, number = model_of(request.model_id), request.sampling_session_seq_id
    spec = models.model_run(api.deployment, model)
    if request.path is None and number is not None:
        sessions = api.deployment.spool.sessions
        base = sessions.model(model.session, model.number).base_model
        name = f"{SNAPSHOT}{number}"
        sampler = ClientSampler(base_model=base, run=spec.name, name=name)
        sessions.put_sampler(model.session, number, sampler)

    def make() -> Packed:
        if request.path is not None:
            return SaveRequest(name=check_saved_name(request.path), group="sampler"), None
        if number is None:
            raise InvalidInput("is missing; add it, or path", field="sampling_session_seq_id")
        return SaveRequest(name=f"{SNAPSHOT}{number}", group="sampler"), None

    return _log(api, model, request.seq_id, make)
