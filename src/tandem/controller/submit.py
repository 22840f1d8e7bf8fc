"""A training request's way to the queue: parse, check against the deployment, pack, hand over. Runs in a thread."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tandem.controller.deployment import Deployment
from tandem.controller.refusals import invalid_body
from tandem.controller.schemas import RLRequest, SFTRequest, TrainRequest
from tandem.data.prepare import prepare_rl, prepare_sft
from tandem.errors import InvalidInput
from tandem.families.arch import EXPERT_TARGETS
from tandem.spool.schema import Job, JobSpec, LoraShape, RLJob, RunSpec, SFTJob

_request: TypeAdapter[RLRequest | SFTRequest] = TypeAdapter(TrainRequest)


def submit(here: Deployment, run: str, body: bytes) -> tuple[Job, bool]:
    """Queue the job that `body` asks for; returns it, and False where it was there already.

    Raises InvalidInput naming the field, NotFound for the run, Conflict for `id` and `base_step`. A refused request
    leaves nothing on the spool.
    """
    here.spool.runs.get(run)
    try:
        request = _request.validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, body) from error
    _check(here, request)

    def make(job_id: str, base_step: int, data: Path) -> JobSpec:
        return _pack(here, request, run, job_id, base_step, data)

    return here.spool.queue.submit(
        make, run=run, job_id=request.id, fingerprint=_fingerprint(run, request), base_step=request.base_step
    )


def _fingerprint(run: str, request: RLRequest | SFTRequest) -> str:
    """SHA-256 of the run and the request after defaults, without its id: how the JSON was spelt doesn't count."""
    canonical = request.model_copy(update={"labels": dict(sorted(request.labels.items()))})
    content = canonical.model_dump_json(exclude={"id"})
    return hashlib.sha256(f"{run}\n{content}".encode()).hexdigest()


def _check(here: Deployment, request: RLRequest | SFTRequest) -> None:
    """What can be known about the request before the run's state is."""
    longest = here.arch().max_positions
    if request.packing.sequence_length > longest:
        raise InvalidInput(
            f"{request.packing.sequence_length} is more than the base model's {longest} positions",
            field="packing.sequence_length",
        )
    settings = here.settings
    data_parallel = settings.trainer_ranks // settings.tensor_parallel
    rows = request.optimizer.grad_accumulation_sequences
    if rows is not None and rows % data_parallel:
        raise InvalidInput(
            f"{rows} rows don't divide over {data_parallel} data-parallel ranks; use a multiple of {data_parallel}",
            field="optimizer.grad_accumulation_sequences",
        )


def _pack(
    here: Deployment, request: RLRequest | SFTRequest, run: str, job_id: str, base_step: int, data: Path
) -> JobSpec:
    """Write the packed arrays into `data` and say everything about the job."""
    vocabulary = here.arch().vocab_size
    common = {
        "id": job_id,
        "run": run,
        "base_step": base_step,
        "created": time.time(),
        "fingerprint": _fingerprint(run, request),
        "deadline_seconds": request.deadline_seconds,
        "stall_seconds": request.stall_seconds,
        "max_attempts": request.max_attempts,
        "labels": request.labels,
        "loss": request.loss,
        "optimizer": request.optimizer,
    }
    if isinstance(request, SFTRequest):
        packed = prepare_sft(
            request.examples,
            tokenizer_path=here.model,
            vocab_size=vocabulary,
            packing=request.packing,
            out=data,
        )
        return SFTJob.model_validate(common | {"data": packed})
    reference = request.loss.kl_reference
    if isinstance(reference, int) and reference > base_step:
        raise InvalidInput(
            f"step {reference} won't exist when this job starts from step {base_step}", field="loss.kl_reference"
        )
    packed = prepare_rl(
        request.groups, vocab_size=vocabulary, advantage=request.advantage, packing=request.packing, out=data
    )
    return RLJob.model_validate(common | {"data": packed})


def lora_of(here: Deployment, asked: LoraShape) -> LoraShape:
    """`asked`, and where it names no targets of a mixture of experts, attention alone: adapters on experts are as many
    as there are experts."""
    if here.arch().moe is None or "targets" in asked.model_fields_set:
        return asked
    attention = tuple(target for target in asked.targets if target not in EXPERT_TARGETS)
    return asked.model_copy(update={"targets": attention})


def check_run(here: Deployment, spec: RunSpec) -> None:
    """What a new run needs of this deployment."""
    if not here.is_base_model(spec.base_model):
        raise InvalidInput(f"this deployment trains {here.base_model!r}, not {spec.base_model!r}", field="base_model")
    if spec.weights == "merged":
        raise InvalidInput('merged weights are not built yet; use "lora"', field="weights")
    if spec.lora.rank > here.settings.max_lora_rank:
        raise InvalidInput(
            f"vLLM serves ranks up to {here.settings.max_lora_rank} here, not {spec.lora.rank}; choose a lower rank or "
            "raise TANDEM_MAX_LORA_RANK",
            field="lora.rank",
        )
    if here.arch().moe is None:
        return
    on_experts = [target for target in spec.lora.targets if target in EXPERT_TARGETS]
    if on_experts and not here.settings.expert_lora:
        raise InvalidInput(
            f"{', '.join(on_experts)} are in the experts of this model, and vLLM serves no LoRA on experts here; leave "
            "them out, or set TANDEM_EXPERT_LORA=1 (CUDA only)",
            field="lora.targets",
        )
    if here.settings.tensor_parallel > 1:
        raise InvalidInput(
            f"a mixture of experts is not cut over tensor-parallel ranks yet, and this deployment's trainer has "
            f"{here.settings.tensor_parallel}; set TANDEM_TENSOR_PARALLEL=1",
            field="base_model",
        )
