"""HTTP routes of runs: create, list, state, fork, roll back, delete."""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Query, Response

from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.schemas import (
    LISTED_PENDING,
    CreateRun,
    Fork,
    Rollback,
    RolledBack,
    RunStatus,
)
from tandem.errors import CheckpointDamaged, Conflict, InvalidInput, NotFound
from tandem.families.adapter import UNSERVED, default_targets
from tandem.families.arch import EXPERT_TARGETS
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import merged_problem
from tandem.planning.checks import check_sizes
from tandem.spool import removal
from tandem.spool.schema import LoraShape, Origin, RunName, RunSpec
from tandem.topology.sizes import Sizes

router = APIRouter(prefix="/v1/runs", tags=["runs"])


def run_status(deployment: Deployment, spec: RunSpec) -> RunStatus:
    """The state of the run on the spool now."""
    spool, run = deployment.spool, spec.name
    index, served = spool.jobs.index, spool.served.get(run)
    running = index.running(run)
    pending = [key.id for key in (*running, *islice(index.queued(run), LISTED_PENDING))]
    return RunStatus(
        spec=spec,
        newest_step=spool.checkpoints.newest(run),
        served=served,
        served_in_chain=served is not None and spool.checkpoints.has(run, served),
        refused=None if served else spool.served.refused(run),
        pending=list(dict.fromkeys(pending))[:LISTED_PENDING],
        num_pending=len(running) + index.count("queued", run),
        size=spool.checkpoints.size(run),
        shared_gpus=deployment.settings.gpu_mode == "shared",
    )


def _answer(deployment: Deployment, run: str, new: bool, response: Response) -> RunStatus:
    if not new:
        response.status_code = 200
    return run_status(deployment, deployment.spool.runs.get(run))


def _create(deployment: Deployment, spec: RunSpec, create: Callable[[], RunSpec]) -> bool:
    """Calls `create`, which creates the run `spec`. Returns False if the run exists. Raises
    Conflict if the existing run differs."""
    try:
        create()
        return True
    except Conflict:
        existing = deployment.spool.runs.get(spec.name)
        if spec.model_copy(update={"created": existing.created}) != existing:
            raise
        return False


def check_run(deployment: Deployment, spec: RunSpec) -> None:
    """Raises InvalidInput for a run that this deployment can't train or serve. Raises Conflict if
    vLLM already serves another run's merged weights."""
    settings = deployment.settings
    if spec.weights != settings.weights:
        problem = f"vLLM serves {settings.weights} weights here, not {spec.weights}"
        raise InvalidInput(f"{problem}; TANDEM_WEIGHTS of the deployment chooses", field="weights")
    if spec.session is not None and spec.weights != "adapter":
        raise InvalidInput(
            "sessions train adapters that vLLM serves beside the base model; set"
            " TANDEM_WEIGHTS=adapter",
            field="weights",
        )
    if spec.lora is None and (settings.weights != "merged" or settings.way == "merge"):
        now = f"TANDEM_WEIGHTS={settings.weights}, TANDEM_TRANSPORT={settings.transport}"
        remedy = "set TANDEM_WEIGHTS=merged and TANDEM_TRANSPORT=volume or nccl"
        raise InvalidInput(
            f"vLLM can't serve a run of all weights here ({now}); {remedy}", field="trainable"
        )
    if spec.weights == "merged":
        if problem := merged_problem(deployment.arch):
            raise InvalidInput(f"{problem}; use TANDEM_WEIGHTS=adapter", field="weights")
        merged = [run.name for run in deployment.spool.runs.list() if run.weights == "merged"]
        if merged and spec.name not in merged:
            problem = f"one vLLM serves one run with merged weights, and that is {merged[0]!r} here"
            remedy = (
                "delete it first (`tandem run delete`), or use another deployment or"
                " TANDEM_WEIGHTS=adapter"
            )
            raise Conflict(f"{problem}; {remedy}", field="weights")
    check_sizes(deployment.arch, Sizes.of(settings))
    if spec.lora is not None:
        _check_lora(deployment, spec.lora)


def _check_lora(deployment: Deployment, lora: LoraShape) -> None:
    """Raises InvalidInput for an adapter that this deployment can't serve."""
    settings = deployment.settings
    if lora.rank > settings.max_lora_rank:
        problem = f"vLLM serves ranks up to {settings.max_lora_rank} here"
        remedy = "choose a lower one, or raise TANDEM_MAX_LORA_RANK"
        raise InvalidInput(f"{problem}; {remedy}", field="lora.rank")
    if "in_proj_z" in lora.targets and "in_proj_qkv" not in lora.targets:
        raise InvalidInput(
            "vLLM serves no LoRA on in_proj_z without one on in_proj_qkv; name both, or neither",
            field="lora.targets",
        )
    if wrong := [target for target in lora.targets if target in UNSERVED]:
        problem = f"vLLM ignores LoRA on {', '.join(wrong)} in the tokens that it generates"
        raise InvalidInput(f"{problem}; leave it out", field="lora.targets")
    on_experts = [target for target in lora.targets if target in EXPERT_TARGETS]
    if deployment.arch.moe and on_experts and not settings.expert_lora:
        problem = (
            f"vLLM serves no LoRA on experts here, but {', '.join(on_experts)} are in this model's"
            " experts"
        )
        remedy = "leave them out, or set TANDEM_EXPERT_LORA=1 (CUDA only)"
        raise InvalidInput(f"{problem}; {remedy}", field="lora.targets")


def run_spec(deployment: Deployment, request: CreateRun) -> RunSpec:
    """The specification of the requested run. Raises InvalidInput if the request names another base
    model than the deployment's."""
    full = request.trainable == "full"
    if request.base_model and not deployment.is_base_model(request.base_model):
        problem = f"this deployment trains {deployment.base_model!r}, not {request.base_model!r}"
        raise InvalidInput(problem, field="base_model")
    if full and "lora" in request.model_fields_set:
        raise InvalidInput(
            "a run of all weights (trainable=full) has no adapter; leave lora out", field="lora"
        )
    lora = request.lora
    if "targets" not in lora.model_fields_set:
        lora = lora.model_copy(update={"targets": default_targets(deployment.arch)})
    return RunSpec(
        name=request.name,
        base_model=deployment.base_model,
        trainable=request.trainable,
        lora=None if full else lora,
        weights=request.weights or deployment.settings.weights,
        seed=request.seed,
        created=time.time(),
    )


def make_run(deployment: Deployment, spec: RunSpec) -> bool:
    """Creates a run; returns False if it exists. The controller makes step 0 on the CPU. Step 0
    depends on the model's configuration, not on the model's weights."""

    def write_files(directory: Path) -> None:
        if spec.lora is not None:
            write_identity_adapter(
                directory, deployment.arch, spec.lora, base_model=spec.base_model, seed=spec.seed
            )

    with deployment.merged_runs if spec.weights == "merged" else nullcontext():
        check_run(deployment, spec)
        return _create(deployment, spec, lambda: deployment.spool.runs.create(spec, write_files))


def make_fork(deployment: Deployment, origin: Origin, name: str) -> bool:
    """Creates the run `name`, whose step 0 is the checkpoint `origin`; returns False if the run
    exists."""
    source = deployment.spool.runs.get(origin.run)
    new = source.model_copy(
        update={"name": name, "created": time.time(), "forked_from": origin, "session": None}
    )
    return _create(
        deployment, new, lambda: deployment.spool.checkpoints.fork(origin.run, origin.step, new)
    )


@router.post(
    "",
    status_code=201,
    responses={200: {"model": RunStatus, "description": "The run existed already."}},
)
def create_run(request: CreateRun, response: Response, deployment: CurrentDeployment) -> RunStatus:
    """Create a run. Step 0 of a run that trains all weights has no files, because step 0 is the
    base model."""
    new = make_run(deployment, run_spec(deployment, request))
    return _answer(deployment, request.name, new, response)


@router.get("")
def list_runs(
    deployment: CurrentDeployment,
    after: Annotated[
        RunName | None, Query(description="only runs whose names come after this one")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="at most this many")] = 200,
) -> list[RunStatus]:
    """List the runs, by name. The list leaves out damaged runs; `tandem doctor` names them."""
    listed: list[RunStatus] = []
    for spec in deployment.spool.runs.after(after or ""):
        # The list leaves out a run that was removed meanwhile, and a run without a checkpoint.
        with suppress(NotFound, CheckpointDamaged):
            listed.append(run_status(deployment, spec))
        if len(listed) == limit:
            break
    return listed


@router.get("/{run}")
def get_run(run: RunName, deployment: CurrentDeployment) -> RunStatus:
    """One run: its newest step, what vLLM serves, its queued and running jobs."""
    return run_status(deployment, deployment.spool.runs.get(run))


@router.delete("/{run}", status_code=204)
def delete_run(
    run: RunName,
    deployment: CurrentDeployment,
    tasks: BackgroundTasks,
    cancel_jobs: Annotated[
        bool, Query(description="cancel its queued and running jobs; 409 until they end")
    ] = False,
) -> None:
    """Delete a run with its checkpoints and ended jobs; refused while the run has queued or running
    jobs."""
    spool = deployment.spool
    spool.runs.directory(run)
    if cancel_jobs:
        for _, job in spool.jobs.pending(run):
            spool.queue.cancel(job.spec.id)
    tasks.add_task(shutil.rmtree, removal.delete_run(spool, run), ignore_errors=True)


@router.post(
    "/{run}/fork",
    status_code=201,
    responses={200: {"model": RunStatus, "description": "It existed."}},
)
def fork_run(
    run: RunName, request: Fork, response: Response, deployment: CurrentDeployment
) -> RunStatus:
    """Create a run whose step 0 is a checkpoint of the given run, including weights and optimizer
    state."""
    new = make_fork(deployment, Origin(run=run, step=request.step), request.name)
    return _answer(deployment, request.name, new, response)


@router.post("/{run}/rollback")
def rollback_run(run: RunName, request: Rollback, deployment: CurrentDeployment) -> RolledBack:
    """Take the steps after `step` out of the chain; refused while the run has queued or running
    jobs."""
    deployment.spool.runs.get(run)
    discarded = deployment.spool.checkpoints.rollback(run, request.step)
    return RolledBack(newest_step=deployment.spool.checkpoints.newest(run), discarded=discarded)
