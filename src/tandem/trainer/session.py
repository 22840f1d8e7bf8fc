"""What a rank does, from its first collective to its last: load, train, write the checkpoint, leave.

Rank 0 reads the job and hands it to the others; it alone writes events and the checkpoint. Each rank keeps
`beat.<rank>` (`tandem.spool.schema.Beat`) fresh in the attempt's work directory.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tandem import __version__
from tandem.config import Settings, resolve_model
from tandem.data.packed import PackedBatch
from tandem.errors import Conflict
from tandem.model import device, parallel
from tandem.model.adapter import WEIGHTS_FILE
from tandem.model.arch import read_arch
from tandem.model.build import build_policy
from tandem.spool import Spool
from tandem.spool.schema import Beat, Job, Probe, RLJob, RLLoss, RunSpec, SFTJob
from tandem.trainer import probe, state
from tandem.trainer.memory import MemoryWatch
from tandem.trainer.metrics import Phases
from tandem.trainer.optimizer import AdapterOptimizer
from tandem.trainer.steps import Setup, make_plan, train

# How long ranks wait for one another before they know the job's own bound.
RENDEZVOUS_SECONDS = 300.0
# Within a phase, not more often than this.
BEAT_SECONDS = 0.5


@dataclass(frozen=True)
class Assignment:
    """What rank 0 found out and every rank goes by."""

    run: RunSpec
    job: RLJob | SFTJob
    done: bool  # the checkpoint is there already, made by this job


class Heartbeat:
    """`beat.<rank>` of one attempt. A beat that can't be written is no reason to stop training."""

    def __init__(self, path: Path, watch: MemoryWatch) -> None:
        self._path = path
        self._watch = watch
        self._phase = ""
        self._last = 0.0
        self.step = 0
        self.steps = 0

    def __call__(self, phase: str) -> None:
        if phase != self._phase or time.time() - self._last >= BEAT_SECONDS:
            self.now(phase)

    def now(self, phase: str) -> None:
        """However short ago the last one was."""
        self._phase, self._last = phase, time.time()
        beat = Beat(time=self._last, phase=phase, step=self.step, steps=self.steps, **self._watch.beat())
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        with suppress(OSError):
            temporary.write_text(beat.model_dump_json())
            temporary.replace(self._path)


def run_rank(spool: Spool, settings: Settings, job_id: str, attempt: int) -> None:
    """The whole life of this rank. Returns when checkpoint base_step + 1 exists and all ranks have left together.

    Raises Conflict when that checkpoint is another job's, CheckpointDamaged when the one to start from isn't whole,
    NonFinite, InvalidInput, SpoolUnusable, or whatever torch raises.
    """
    rank = int(os.environ.get("RANK", "0"))
    watch = MemoryWatch()
    beat = Heartbeat(spool.jobs.beat_path(job_id, attempt, rank), watch)
    phases = Phases(beat, watch)
    where = device.activate(device.choose(settings.device), int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _run(spool, settings, job_id, attempt, rank, beat, phases, where)
    except torch.OutOfMemoryError:
        beat.now("out of memory")  # so that what was in use, and that it ran out, is known
        raise


def _run(spool: Spool, settings: Settings, job_id: str, attempt: int, rank: int, beat: Heartbeat, phases: Phases,
         where: torch.device) -> None:  # fmt: skip
    with phases.phase("rendezvous"):
        assignment = _join(spool, job_id, attempt, rank)
        run, job = assignment.run, assignment.job
        topology = parallel.init_parallel(settings.tensor_parallel, timeout_seconds=job.stall_seconds)
    if assignment.done:
        parallel.destroy()
        return
    torch.manual_seed(run.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def event(kind: Any, **data: Any) -> None:
        if rank == 0:
            spool.events.append(job_id, kind, attempt=attempt, **data)

    versions = {"tandem": __version__, "python": python_version()}
    versions |= {name: version(name) for name in ("torch", "megatron-core")}
    pids: list[int] = [0] * topology.world_size
    dist.all_gather_object(pids, os.getpid())
    event("started", pids=pids, topology=topology.sizes(), versions=versions, device=str(where))

    model = resolve_model(spool.root, run.base_model)
    with phases.phase("data"):
        batch = PackedBatch.open(spool.absolute(job.data.path))
    with batch:
        # The checkpoint is read and its hashes are compared while the model is made.
        with ThreadPoolExecutor(1) as beside:
            with phases.phase("build"):
                arch = read_arch(model)
                before = beside.submit(state.read, spool, run.name, job.base_step, arch, run.lora)
                dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
                policy = build_policy(arch, run.lora, dtype=dtype, recompute=settings.recompute)
                optimizer = AdapterOptimizer(policy, job.optimizer)
            with phases.phase("base_weights"):
                policy.load_base(model)
            with phases.phase("state"):
                state.apply(before.result(), policy, optimizer)
        del before  # its tensors are on the device now
        loss = job.loss if isinstance(job, RLJob) else RLLoss()
        setup = Setup(
            run, job, batch, policy, optimizer, topology, where, phases,
            reference=lambda: state.reference(spool, run.name, loss, policy),
        )  # fmt: skip
        # What is wrong with the settings should show before the work.
        beat.steps = len(make_plan(run, job, batch, topology).steps)
        with phases.phase("probe"):
            sequences = probe.choose(batch)
            previous = probe.logprobs(policy, sequences, batch.sequence_length, where)
        seconds, _ = phases.take()
        memory = phases.gather()
        event("loaded", seconds=seconds, memory=memory)

        def report(step: int, steps: int, metrics: dict[str, float]) -> None:
            beat.step = step
            event("step", step=step, steps=steps, metrics=metrics)

        metrics = train(setup, report)
        with phases.phase("checkpoint"):
            start = time.perf_counter()
            now = probe.logprobs(policy, sequences, batch.sequence_length, where)
            saved = state.snapshot(policy, optimizer)
            if rank == 0:
                staged = spool.jobs.work_dir(job_id, attempt) / "checkpoint"
                state.stage(saved, spool.checkpoints.path(run.name, job.base_step), staged)
                manifest = spool.checkpoints.commit(
                    staged, run.name, job.base_step + 1, job_id,
                    topology=topology.sizes(), versions=versions, metrics=metrics,
                    probe=Probe(tokens=sequences, logprobs=now, previous=previous),
                )  # fmt: skip
                event(
                    "checkpoint",
                    step=manifest.step,
                    sha256=manifest.files[WEIGHTS_FILE].sha256,
                    bytes=sum(entry.size for entry in manifest.files.values()),
                    seconds=time.perf_counter() - start,
                )
    beat("leave")
    parallel.destroy()


def _join(spool: Spool, job_id: str, attempt: int, rank: int) -> Assignment:
    """Meet the other ranks and learn the job.

    Rank 0 passes it on through the store that torchrun's ranks share, so that the process groups can be made with the
    job's own bound; what it fails at, it tells, and nobody waits in vain.
    """
    if "RANK" not in os.environ:
        return _read(spool, job_id, attempt)
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
        store.set(key, json.dumps(message | {"done": assignment.done}))
    else:
        message = json.loads(store.get(key))
        if "error" in message:
            raise RuntimeError(f"rank 0 could not read the job: {message['error']}")
        run = RunSpec.model_validate_json(message["run"])
        assignment = Assignment(run, _spec(message["job"]), message["done"])
    dist.init_process_group(
        device.backend(),
        store=PrefixStore(key, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=assignment.job.stall_seconds),
    )
    return assignment


def _spec(text: str) -> RLJob | SFTJob:
    return Job.model_validate({"spec": json.loads(text)}).spec


def _read(spool: Spool, job_id: str, attempt: int) -> Assignment:
    where, job = spool.jobs.get(job_id)
    if where != "running" or job.attempt != attempt:
        raise Conflict(f"job {job_id} is {where}, attempt {job.attempt}; this rank was started for attempt {attempt}")
    spec = job.spec
    run = spool.runs.get(spec.run)
    newest = spool.checkpoints.newest(spec.run)
    done = newest > spec.base_step
    if done:
        made_by = spool.checkpoints.manifest(spec.run, spec.base_step + 1).job
        if made_by != job_id:
            raise Conflict(
                f"run {spec.run} has a checkpoint {spec.base_step + 1} already, made by {made_by or 'no job'}, so job "
                f"{job_id} can't make it from {spec.base_step}; submit it again for step {newest}"
            )
    return Assignment(run, spec, done)
