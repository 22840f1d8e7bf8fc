"""HTTP routes of Tinker's API that sample."""

from hashlib import sha256
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from tandem.controller.tinker import models, vllm
from tandem.controller.tinker.errors import PREFIX
from tandem.controller.tinker.names import Name, path_of, request_of, sampler_of
from tandem.controller.tinker.schemas import CreateSampler, Retrieve, SampleRequest
from tandem.controller.tinker.service import CurrentApi, SampledModel, TinkerApi
from tandem.errors import InvalidInput, NotFound
from tandem.spool.schema import ClientSampler

router = APIRouter(prefix=PREFIX, tags=["tinker"], include_in_schema=False)


@router.post("/create_sampling_session")
def create_sampler(request: CreateSampler, api: CurrentApi) -> dict[str, Any]:
    """A sampler of the base model, or of a checkpoint."""
    deployment = api.deployment
    sessions = deployment.spool.sessions
    sessions.check_open(request.session_id)
    if request.model_path is not None:
        path = path_of(request.model_path, "model_path")
        step = models.saved_step(deployment, path, "model_path")
        base = sessions.model(path.model.session, path.model.number).base_model
        sampler = ClientSampler(
            base_model=base, path=str(path), run=path.model.run, name=path.name, step=step
        )
    elif request.base_model is not None:
        sampler = ClientSampler(base_model=models.base_name(deployment, request.base_model))
    else:
        raise InvalidInput("is missing; add it, or model_path", field="base_model")
    sessions.put_sampler(request.session_id, request.sampling_session_seq_id, sampler)
    name = Name(request.session_id, "sample", request.sampling_session_seq_id)
    return {"type": "create_sampling_session", "sampling_session_id": str(name)}


@router.get("/samplers/{sampler_id}")
def get_sampler(sampler_id: str, api: CurrentApi) -> dict[str, Any]:
    """The checkpoint that a sampler samples."""
    name = sampler_of(sampler_id, "sampler_id")
    found = api.deployment.spool.sessions.sampler(name.session, name.number)
    return {
        "sampler_id": str(name),
        "base_model": found.base_model,
        "model_path": found.path,
    }


@router.post("/asample")
async def begin_sample(request: SampleRequest, api: CurrentApi) -> dict[str, Any]:
    """Begin a sample. The result is kept in memory until the client has fetched it."""
    vllm.check_sample(request)
    name = sampler_of(request.sampling_session_id)
    model = await api.run(_sampled_model, api, name)
    request_id = f"{name}:{request.seq_id}"
    digest = sha256(request.model_dump_json().encode()).digest()
    api.samples.start(request_id, name.session, digest, lambda: api.sample(model, request))
    ids = [f"{request_id}:{i}" for i in range(request.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _sampled_model(api: TinkerApi, name: Name) -> SampledModel:
    spool = api.deployment.spool
    spool.sessions.check_open(name.session)
    found = spool.sessions.sampler(name.session, name.number)
    spool.sessions.use_sampler(name.session, name.number)
    if found.run is None:
        return SampledModel()
    step = found.step
    if step is None:
        step = spool.names.find(found.run, "sampler", found.name or "").step
    return SampledModel(found.run, step)


@router.post("/retrieve_future")
async def retrieve_future(request: Retrieve, api: CurrentApi) -> Response:
    """The result of a request. If the request has no result within HOLD_SECONDS, the answer says
    so, and the client asks again."""
    return await api.result(request.request_id)


@router.post("/cancel_future")
async def cancel_future(request: Retrieve, api: CurrentApi) -> dict[str, str]:
    """Cancel a sample that the client no longer needs. Training requests can't be cancelled."""
    if request_of(request.request_id).of.kind != "sample":
        raise NotFound("only samples can be cancelled", field="request_id")
    api.samples.cancel(request.request_id)
    return {"status": "cancelled"}
