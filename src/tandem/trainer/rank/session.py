"""What a rank does, from its first collective to its last: load, train, write the checkpoint, leave.

Rank 0 reads the job and hands it to the others; it alone writes events and the checkpoint. Each rank keeps
`beat.<rank>` (`tandem.spool.schema.Beat`) fresh in the attempt's work directory.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from tandem import __version__
from tandem.config import Settings
from tandem.data.packed import PackedBatch
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.arch import read_arch
from tandem.model import parallel
from tandem.model.device import device
from tandem.model.policy import Policy
from tandem.spool import Spool
from tandem.spool.paths import beat_file, staged_checkpoint
from tandem.spool.schema import Beat, Probe, RLJob, RLLoss
from tandem.trainer.rank import checkpoint, probe
from tandem.trainer.rank.kept import Kept, Need
from tandem.trainer.rank.rendezvous import meet
from tandem.training.memory import MemoryWatch
from tandem.training.phases import Phases
from tandem.training.steps import Setup, make_plan, train

# Within a phase, not more often than this.
BEAT_SECONDS = 0.5


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


def run_rank(spool: Spool, settings: Settings, job_id: str, attempt: int, kept: Kept | None = None) -> None:
    """This rank's part of one attempt. Returns when checkpoint base_step + 1 exists and all ranks have left together;
    or, with `kept`, when device memory is given back and `kept` has what the next job may use.

    Raises Conflict when that checkpoint is another job's, CheckpointDamaged when the one to start from isn't whole,
    NonFinite, InvalidInput, SpoolUnusable, or whatever torch raises. `kept` is then of no use any more.
    """
    rank = int(os.environ.get("RANK", "0"))
    watch = MemoryWatch()
    beat = Heartbeat(beat_file(spool.paths.work_dir(job_id, attempt), rank), watch)
    phases = Phases(beat, watch)
    where = device.activate(device.choose(settings.device), int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _run(spool, settings, job_id, attempt, beat, phases, where, kept or Kept())
        if kept is not None:
            with phases.phase("offload"):
                kept.offload()
    except torch.OutOfMemoryError:
        beat.now("out of memory")  # so that what was in use, and that it ran out, is known
        raise
    beat.now("leave")
    if kept is None:
        parallel.destroy()


def _run(spool: Spool, settings: Settings, job_id: str, attempt: int, beat: Heartbeat, phases: Phases,
         where: torch.device, kept: Kept) -> None:  # fmt: skip
    beat("rendezvous")
    meeting = meet(spool, job_id, attempt)
    run, job = meeting.assignment.run, meeting.assignment.job
    if meeting.assignment.done:
        return
    need = Need.of(spool, meeting.assignment)
    arch = read_arch(need.model)
    # The checkpoint's files are hashed while ranks connect and the model is made.
    beside = ThreadPoolExecutor(1)
    checking = beside.submit(kept.checking(need, spool, run, job.base_step, arch))
    beside.shutdown(wait=False)
    with phases.phase("rendezvous"):
        topology = kept.join(need, settings, meeting.connect)
    torch.manual_seed(run.seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def event(kind: Any, **data: Any) -> None:
        if topology.rank == 0:
            spool.events.append(job_id, kind, attempt=attempt, **data)

    versions = {"tandem": __version__, "python": python_version()}
    versions |= {name: version(name) for name in ("torch", "megatron-core")}
    pids = parallel.gather_objects(os.getpid())
    event("started", pids=pids, topology=topology.sizes(), versions=versions, device=str(where))

    with phases.phase("data"):
        batch = PackedBatch.open(spool.absolute(job.data.path))
    with batch:
        sequences = probe.choose(batch)

        def rehearse(policy: Policy) -> None:
            probe.rehearse(policy, sequences, batch.sequence_length, where)

        policy, optimizer = kept.load(settings, arch, job, checking, phases, rehearse if device.is_cuda() else None)

        def probed() -> list[list[float]]:
            return probe.logprobs(policy, sequences, batch.sequence_length, where)

        loss = job.loss if isinstance(job, RLJob) else RLLoss()
        setup = Setup(
            run, job, batch, policy, optimizer, topology, where, phases,
            reference=lambda: checkpoint.reference(spool, run.name, loss, policy),
        )  # fmt: skip
        # What is wrong with the settings should show before the work.
        beat.steps = len(make_plan(run, job, batch, topology).steps)
        with phases.phase("probe"):
            previous = probed()
        seconds, _ = phases.take()
        memory = phases.gather()
        event("loaded", seconds=seconds, memory=memory)

        def report(step: int, steps: int, metrics: dict[str, float]) -> None:
            beat.step = step
            event("step", step=step, steps=steps, metrics=metrics)

        metrics = train(setup, report)
        with phases.phase("checkpoint"):
            start = time.perf_counter()
            now = probed()
            with policy.adapter_disabled():
                base = probed()
            saved = checkpoint.snapshot(policy, optimizer)
            if topology.rank == 0:
                staged = staged_checkpoint(spool.paths.work_dir(job_id, attempt))
                checkpoint.stage(saved, spool.checkpoints.path(run.name, job.base_step), staged)
                manifest = spool.checkpoints.commit(
                    staged, run.name, job.base_step + 1, job_id,
                    topology=topology.sizes(), versions=versions, metrics=metrics,
                    probe=Probe(tokens=sequences, logprobs=now, previous=previous, base=base),
                )  # fmt: skip
                event(
                    "checkpoint",
                    step=manifest.step,
                    sha256=manifest.files[WEIGHTS_FILE].sha256,
                    bytes=sum(entry.size for entry in manifest.files.values()),
                    seconds=time.perf_counter() - start,
                )
        kept.holds = (run.name, job.base_step + 1, job_id)
