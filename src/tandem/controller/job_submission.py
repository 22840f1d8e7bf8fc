"""A training request on its way to the queue: parse it, check it, pack its batch, queue the job. Runs in a thread."""

import hashlib
import time
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tandem.controller.deployment import Deployment
from tandem.controller.http_errors import invalid_json
from tandem.controller.schemas import AnyRequest, DPORequest, RLRequest, TrainRequest
from tandem.data.prepare import prepare_dpo, prepare_rl, prepare_sft
from tandem.data.routing import Mixture
from tandem.errors import InvalidInput
from tandem.families.topology import Sizes
from tandem.spool.schema import DPOJob, Job, JobSpec, RLJob, SFTJob

_request: TypeAdapter[AnyRequest] = TypeAdapter(TrainRequest)


def submit_job(deployment: Deployment, run: str, body: bytes) -> tuple[Job, bool]:
    """Queue the job that the JSON `body` asks for; returns it, and whether it is new.

    Raises InvalidInput naming the field, NotFound for the run, Conflict for `id` and `base_step`. A refused request
    leaves nothing on the spool.
    """
    deployment.spool.runs.get(run)
    try:
        request = _request.validate_json(body)
    except ValidationError as error:
        raise invalid_json(error, body) from error
    _check(deployment, request)

    def pack(job_id: str, base_step: int, directory: Path) -> JobSpec:
        return _pack(deployment, request, run, job_id, base_step, directory)

    return deployment.spool.queue.submit(
        pack, run=run, job_id=request.id, fingerprint=_fingerprint(run, request), base_step=request.base_step
    )


def _fingerprint(run: str, request: AnyRequest) -> str:
    """SHA-256 of the run and the request with its defaults, without its id: how the JSON is written does not matter."""
    canonical = request.model_copy(update={"labels": dict(sorted(request.labels.items()))})
    content = canonical.model_dump_json(exclude={"id"})
    return hashlib.sha256(f"{run}\n{content}".encode()).hexdigest()


def _check(deployment: Deployment, request: AnyRequest) -> None:
    """The checks that need the deployment, but not the state of the run."""
    longest = deployment.arch.max_positions
    if request.packing.sequence_length > longest:
        problem = f"{request.packing.sequence_length} is more than the base model's {longest} positions"
        raise InvalidInput(problem, field="packing.sequence_length")
    data_parallel = Sizes.of(deployment.settings).data
    rows = request.optimizer.grad_accumulation_sequences
    if rows is not None and rows % data_parallel:
        problem = (
            f"{rows} rows don't divide over {data_parallel} data-parallel ranks; use a multiple of {data_parallel}"
        )
        raise InvalidInput(problem, field="optimizer.grad_accumulation_sequences")


def _pack(
    deployment: Deployment, request: AnyRequest, run: str, job_id: str, base_step: int, directory: Path
) -> JobSpec:
    """Write the packed arrays into `directory`; returns the job's specification."""
    names = ("deadline_seconds", "stall_seconds", "max_attempts", "labels", "loss", "optimizer")
    spec = {name: getattr(request, name) for name in names}
    spec |= {"id": job_id, "run": run, "base_step": base_step, "created": time.time()}
    spec["fingerprint"] = _fingerprint(run, request)
    arguments: dict[str, Any] = {"vocab_size": deployment.arch.vocab_size, "packing": request.packing, "out": directory}
    arguments["batch_size"] = request.optimizer.batch_size
    if isinstance(request, RLRequest):
        moe = deployment.arch.moe
        mixture = Mixture(deployment.arch.num_layers, moe.num_experts, moe.experts_per_token) if moe else None
        packed = prepare_rl(
            request.groups, advantage=request.advantage, base_step=base_step, mixture=mixture,
            max_off_policy_steps=request.max_off_policy_steps, **arguments,
        )  # fmt: skip
        return RLJob.model_validate(spec | {"data": packed})
    arguments |= {"tokenizer_path": deployment.model_path, "held_out": request.held_out}
    if isinstance(request, DPORequest):
        return DPOJob.model_validate(spec | {"data": prepare_dpo(request.pairs, **arguments)})
    packed = prepare_sft(request.examples, signed=request.loss.normalisation == "sum", **arguments)
    return SFTJob.model_validate(spec | {"data": packed})
