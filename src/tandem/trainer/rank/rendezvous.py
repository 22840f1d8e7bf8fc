"""The rendezvous of an attempt's ranks, in which the ranks receive their job."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tandem.config import resolve_model
from tandem.errors import Conflict
from tandem.families.model_config import base_model_files, model_directory
from tandem.model import parallel
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import JobSpec, OptimizerSettings, Record, RunSpec, SessionJob
from tandem.system import liveness

RENDEZVOUS_SECONDS = 300.0  # the longest time until all ranks have imported their modules
Beat = Callable[[str], None]
"""A function that writes a rank's heartbeat for the given phase."""


class Assignment(Record):
    """The data that rank 0 reads from the spool and sends to all ranks."""

    run: RunSpec
    job: JobSpec
    model: str  # directory of the base model

    # For each file of the base model: its name, its size in bytes, and the time of its last change
    # in ns.
    model_files: tuple[tuple[str, int, int], ...]

    @property
    def optimizer(self) -> OptimizerSettings:
        """The job's optimizer settings. A session's job gets the defaults, because each of its
        requests has its own settings."""
        return OptimizerSettings() if isinstance(self.job, SessionJob) else self.job.optimizer

    def requirements(self) -> tuple[object, ...]:
        """All properties that the process groups and the loaded model depend on. A job with equal
        requirements can reuse the groups and the model."""
        return self.model, self.model_files, self.run.lora, self.job.stall_seconds


_MESSAGE: TypeAdapter[Assignment | str] = TypeAdapter(Assignment | str)
"""Rank 0's message: the assignment, or the reason why it could not be read."""


def meet(
    attempt: Attempt,
    beat: Beat,
    *,
    prepare: Callable[[Assignment], None] = lambda _: None,
) -> tuple[Assignment, Callable[[], None]]:
    """Connect to the other ranks through the store that the ranks' parent runs, and get the job.
    Without torchrun's environment, this process is the only rank.

    Rank 0, and the ranks on other hosts, download a base model that is on the hub and not in their
    cache. The download may take longer than any limit on a wait, so all ranks send heartbeats
    during the download. Only the job's `deadline_seconds` limits the download.

    Returns the assignment, and a function that joins torch's default process group with the job's
    own limit on every wait. Raises Conflict (see `_read`) on rank 0, and RuntimeError with the same
    message on the other ranks.

    Args:
        prepare: a function that rank 0 calls before it sends the assignment; the function must send
            its own heartbeats.
    """

    def read() -> Assignment:
        assignment = _read(attempt, beat)
        prepare(assignment)
        return assignment

    if "RANK" not in os.environ:
        return read(), lambda: None
    store, rank, world_size = next(
        rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
    )
    store.set_timeout(timedelta(seconds=RENDEZVOUS_SECONDS))
    key = f"tandem/{attempt}"
    if rank == 0:
        try:
            assignment = read()
        except BaseException as error:
            store.set(key, _MESSAGE.dump_json(str(error)))
            raise
        store.set(key, _MESSAGE.dump_json(assignment))
    else:
        while not store.check([key]):
            beat("rendezvous")
            time.sleep(0.01)
        message = _MESSAGE.validate_json(store.get(key))
        if isinstance(message, str):
            raise RuntimeError(f"rank 0 could not read the job: {message}")
        assignment = (
            message
            if os.environ.get("GROUP_RANK", "0") == "0"
            # On this host, the base model's files may be in another directory than on host 0. The
            # hosts' agents have already compared the files' content.
            else message.model_copy(update=_base_model(message.run, attempt.spool, beat))
        )

    def connect() -> None:
        timeout = timedelta(seconds=assignment.job.stall_seconds)
        parallel.connect(PrefixStore(key, store), rank, world_size, timeout)

    return assignment, connect


def _read(attempt: Attempt, beat: Beat) -> Assignment:
    """Raises Conflict if the job is not running this attempt, or if its checkpoint already
    exists."""
    spool, job_id = attempt.spool, attempt.job
    state, job = spool.jobs.get(job_id)
    if state != "running" or job.attempt != attempt.number:
        raise Conflict(
            f"job {job_id} is {state}, attempt {job.attempt}; this rank was started for attempt"
            f" {attempt.number}"
        )
    spec = job.spec
    newest = spool.checkpoints.newest(spec.run)
    # a session's job continues from the checkpoints of its earlier attempts
    if isinstance(spec, SessionJob):
        spec = spec.model_copy(update={"base_step": newest})
    elif newest > spec.base_step:
        made_by = spool.checkpoints.manifest(spec.run, spec.base_step + 1).job
        raise Conflict(
            f"run {spec.run} has a checkpoint {spec.base_step + 1} already, made by"
            f" {made_by or 'no job'}, so job {job_id} can't make it from {spec.base_step}; submit"
            f" it again for step {newest}"
        )
    run = spool.runs.get(spec.run)
    return Assignment(run=run, job=spec, **_base_model(run, spool, beat))


def _base_model(run: RunSpec, spool: Spool, beat: Beat) -> dict[str, Any]:
    """The fields of an `Assignment` that describe this host's base model."""
    model = resolve_model(spool.root, run.base_model)
    directory = liveness.in_thread(
        lambda: model_directory(model), lambda: beat("download"), seconds=1.0
    )
    stats = {path.name: path.stat() for path in base_model_files(directory)}
    files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    return {"model": str(directory), "model_files": files}
