"""Real jobs make a spool for `fuzz.files`, with every kind of file that programs read from a
spool."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

# A model this small is computed in one thread. Several threads would wait for one another on a busy
# machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fake_vllm
from rank import jobs
from tandem.config import Settings
from tandem.inference.publisher.publisher import Publisher
from tandem.spool import Spool, fs
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Beat, Hold, Job, JobError, JobResult
from tandem.vllm_client.client import VllmClient
from tiny import write_random_model

WITNESS = "witness"
"""A run that is never damaged. Whatever happens to the other runs, this run is served and
trained."""


@dataclass
class Stage:
    """The directory of the spool's copies, and the vLLM that all publishers use."""

    directory: Path
    model: Path
    vllm: fake_vllm.FakeVllm

    @property
    def original(self) -> Path:
        return self.directory / "original"

    def settings(self, root: Path) -> Settings:
        return Settings(
            root=root,
            base_model=str(self.model),
            device="cpu",
            inference_url=self.vllm.url,
            max_lora_rank=16,
            api_key=fake_vllm.API_KEY,
            admin_token=fake_vllm.ADMIN_TOKEN,
            verify_tolerance=1000.0,
            keep_checkpoints=1,
            keep_days=1e-9,
        )

    def publisher(self, root: Path) -> Publisher:
        settings = self.settings(root)
        return Publisher(settings, VllmClient(settings, timeout=5.0), grace=0.0)

    def copy(self, name: str) -> Path:
        """Makes a copy of the spool. An earlier copy with this name is removed."""
        target = self.directory / name
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(self.original, target, symlinks=True))


def make_stage(directory: Path) -> Stage:
    """Makes the spool. The spool has the runs `main`, `lost`, `asked`, `ended`, `forked` and
    `WITNESS`, and jobs in every state."""
    vllm = fake_vllm.FakeVllm()
    vllm.start()
    stage = Stage(directory, write_random_model(directory / "model", num_hidden_layers=1), vllm)
    spool = Spool.create(stage.original)
    for run in ("main", "lost", "asked", "ended", WITNESS):
        jobs.make_run(spool, stage.model, run)
    for run, count in (("main", 2), ("ended", 2), (WITNESS, 1)):
        for number in range(count):
            submit = _rl if number else _sft
            jobs.run_here(spool, submit(spool, run, f"{run}-{number}"))
            spool.paths.log_file(f"{run}-{number}").write_text("[rank 0] hello\n")
    spool.checkpoints.rollback("ended", 1)
    spool.checkpoints.pin("main", 1)
    source = spool.runs.get("main")
    spool.checkpoints.fork(
        "main", 1, source.model_copy(update={"name": "forked", "created": time.time()})
    )
    stage.publisher(stage.original).once()
    _end(spool, _sft(spool, "ended", "failed"))
    spool.queue.cancel(_sft(spool, "ended", "cancelled"))
    for run in ("lost", "asked"):
        _lose(spool, _sft(spool, run, f"{run}-job"))
    spool.queue.cancel("asked-job")
    _rl(spool, "main", "main-next")
    _sft(spool, WITNESS, f"{WITNESS}-next")
    now = time.time()
    spool.hold.put(
        Hold(
            runner="gone",
            job="lost-job",
            attempt=1,
            phase="training",
            since=now,
            beat=now,
            lease=60.0,
            deadline=now + 60,
            floor={"GPU-1": 10},
        )
    )
    with spool.runner_lock("gone"):
        pass
    return stage


def _sft(spool: Spool, run: str, job_id: str) -> str:
    return jobs.submit_sft(spool, run, job_id, examples=jobs.random_examples(0, 2))


def _rl(spool: Spool, run: str, job_id: str) -> str:
    return jobs.submit_rl(spool, run, job_id, groups=jobs.random_groups(0, 1))


def _end(spool: Spool, job_id: str) -> None:
    error = JobError(type="rank_crashed", message="rank 0 died", log_tail="Traceback")
    spool.queue.finish(
        jobs.claim(spool, job_id), JobResult(state="failed", error=error, finished=time.time())
    )


def _lose(spool: Spool, job_id: str) -> Job:
    """Leaves a job as if its runner and its rank had died during the job."""
    job = jobs.claim(spool, job_id)
    attempt = Attempt(spool, job_id, job.attempt)
    memory = {"allocated": 10, "reserved": 10}
    beat = Beat(
        time=time.time(),
        phase="data",
        step=1,
        steps=2,
        uuid="cpu",
        memory=memory,
        phases={"data": memory},
    )
    attempt.beat(0).write_text(beat.model_dump_json())
    fs.write_json_atomic(
        attempt.error(0), JobError(type="rank_error", message="it raised", retriable=True)
    )
    spool.events.append(
        job_id, "step", attempt=1, step=1, steps=2, metrics={"loss": 1.0, "tokens": 10}
    )
    return job
