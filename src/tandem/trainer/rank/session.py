"""What a rank does in one attempt: meet the others, load the model, train, write the checkpoint,
leave.

Rank 0 reads the job and sends it to the others. It alone writes events and the checkpoint.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

import torch

from tandem import __version__
from tandem.config import Settings
from tandem.data.packed_format import PackedBatch
from tandem.families.arch import Arch
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.device import memory
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.spool import Spool
from tandem.spool.paths import beat_file, staged_checkpoint
from tandem.spool.schema import EventType, Manifest, Probe
from tandem.topology.sizes import Sizes
from tandem.trainer.rank import checkpoint, full_volume, model_checkpoint, probe
from tandem.trainer.rank.heartbeat import Heartbeat
from tandem.trainer.rank.model_loader import Checked, LoadedModel, ModelLoader, reference_policy
from tandem.trainer.rank.publication import Publication
from tandem.trainer.rank.rendezvous import Assignment, meet
from tandem.training.phases import MemoryWatch, Phases
from tandem.training.sharded_adam import ShardedAdam
from tandem.training.steps import Training

_libc = ctypes.CDLL(None)


class RankState:
    """What a rank keeps from one job to the next, if it stays (`launch=resident`): process groups
    and the model.

    Between jobs it gives the model's device memory back. A job that needs other groups or another
    model begins anew.
    """

    def __init__(self) -> None:
        # `Assignment.requirements` of what is kept.
        self._requirements: tuple[object, ...] | None = None
        self._topology: Topology | None = None
        self.model: LoadedModel | None = None
        self.checkpoint: tuple[str, int, str] | None = None
        """Run, step and job of the checkpoint that equals the model's trained weights and Adam's
        state."""

    def check_checkpoint(
        self, spool: Spool, assignment: Assignment, arch: Arch
    ) -> Future[Checked | None]:
        """Start to check the files of the checkpoint that the job starts from, in a thread. Call it
        before `join`."""
        run, step = assignment.run, assignment.job.base_step
        kept, self.checkpoint = self.checkpoint, None
        in_memory = assignment.requirements() == self._requirements and (
            kept == (run.name, step, spool.checkpoints.manifest(run.name, step).job)
        )

        def check() -> Checked | None:
            if in_memory:
                spool.checkpoints.verify(run.name, step)
                return None
            if run.lora is None:
                return model_checkpoint.find(spool, run.name, step, Path(assignment.model))
            return checkpoint.check(spool, run.name, step, arch, run.lora)

        thread = ThreadPoolExecutor(1)
        result = thread.submit(check)
        thread.shutdown(wait=False)
        return result

    def join(
        self, assignment: Assignment, settings: Settings, connect: Callable[[], None]
    ) -> Topology:
        """The process groups for the job: the kept ones, or new ones. If they are new, the kept
        model is discarded."""
        if assignment.requirements() != self._requirements or self._topology is None:
            if self.model is not None:
                self.model = None
                gc.collect()
                memory.release_cached()
            parallel.destroy()  # which all ranks do together (R3)
            connect()
            timeout = assignment.job.stall_seconds
            self._topology = parallel.init_parallel(Sizes.of(settings), timeout_seconds=timeout)
            self._requirements = assignment.requirements()
        return self._topology

    def offload(self) -> None:
        """Give back the model's device memory, and all memory that allocators keep unused."""
        if self.model is not None and not self.model.policy.offloaded:
            self.model.policy.offload()
            self.model.optimizer.offload()
        gc.collect()  # graphs and buffers in reference cycles
        memory.release_cached()
        _libc.malloc_trim(0)  # each job's threads fragment the heap further


def run_rank(
    spool: Spool, settings: Settings, job_id: str, attempt: int, state: RankState | None = None
) -> None:
    """This rank's part of one attempt. Afterwards checkpoint base_step + 1 exists, and the rank has
    left the process groups or, with the `state` of a rank that stays, given back its device memory.

    Raises Conflict if that checkpoint exists, CheckpointDamaged if the one to start from isn't
    whole, NonFinite, InvalidInput, SpoolUnusable, or what torch raises. `state` can't be used after
    an error.
    """
    session = _Session(spool, settings, job_id, attempt, state or RankState())
    try:
        session.run()
        if state is not None:
            with session.phases.phase("offload"):
                state.offload()
    except torch.OutOfMemoryError:
        session.heartbeat.write("out of memory")  # it records how much was in use
        raise
    session.heartbeat.write("leave")
    if state is None:
        parallel.destroy()


class _Session:
    """One rank's part of one attempt; see `run_rank`."""

    def __init__(
        self, spool: Spool, settings: Settings, job_id: str, attempt: int, state: RankState
    ) -> None:
        self._spool, self._settings, self._job_id, self._attempt, self._state = (
            spool,
            settings,
            job_id,
            attempt,
            state,
        )
        self._rank = int(os.environ.get("RANK", "0"))
        self._work = spool.paths.work_dir(job_id, attempt)
        self._device = device.activate(
            device.choose(settings.device), int(os.environ.get("LOCAL_RANK", "0"))
        )
        watch = MemoryWatch()
        self.heartbeat = Heartbeat(beat_file(self._work, self._rank), watch)
        self.phases = Phases(self.heartbeat, watch)

    def run(self) -> None:
        self.heartbeat("rendezvous")
        self._assignment, connect = meet(
            self._spool, self._job_id, self._attempt, self.heartbeat, prepare=self._wait_for_space
        )
        arch = read_arch(self._assignment.model)
        # The checkpoint's files are hashed while ranks connect and the model is built.
        checked = self._state.check_checkpoint(self._spool, self._assignment, arch)
        with self.phases.phase("rendezvous"):
            self._topology = self._state.join(self._assignment, self._settings, connect)
        torch.manual_seed(self._assignment.run.seed)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._versions = {"tandem": __version__, "python": python_version()}
        self._versions |= {name: version(name) for name in ("torch", "megatron-core")}
        pids, sizes = parallel.gather_objects(os.getpid()), self._topology.sizes.manifest()
        self._event(
            "started", pids=pids, topology=sizes, versions=self._versions, device=str(self._device)
        )
        with self.phases.phase("data"):
            batch = PackedBatch.open(
                self._spool.paths.data_dir(self._job_id), self._assignment.job.data.sha256
            )
        with batch:
            sequences, long = probe.choose(batch), probe.choose_long(batch, arch.vocab_size)
            rehearse = partial(probe.rehearse, sequences, batch.sequence_length, self._device)
            loader = ModelLoader(
                self._settings,
                arch,
                self._assignment,
                self._topology,
                checked,
                rehearse if device.is_cuda() else None,
            )
            self._state.model = loader.load(self._state.model, self.phases)
            found = checked.result()
            self._older_state = found.older if isinstance(found, model_checkpoint.Found) else None
            self._train(batch, self._state.model, sequences, long)

    def _wait_for_space(self, assignment: Assignment) -> None:
        """Rank 0, while the others wait for the assignment."""
        self._assignment = assignment
        full_volume.wait_for_space(
            self._spool,
            assignment.run.name,
            assignment.job.base_step,
            state=self._state_elsewhere is None,
            beat=partial(self.heartbeat, "rendezvous"),
        )

    def _train(
        self, batch: PackedBatch, model: LoadedModel, sequences: list[list[int]], long: list[int]
    ) -> None:
        """Train and write the checkpoint. `sequences`, `long`: the probe's."""
        run, job, policy = self._assignment.run, self._assignment.job, model.policy
        base_model = Path(self._assignment.model)
        training = Training(
            run,
            job,
            batch,
            policy,
            model.optimizer,
            self._topology,
            self._device,
            self.phases,
            reference=partial(
                reference_policy,
                self._spool,
                run.name,
                base_model,
                policy,
                job.loss.reference_field,
                partial(self.heartbeat, "reference"),
            ),
            fit=self._settings.recompute == "auto",
        )
        self.heartbeat.steps = len(training.schedule.steps)
        logprobs = partial(probe.logprobs, policy, sequences, batch.sequence_length, self._device)
        with self.phases.phase("probe"):
            previous = logprobs()
            fp8_error = {}
            if self._settings.base_precision == "fp8":
                exact = previous
                policy.quantise_base()
                previous = logprobs()
                fp8_error = {"fp8_logprob_error": probe.mean_difference(exact, previous)}
        seconds, _ = self.phases.take()
        older = {} if self._older_state is None else {"optimizer_state": self._older_state}
        self._event(
            "loaded", seconds=seconds, memory=self.phases.gather_memory(), **fp8_error, **older
        )

        def report(step: int, metrics: dict[str, float]) -> None:
            self.heartbeat.step = step
            with full_volume.event_left_out():
                self._event("step", step=step, steps=self.heartbeat.steps, metrics=metrics)

        metrics = training.train(report) | fp8_error
        if evaluated := training.evaluate():
            seconds, _ = self.phases.take()
            self._event("evaluated", step=self.heartbeat.step, metrics=evaluated, seconds=seconds)
            metrics |= evaluated
        publication = self._publication(base_model, policy)
        with self.phases.phase("checkpoint"):
            start = time.perf_counter()
            if publication is not None:
                publication.offer()
            # Rank 0 writes an adapter while the device computes the probe.
            with ThreadPoolExecutor(1) as writer:
                written = self._write(model, writer)
                now, base = logprobs(), previous
                if run.lora is not None:
                    with policy.adapter_disabled():
                        base = logprobs()
                of_long = probe.score_long(policy, long, batch.sequence_length, self._device)
                result = Probe(
                    tokens=sequences, logprobs=now, previous=previous, base=base, long=of_long
                )
                done = (
                    None
                    if written is None
                    else writer.submit(self._commit, written, metrics, result, start)
                )
                manifest = self._wait_for(done)
        self._state.checkpoint = run.name, job.base_step + 1, self._job_id
        if publication is not None:
            with self.phases.phase("publish"):
                publication.send(manifest)

    def _publication(self, base_model: Path, policy: Policy) -> Publication | None:
        """What sends whole weights to vLLM; None where the checkpoint has what vLLM reads: with
        `merge` the adapter, of all weights with `volume` the model."""
        run = self._assignment.run
        if run.weights != "merged" or self._settings.way == (
            "volume" if run.lora is None else "merge"
        ):
            return None
        return Publication(
            self._settings,
            self._spool,
            base_model,
            policy,
            self._work,
            f"{self._job_id}/{self._attempt}",
            beat=partial(self.heartbeat, "publish"),
            event=self._event,
        )

    def _write(
        self, model: LoadedModel, writer: ThreadPoolExecutor
    ) -> Future[dict[str, str]] | None:
        """Write the checkpoint's files; on rank 0 the hashes of those that were hashed meanwhile. A
        collective."""
        staged, run, step = (
            staged_checkpoint(self._work),
            self._assignment.run.name,
            self._assignment.job.base_step,
        )
        if isinstance(model.optimizer, ShardedAdam):
            model_checkpoint.write(
                staged,
                Path(self._assignment.model),
                model.policy,
                model.optimizer,
                state=self._state_elsewhere is None,
                beat=partial(self.heartbeat, "checkpoint"),
            )
            return writer.submit(dict) if self._rank == 0 else None
        contents, previous = (
            checkpoint.gather(model.policy, model.optimizer),
            self._spool.checkpoints.path(run, step),
        )
        return (
            writer.submit(checkpoint.write, contents, previous, staged) if self._rank == 0 else None
        )

    @property
    def _state_elsewhere(self) -> int | None:
        """The step whose optimizer state goes with the new checkpoint, if that gets none of its
        own."""
        run, step = self._assignment.run, self._assignment.job.base_step
        if run.lora is not None or (step + 1) % self._settings.optimizer_state_every == 0:
            return None
        before = self._spool.checkpoints.manifest(run.name, step).optimizer_state
        return step if before is None else before

    def _wait_for(self, commit: Future[Manifest] | None) -> Manifest | None:
        """The new checkpoint's manifest; None on the ranks that don't commit it. They wait in short
        collectives and show that they live, because of all weights hundreds of gigabytes are
        hashed. A collective.
        """
        while not parallel.gather_objects(commit is None or bool(wait([commit], timeout=1.0).done))[
            0
        ]:
            self.heartbeat("checkpoint")
        return None if commit is None else commit.result()

    def _commit(
        self,
        written: Future[dict[str, str]],
        metrics: dict[str, float],
        result: Probe,
        start: float,
    ) -> Manifest:
        run, base_step = self._assignment.run.name, self._assignment.job.base_step
        manifest = self._spool.checkpoints.commit(
            staged_checkpoint(self._work),
            run,
            base_step + 1,
            self._job_id,
            sha256=written.result(),
            optimizer_state=self._state_elsewhere,
            topology=self._topology.sizes.manifest(),
            versions=self._versions,
            metrics=metrics,
            probe=result,
        )
        size, seconds = (
            sum(entry.size for entry in manifest.files.values()),
            time.perf_counter() - start,
        )
        self._event(
            "checkpoint",
            step=manifest.step,
            sha256=manifest.weights_sha256,
            bytes=size,
            seconds=seconds,
        )
        return manifest

    def _event(self, kind: EventType, **data: Any) -> None:
        if self._rank == 0:
            self._spool.events.append(self._job_id, kind, attempt=self._attempt, **data)
