"""A rank's work in one attempt: connect to the other ranks, load the model, train, write the
checkpoint, exit.

Rank 0 reads the job and sends it to the other ranks. Only rank 0 writes events and the checkpoint.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import torch

from tandem import __version__
from tandem.data.packed_format import PackedBatch
from tandem.errors import InvalidInput
from tandem.families.arch import Arch
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.spool.attempt import Attempt
from tandem.spool.schema import RunSpec, SessionJob
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank import full_volume
from tandem.trainer.rank.commit import NewCheckpoint
from tandem.trainer.rank.model_loader import Checked, ModelLoader, reference_policy
from tandem.trainer.rank.probe import JobProbe, mean_difference
from tandem.trainer.rank.publication import Publication
from tandem.trainer.rank.rendezvous import Assignment, meet
from tandem.trainer.rank.session import Session
from tandem.trainer.rank.session_loop import SessionLoop
from tandem.trainer.rank.state import RankState
from tandem.training.steps import Training


def run_rank(attempt: Attempt, settings: RankSettings, state: RankState | None = None) -> None:
    """Run this rank's part of one attempt. After a job that trains a batch, checkpoint base_step +
    1 exists. Without `state`, the rank destroys the process groups at the end.

    Raises Conflict if checkpoint base_step + 1 already exists, and CheckpointDamaged if the
    checkpoint to start from is damaged. Also raises NonFinite, InvalidInput, SpoolUnusable, and
    torch's errors.

    Args:
        state: the state of a resident rank. With a state, the rank releases its device memory at
            the end and keeps the process groups. After an error, the state can't be used any more.
            None: the rank keeps nothing.
    """
    session = Session(attempt, settings)
    try:
        _train(session, state or RankState())
        if state is not None:
            with session.phases.phase("offload"):
                state.offload()
    except torch.OutOfMemoryError:
        session.heartbeat.write("out of memory")  # the heartbeat records the memory in use
        raise
    session.heartbeat.write("leave")
    if state is None:
        parallel.destroy()


def _train(session: Session, state: RankState) -> None:
    attempt, settings = session.attempt, session.settings

    # Receive the job from rank 0.
    session.heartbeat("rendezvous")
    assignment, connect = meet(
        attempt, session.heartbeat, prepare=partial(_wait_for_space, session)
    )
    run, job = assignment.run, assignment.job
    arch = read_arch(assignment.model)

    # A thread hashes the files of the checkpoint while this rank connects to the other ranks.
    checked = state.check_checkpoint(attempt.spool, assignment, arch)
    with session.phases.phase("rendezvous"):
        topology = state.join(assignment, settings, connect)
    _make_deterministic(run.seed)
    pids, versions = parallel.gather_objects(os.getpid()), _versions()
    session.event(
        "started",
        pids=pids,
        topology=topology.sizes.manifest(),
        versions=versions,
        device=str(session.device),
    )

    training = _session if isinstance(job, SessionJob) else _batch
    training(session, state, _Start(assignment, arch, topology, checked, versions))


@dataclass(frozen=True)
class _Start:
    """The objects that a rank has after the rendezvous with the other ranks."""

    assignment: Assignment
    arch: Arch
    topology: Topology
    checked: Future[Checked | None]
    versions: dict[str, str]


def _session(session: Session, state: RankState, start: _Start) -> None:
    """Computes a session's requests."""
    phases, arch, assignment = session.phases, start.arch, start.assignment
    rehearse = _first_pass(session, assignment, arch) if device.is_cuda() else None
    loader = ModelLoader(
        session.settings, arch, assignment, start.topology, start.checked, rehearse
    )
    model = state.model = loader.load(state.model, phases)
    if session.settings.base_precision != "same":
        model.policy.quantise_base()
    seconds, _ = phases.take()
    session.event("loaded", seconds=seconds, memory=phases.gather_memory())
    SessionLoop(session, assignment, arch, model, start.topology, start.versions).run()


def _first_pass(
    session: Session, assignment: Assignment, arch: Arch
) -> Callable[[Policy], None] | None:
    """A function that loads the kernels for the first waiting pass; None if no pass waits. All
    ranks must call `_first_pass`, a collective operation."""
    spool, run = session.attempt.spool, assignment.run.name
    seq = None
    if session.rank == 0:
        done = spool.checkpoints.manifest(run, assignment.job.base_step).seq or 0
        seq = spool.requests.first_pass(run, done)
    if (seq := parallel.gather_objects(seq)[0]) is None:
        return None
    try:
        with PackedBatch.open(spool.requests.data_dir(run, seq)) as batch:
            return JobProbe.choose(batch, arch.vocab_size, session.device).rehearse
    # The request's arrays have been removed, so the request's result will be an error.
    except InvalidInput:
        return None


def _batch(session: Session, state: RankState, start: _Start) -> None:
    """Trains a job's batch, and makes its checkpoint."""
    attempt, settings, phases = session.attempt, session.settings, session.phases
    assignment, arch, topology, versions = (
        start.assignment,
        start.arch,
        start.topology,
        start.versions,
    )
    run, job, base_model = assignment.run, assignment.job, Path(assignment.model)
    assert not isinstance(job, SessionJob)

    # Load data and model.
    with phases.phase("data"):
        batch = PackedBatch.open(attempt.spool.paths.data_dir(attempt.job), job.data.sha256)
    with batch:
        probe = JobProbe.choose(batch, arch.vocab_size, session.device)
        rehearse = probe.rehearse if device.is_cuda() else None
        loader = ModelLoader(settings, arch, assignment, topology, start.checked, rehearse)
        model = state.model = loader.load(state.model, phases)
        policy = model.policy
        reference = partial(
            reference_policy,
            attempt.spool,
            run.name,
            base_model,
            policy,
            job.loss.reference_field,
            session.beat("reference"),
        )
        training = Training(
            run,
            job,
            batch,
            policy,
            model.optimizer,
            topology,
            session.device,
            phases,
            reference=reference,
            fit=settings.recompute == "auto",
        )
        session.heartbeat.steps = len(training.schedule.steps)
        with phases.phase("probe"):
            previous, fp8_error = _first_logprobs(settings, policy, probe)
        seconds, _ = phases.take()
        session.event("loaded", seconds=seconds, memory=phases.gather_memory(), **fp8_error)

        # Train.
        metrics = training.train(partial(_report, session)) | fp8_error
        metrics |= _evaluate(session, training)

        # Write the checkpoint. Rank 0 writes an adapter while the device computes the probe.
        publication = _publication(session, run, base_model, policy)
        with phases.phase("checkpoint"), ThreadPoolExecutor(1) as thread:
            new = NewCheckpoint(session, assignment, model, versions, thread)
            if publication is not None:
                publication.offer()
            new.write()
            manifest = new.commit(metrics, probe.score(policy, previous))
        state.checkpoint = run.name, job.base_step + 1, attempt.job
        if publication is not None:
            with phases.phase("publish"):
                publication.send(manifest)


def _wait_for_space(session: Session, assignment: Assignment) -> None:
    """Lets rank 0 wait for space on the volume, while the other ranks wait for the assignment."""
    run, step = assignment.run.name, assignment.job.base_step
    spool = session.attempt.spool
    full_volume.wait_for_space(spool, run, step, beat=session.beat("rendezvous"))


def _make_deterministic(seed: int) -> None:
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _versions() -> dict[str, str]:
    own = {"tandem": __version__, "python": python_version()}
    return own | {name: version(name) for name in ("torch", "megatron-core")}


def _first_logprobs(
    settings: RankSettings, policy: Policy, probe: JobProbe
) -> tuple[list[list[float]], dict[str, float]]:
    """The probe's log-probs before the training. With fp8 base weights, also returns a metric: the
    mean absolute difference, in nats, between the log-probs with and without fp8."""
    exact = probe.logprobs(policy)
    if settings.base_precision == "same":
        return exact, {}
    policy.quantise_base()
    quantised = probe.logprobs(policy)
    return quantised, {"fp8_logprob_error": mean_difference(exact, quantised)}


def _report(session: Session, step: int, metrics: dict[str, float]) -> None:
    """Report an optimizer step."""
    session.heartbeat.step = step
    with full_volume.event_left_out():
        session.event("step", step=step, steps=session.heartbeat.steps, metrics=metrics)


def _evaluate(session: Session, training: Training) -> dict[str, float]:
    """The metrics of held-out rows; empty if there are no held-out rows."""
    evaluated = training.evaluate()
    if evaluated:
        seconds, _ = session.phases.take()
        session.event("evaluated", step=session.heartbeat.step, metrics=evaluated, seconds=seconds)
    return evaluated


def _publication(
    session: Session, run: RunSpec, base_model: Path, policy: Policy
) -> Publication | None:
    """The object that publishes whole weights. None if vLLM reads the checkpoint's files itself.
    If the setting `way` is `merge`, vLLM reads the adapter's files. If `way` is `volume` and the
    run trains all weights, vLLM reads the model's files."""
    way = session.settings.way
    if run.weights != "merged" or way == ("volume" if run.lora is None else "merge"):
        return None
    return Publication(
        session.settings,
        base_model,
        policy,
        session.attempt,
        beat=session.beat("publish"),
        event=session.event,
    )
