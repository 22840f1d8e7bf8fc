"""What a rank does in one attempt: meet the others, load the model, train, write the checkpoint, leave.

Rank 0 reads the job and sends it to the others. It alone writes events and the checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import version
from platform import python_version
from typing import Any

import torch

from tandem import __version__
from tandem.config import Settings
from tandem.data.packed_format import PackedBatch
from tandem.families.adapter import WEIGHTS_FILE
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.parallel import Topology
from tandem.spool import Spool
from tandem.spool.paths import beat_file, staged_checkpoint
from tandem.spool.schema import EventType, Probe, RLJob, RLLoss
from tandem.trainer.rank import checkpoint, probe
from tandem.trainer.rank.heartbeat import Heartbeat
from tandem.trainer.rank.model_loader import LoadedModel, ModelLoader
from tandem.trainer.rank.rendezvous import Assignment, meet
from tandem.trainer.rank.resident import RankState
from tandem.training.phases import MemoryWatch, Phases
from tandem.training.steps import Training


def run_rank(spool: Spool, settings: Settings, job_id: str, attempt: int, state: RankState | None = None) -> None:
    """This rank's part of one attempt. Afterwards checkpoint base_step + 1 exists.

    Without `state` the rank has left the process groups, together with the others. With `state`, of a rank that stays,
    it has given back its device memory, and `state` holds what the next job can use.

    Raises Conflict if another job made that checkpoint, CheckpointDamaged if the one to start from isn't whole,
    NonFinite, InvalidInput, SpoolUnusable, or what torch raises. `state` can't be used after an error.
    """
    session = _Session(spool, settings, job_id, attempt, state or RankState())
    try:
        session.run()
        if state is not None:
            with session.phases.phase("offload"):
                state.offload()
    except torch.OutOfMemoryError:
        session.heartbeat.write("out of memory")  # with what was in use
        raise
    session.heartbeat.write("leave")
    if state is None:
        parallel.destroy()


class _Session:
    def __init__(self, spool: Spool, settings: Settings, job_id: str, attempt: int, state: RankState) -> None:
        self._spool, self._settings, self._job_id, self._attempt = spool, settings, job_id, attempt
        self._state = state
        self._rank = int(os.environ.get("RANK", "0"))
        watch = MemoryWatch()
        self.heartbeat = Heartbeat(beat_file(spool.paths.work_dir(job_id, attempt), self._rank), watch)
        self.phases = Phases(self.heartbeat, watch)
        self._device = device.activate(device.choose(settings.device), int(os.environ.get("LOCAL_RANK", "0")))
        self._versions = {"tandem": __version__, "python": python_version()}

    def run(self) -> None:
        self.heartbeat("rendezvous")
        assignment, connect = meet(self._spool, self._job_id, self._attempt)
        if assignment.done:
            return
        arch = read_arch(assignment.model)
        # The checkpoint's files are hashed while ranks connect and the model is built.
        checked = self._state.check_checkpoint(self._spool, assignment, arch)
        with self.phases.phase("rendezvous"):
            topology = self._state.join(assignment, self._settings, connect)
        torch.manual_seed(assignment.run.seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._versions |= {name: version(name) for name in ("torch", "megatron-core")}
        pids = parallel.gather_objects(os.getpid())
        self._event("started", pids=pids, topology=topology.sizes(), versions=self._versions, device=str(self._device))
        with self.phases.phase("data"):
            batch = PackedBatch.open(self._spool.absolute(assignment.job.data.path))
        with batch:
            sequences, row_length = probe.choose(batch), batch.sequence_length
            loader = ModelLoader(
                self._settings, arch, assignment, topology, checked,
                rehearse=(lambda policy: probe.rehearse(policy, sequences, row_length, self._device))
                if device.is_cuda() else None,
            )  # fmt: skip
            model = self._state.model = loader.load(self._state.model, self.phases)
            self._train(assignment, topology, batch, model, sequences)

    def _train(
        self, assignment: Assignment, topology: Topology, batch: PackedBatch, model: LoadedModel,
        sequences: list[list[int]],
    ) -> None:  # fmt: skip
        """Train and write the checkpoint. `sequences`: the probe's."""
        run, job, policy = assignment.run, assignment.job, model.policy
        loss = job.loss if isinstance(job, RLJob) else RLLoss()
        training = Training(
            run, job, batch, policy, model.optimizer, topology, self._device, self.phases,
            reference=lambda: checkpoint.reference_policy(self._spool, run.name, loss, policy),
        )  # fmt: skip
        self.heartbeat.steps = training.num_steps

        def logprobs() -> list[list[float]]:
            return probe.logprobs(policy, sequences, batch.sequence_length, self._device)

        with self.phases.phase("probe"):
            previous = logprobs()
        seconds, _ = self.phases.take()
        self._event("loaded", seconds=seconds, memory=self.phases.gather_memory())

        def report(step: int, metrics: dict[str, float]) -> None:
            self.heartbeat.step = step
            self._event("step", step=step, steps=training.num_steps, metrics=metrics)

        metrics = training.run(report)
        with self.phases.phase("checkpoint"):
            start = time.perf_counter()
            now = logprobs()
            with policy.adapter_disabled():
                base = logprobs()
            saved = checkpoint.gather(policy, model.optimizer)
            if self._rank == 0:
                tested = Probe(tokens=sequences, logprobs=now, previous=previous, base=base)
                self._commit(assignment, topology, saved, metrics, tested, start)
        self._state.checkpoint = run.name, job.base_step + 1, self._job_id

    def _commit(
        self, assignment: Assignment, topology: Topology, saved: checkpoint.CheckpointState,
        metrics: Mapping[str, float], tested: Probe, start: float,
    ) -> None:  # fmt: skip
        """Write the checkpoint's files and make them the run's next checkpoint."""
        checkpoints, name, base_step = self._spool.checkpoints, assignment.run.name, assignment.job.base_step
        staged = staged_checkpoint(self._spool.paths.work_dir(self._job_id, self._attempt))
        checkpoint.write(saved, checkpoints.path(name, base_step), staged)
        manifest = checkpoints.commit(
            staged, name, base_step + 1, self._job_id,
            topology=topology.sizes(), versions=self._versions, metrics=metrics, probe=tested,
        )  # fmt: skip
        self._event(
            "checkpoint",
            step=manifest.step,
            sha256=manifest.files[WEIGHTS_FILE].sha256,
            bytes=sum(entry.size for entry in manifest.files.values()),
            seconds=time.perf_counter() - start,
        )

    def _event(self, kind: EventType, **data: Any) -> None:
        if self._rank == 0:
            self._spool.events.append(self._job_id, kind, attempt=self._attempt, **data)
