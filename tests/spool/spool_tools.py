"""Helpers of the spool's tests."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.spool import Spool
from tandem.spool.schema import (
    Job,
    JobError,
    JobResult,
    JobSpec,
    PackedData,
    RLJob,
    RunSpec,
    Served,
)

LOST = JobError(type="runner_lost", message="gone", retriable=True)


def memory_directory() -> TemporaryDirectory:
    """A temporary directory in memory, where fsync costs nothing. Without a writable /dev/shm the
    directory is on disk."""
    return TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="tandem-test-"
    )


def write_adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    (directory / "adapter_config.json").write_text("{}")


def run_spec(name: str = "r", **more) -> RunSpec:
    return RunSpec(name=name, base_model="base", created=time.time(), **more)


def spool_with_run(root: Path, name: str = "r") -> Spool:
    spool = Spool.create(root)
    add_run(spool, name)
    return spool


def add_run(spool: Spool, name: str, **more) -> RunSpec:
    return spool.runs.create(run_spec(name, **more), write_adapter)


def maker(run: str = "r", **more) -> Callable[[str, int, Path], JobSpec]:
    def make(job_id: str, base_step: int, directory: Path) -> JobSpec:
        (directory / "tokens.npy").write_bytes(b"tokens of " + job_id.encode())
        data = PackedData(
            path="",
            sha256="",
            num_rows=1,
            sequence_length=8,
            num_items=1,
            num_tokens=1,
            num_unshared_tokens=1,
            num_trajectories=1,
            num_groups=1,
        )
        return RLJob(
            id=job_id, run=run, base_step=base_step, created=0, fingerprint="f", data=data, **more
        )

    return make


def submit(
    spool: Spool,
    job_id: str | None = None,
    run: str = "r",
    base_step: int | None = None,
    created: float | None = None,
    **more,
) -> Job:
    """Submits a job. `created`: the time of the submission by the clock."""
    named = {"run": run, "job_id": job_id, "fingerprint": "f", "base_step": base_step}
    return spool.queue.submit(
        maker(run, **more), **named, now=time.time if created is None else lambda: created
    )[0]


def start(spool: Spool, job_id: str | None = None, run: str = "r", **more) -> Job:
    """Submits and claims a job."""
    submitted, job = submit(spool, job_id, run, **more), spool.queue.claim("me")
    assert job is not None
    assert job.spec.id == submitted.spec.id
    return job


def stage(spool: Spool, job: Job, content: bytes = b"trained") -> Path:
    staged = spool.paths.work_dir(job.spec.id, job.attempt) / "checkpoint"
    (staged / "optimizer").mkdir(parents=True)
    (staged / "adapter_model.safetensors").write_bytes(content)
    (staged / "optimizer/adam.safetensors").write_bytes(b"adam" + content)
    return staged


def commit(spool: Spool, job: Job, content: bytes = b"trained") -> None:
    spool.checkpoints.commit(
        stage(spool, job, content), job.spec.run, job.spec.base_step + 1, job.spec.id
    )


def job_path(spool: Spool, job_id: str) -> Path:
    """The job's file."""
    return spool.paths.job_file(job_id)


def serve(spool: Spool, step: int) -> None:
    verified = {
        "verified": 1.0,
        "mean_abs_logprob_error": 0.0,
        "allowed_logprob_error": 0.15,
        "tokens_checked": 1,
    }
    spool.served.put("r", Served(step=step, model=f"r@{step}", checkpoint="ab", **verified))


def succeeded(job: Job) -> JobResult:
    return JobResult(state="succeeded", step=job.spec.base_step + 1, finished=time.time())


def failed(message: str = "no") -> JobResult:
    return JobResult(
        state="failed", error=JobError(type="rank_error", message=message), finished=time.time()
    )


def train_one(spool: Spool, run: str = "r") -> Job:
    """Runs one job from its submission to its end."""
    job = start(spool, run=run)
    commit(spool, job)
    spool.queue.finish(job, succeeded(job))
    return job
