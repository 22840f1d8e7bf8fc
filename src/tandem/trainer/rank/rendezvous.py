"""How the ranks of an attempt meet and learn their job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tandem.config import resolve_model
from tandem.errors import Conflict
from tandem.model import parallel
from tandem.model.weights.base import model_directory
from tandem.spool import Spool
from tandem.spool.schema import Job, RLJob, RunSpec, SFTJob

# How long ranks wait for one another before they know the job's own bound.
RENDEZVOUS_SECONDS = 300.0


@dataclass(frozen=True)
class Assignment:
    """What rank 0 found out and every rank goes by."""

    run: RunSpec
    job: RLJob | SFTJob
    done: bool  # the checkpoint is there already, made by this job
    files: Files  # the base model's; none where the job is done


Files = tuple[tuple[str, int, int], ...]
"""Name, bytes, and time of the last change in ns: another base model under the same name is seen by these."""


@dataclass(frozen=True)
class Meeting:
    assignment: Assignment
    connect: Callable[[], None]
    """Join torch's default process group with the others, with the job's own bound on every wait."""


def meet(spool: Spool, job_id: str, attempt: int) -> Meeting:
    """Meet the other ranks and learn the job; the process group comes after, so that it can have the job's own bound.

    Rank 0 reads the job and passes it on through the store that torchrun's ranks share; what it fails at, it tells, and
    nobody waits in vain. Without torchrun's environment this process is alone.
    """
    if "RANK" not in os.environ:
        return Meeting(_read(spool, job_id, attempt), lambda: None)
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_SECONDS)))
    store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
    key = f"tandem/{job_id}/{attempt}"
    if rank == 0:
        try:
            assignment = _read(spool, job_id, attempt)
        except BaseException as error:
            store.set(key, json.dumps({"error": str(error)}))
            raise
        message = {"run": assignment.run.model_dump_json(), "job": assignment.job.model_dump_json()}
        store.set(key, json.dumps(message | {"done": assignment.done, "files": assignment.files}))
    else:
        message = json.loads(store.get(key))
        if "error" in message:
            raise RuntimeError(f"rank 0 could not read the job: {message['error']}")
        run = RunSpec.model_validate_json(message["run"])
        files = tuple((name, size, changed) for name, size, changed in message["files"])
        assignment = Assignment(run, _spec(message["job"]), message["done"], files)

    def connect() -> None:
        timeout = timedelta(seconds=assignment.job.stall_seconds)
        parallel.connect(PrefixStore(key, store), rank, world_size, timeout)

    return Meeting(assignment, connect)


def _spec(text: str) -> RLJob | SFTJob:
    return Job.model_validate({"spec": json.loads(text)}).spec


def _read(spool: Spool, job_id: str, attempt: int) -> Assignment:
    where, job = spool.jobs.get(job_id)
    if where != "running" or job.attempt != attempt:
        raise Conflict(f"job {job_id} is {where}, attempt {job.attempt}; this rank was started for attempt {attempt}")
    spec = job.spec
    run = spool.runs.get(spec.run)
    newest = spool.checkpoints.newest(spec.run)
    if done := newest > spec.base_step:
        made_by = spool.checkpoints.manifest(spec.run, spec.base_step + 1).job
        if made_by != job_id:
            raise Conflict(
                f"run {spec.run} has a checkpoint {spec.base_step + 1} already, made by {made_by or 'no job'}, so job "
                f"{job_id} can't make it from {spec.base_step}; submit it again for step {newest}"
            )
        return Assignment(run, spec, done, ())
    directory = model_directory(resolve_model(spool.root, run.base_model))
    files = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.is_file()]
    return Assignment(run, spec, done, tuple((name, found.st_size, found.st_mtime_ns) for name, found in files))
