"""Several processes use one spool at the same time. No job is lost, and no job is claimed twice.
The file also tests random histories of jobs."""

import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spool.spool_tools import (
    LOST,
    add_run,
    commit,
    failed,
    maker,
    memory_directory,
    spool_with_run,
    submit,
    succeeded,
)
from tandem.errors import Conflict, NotFound
from tandem.spool import Spool
from tandem.spool.recovery import recover
from tandem.spool.schema import TERMINAL, Job

FORK = multiprocessing.get_context("fork")


@contextmanager
def may_conflict(field: str) -> Iterator[None]:
    """Allows a Conflict about `field` in the context."""
    try:
        yield
    except Conflict as error:
        if error.field != field:
            raise


def together(*works) -> None:
    """Runs each function in a process of its own, all started at one moment. Fails if one of the
    processes fails."""
    barrier = FORK.Barrier(len(works))

    def start(work):
        barrier.wait()
        work()

    processes = [FORK.Process(target=start, args=(work,)) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(works)


def test_the_same_submission_from_many_processes_is_one_job(spool):
    add_run(spool, "q")

    def send(run):  # two runs get requests with the same ids; each id goes to one of the runs
        for i in range(5):
            with may_conflict("id"):
                submit(spool, f"j{i}", run)

    together(*(partial(send, run) for run in "rrqq"))
    ids = [f"j{i}" for i in range(5)]
    assert sorted(job.spec.id for _, job in spool.jobs.list()) == ids
    for run in "rq":
        bases = [job.spec.base_step for _, job in spool.jobs.pending(run)]
        assert bases == list(range(len(bases)))
    directories = spool.root.glob("jobs/live/*/*/*/data")
    assert sorted(path.parent.name.split(",")[3] for path in directories) == ids


@pytest.mark.parametrize(("base_steps", "jobs"), [([None] * 8, 24), (range(6), 6)])
def test_submissions_to_one_run_form_one_chain(spool, base_steps, jobs):
    """Exactly one of several submissions with the same base step succeeds."""

    def send():
        for base_step in base_steps:
            with may_conflict("base_step"):
                submit(spool, base_step=base_step)

    together(send, send, send)
    assert [job.spec.base_step for _, job in spool.jobs.pending("r")] == list(range(jobs))


def test_claims_cancels_requeues_and_submissions_race(spool):
    """Two claimers, two cancellers, a submitter and a reader run at the same time. Every job ends
    once, and the job's events are consistent."""
    runs = [f"run{i}" for i in range(4)]
    for run in runs:
        add_run(spool, run)
    ids = [f"{run}-{i}" for run in runs for i in range(5)]
    stop = spool.root / "stop"

    def submitter():
        for i in range(5):
            for run in runs:
                submit(spool, f"{run}-{i}", run)
                submit(spool, f"{run}-{i}", run)

    def claimer():
        choice = random.Random(os.getpid())
        end = time.monotonic() + 240
        while time.monotonic() < end:
            job = spool.queue.claim(f"runner {os.getpid()}")
            if job is None:
                if len(spool.jobs.list(states=TERMINAL)) == len(ids):
                    return
                continue
            assert spool.jobs.list(job.spec.run, ["running"]) == [("running", job)]
            spool.leases.write(job, f"runner {os.getpid()}", "training")
            chance = choice.random()
            if chance < 0.3:
                spool.queue.requeue(job, LOST)
            elif chance < 0.4 or spool.checkpoints.newest(job.spec.run) != job.spec.base_step:
                spool.queue.finish(job, failed())
            else:
                commit(spool, job)
                assert spool.queue.finish(job, succeeded(job)) == "succeeded"
        raise TimeoutError("jobs did not end")

    def canceller():
        choice = random.Random(os.getpid())
        while not stop.exists():
            job_id = choice.choice(ids)
            submitted = (
                spool.jobs.find(job_id) is not None and spool.jobs.locate(job_id) is not None
            )
            try:
                if choice.random() < 0.15:
                    spool.queue.cancel(job_id)
                else:
                    spool.jobs.get(job_id)
                    spool.jobs.list(states=("running",))
            except NotFound:
                assert not submitted
            time.sleep(0.002)

    def main():
        together(submitter, claimer, claimer)
        stop.touch()

    together(main, canceller, canceller)
    states = Counter(state for state, _ in spool.jobs.list())
    assert sum(states.values()) == 20
    assert set(states) <= set(TERMINAL)
    assert states["succeeded"]
    for run in runs:
        steps = spool.checkpoints.steps(run)
        makers = [spool.checkpoints.verify(run, step).job for step in steps[1:]]
        done = [job.spec.id for _, job in spool.jobs.list(run, ["succeeded"])]
        assert sorted(makers) == sorted(done)
    for job_id in ids:
        _check_story(spool, job_id)
    assert [*spool.root.glob("jobs/active/*"), *spool.root.glob("jobs/live/*")] == []
    assert len([*spool.root.glob("jobs/ended/*/*")]) == len(ids)
    kept = {path.name for path in spool.root.glob("jobs/ended/*/*/*")}
    assert kept == {"job.json", "events.jsonl"}


def _check_story(spool: Spool, job_id: str) -> None:
    """Checks a job's events: claimed 1, requeued 1, claimed 2, …, and at most one terminal event.
    The terminal event is the last event, and its type is the job's state."""
    events = spool.events.read(job_id)
    assert [event.seq for event in events] == list(range(len(events)))
    state, job = spool.jobs.get(job_id)
    ends = [event.type for event in events if event.type in TERMINAL]
    assert ends == ([state] if state in TERMINAL else [])
    if ends:
        assert events[-1].type == state
    starts = [
        (event.type, event.attempt) for event in events if event.type in ("claimed", "requeued")
    ]
    expected = [
        (kind, attempt) for attempt in range(1, job.attempt + 1) for kind in ("claimed", "requeued")
    ]
    assert starts == expected[: len(starts)]
    assert len(starts) in (2 * job.attempt, 2 * job.attempt - 1) or not job.attempt


class Life(RuleBasedStateMachine):
    """Random histories of two runs are compared with a model in memory. The test reopens every
    object now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = memory_directory()
        self.spool = spool_with_run(Path(self.directory.name))
        add_run(self.spool, "q")
        # Run -> ids of the jobs that made the steps 1, 2, …
        self.chain: dict[str, list[str]] = {"r": [], "q": []}
        self.queue: dict[str, list[str]] = {"r": [], "q": []}  # ids that are queued, oldest first
        self.running: dict[str, Job] = {}  # run -> job
        self.cancelling: set[str] = set()
        self.ended: dict[str, str] = {}
        self.attempts: Counter[str] = Counter()
        self.count = 0

    def teardown(self) -> None:
        for job_id in [*self.ended, *self.queue["r"], *self.queue["q"]]:
            _check_story(self.spool, job_id)
        self.directory.cleanup()

    @initialize()
    def begin(self) -> None:
        assert self.spool.queue.claim("me") is None

    @rule(run=st.sampled_from("rq"), new=st.booleans())
    def submit(self, run: str, new: bool) -> None:
        self.count += new or not self.count
        job_id = f"{run}{self.count}"
        known = job_id in [
            *self.ended,
            *self.queue[run],
            *(job.spec.id for job in self.running.values()),
        ]
        make = maker(run, max_attempts=2)
        job, made = self.spool.queue.submit(
            make, run=run, job_id=job_id, fingerprint="f", base_step=None
        )
        assert made is not known
        if made:
            self.queue[run].append(job_id)
            assert job.spec.base_step >= len(self.chain[run])

    @rule()
    def claim(self) -> None:
        waiting = [run for run in "rq" if self.queue[run] and run not in self.running]
        job = self.spool.queue.claim("me")
        assert (job is None) is (not waiting)
        if job is not None:
            run = job.spec.run
            assert run in waiting
            self.queue[run].remove(job.spec.id)
            self.running[run] = job
            self.attempts[job.spec.id] += 1
            assert job.attempt == self.attempts[job.spec.id]

    def _end(self, run: str, state: str) -> None:
        job_id = self.running.pop(run).spec.id
        self.ended[job_id] = state
        self.cancelling.discard(job_id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), twice=st.booleans())
    def train(self, data, twice: bool) -> None:
        run = data.draw(st.sampled_from(sorted(self.running)))
        job = self.running[run]
        if job.spec.base_step == len(self.chain[run]):
            commit(self.spool, job)
            self.chain[run].append(job.spec.id)
            result = succeeded(job)
        else:
            with pytest.raises(Conflict):
                commit(self.spool, job)
            result = failed()
        for _ in range(1 + twice):
            assert self.spool.queue.finish(job, result) == result.state
        self._end(run, result.state)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), retriable=st.booleans(), recovered=st.booleans())
    def crash(self, data, retriable: bool, recovered: bool) -> None:
        runs = (
            sorted(self.running)
            if recovered
            else [data.draw(st.sampled_from(sorted(self.running)))]
        )
        error = LOST.model_copy(update={"retriable": retriable or recovered})
        expected = {}
        for run in runs:
            job = self.running[run]
            again = error.retriable and job.attempt < 2
            expected[run] = (
                "cancelled" if job.spec.id in self.cancelling else "queued" if again else "failed"
            )
        if recovered:
            found = {job.spec.run: state for state, job in recover(Spool(self.spool.root), "new")}
            assert found == expected
        else:
            assert self.spool.queue.requeue(self.running[runs[0]], error) == expected[runs[0]]
        for run, state in expected.items():
            if state == "queued":
                self.queue[run].insert(0, self.running.pop(run).spec.id)
            else:
                self._end(run, state)

    @rule(run=st.sampled_from("rq"), data=st.data())
    def cancel(self, run: str, data) -> None:
        ids = [*self.queue[run], *(job.spec.id for job in self.running.values())]
        if not ids:
            return
        job_id = data.draw(st.sampled_from(ids))
        if job_id in self.queue[run]:
            assert self.spool.queue.cancel(job_id) == "cancelled"
            self.queue[run].remove(job_id)
            self.ended[job_id] = "cancelled"
        else:
            assert self.spool.queue.cancel(job_id) == "running"
            self.cancelling.add(job_id)

    @rule(run=st.sampled_from("rq"), back=st.integers(0, 3))
    def rollback(self, run: str, back: int) -> None:
        step = max(0, len(self.chain[run]) - back)
        if self.queue[run] or run in self.running:
            with pytest.raises(Conflict):
                self.spool.checkpoints.rollback(run, step)
        else:
            assert self.spool.checkpoints.rollback(run, step) == list(
                range(len(self.chain[run]), step, -1)
            )
            del self.chain[run][step:]

    @rule()
    def reopen(self) -> None:
        self.spool = Spool(self.spool.root)

    @invariant()
    def the_spool_says_what_the_model_says(self) -> None:
        for run in "rq":
            pending = {job.spec.id: state for state, job in self.spool.jobs.pending(run)}
            expected = dict.fromkeys(self.queue[run], "queued")
            if run in self.running:
                expected[self.running[run].spec.id] = "running"
            assert pending == expected
            makers = [
                self.spool.checkpoints.manifest(run, step).job
                for step in self.spool.checkpoints.steps(run)
            ]
            assert makers == [None, *self.chain[run]]
        assert {
            job.spec.id: state for state, job in self.spool.jobs.list(states=TERMINAL)
        } == self.ended
        kept = {path.parent.name for path in (self.spool.root / "jobs").rglob("data")}
        assert {name.split(",")[3] for name in kept} == {
            *self.queue["r"],
            *self.queue["q"],
            *(job.spec.id for job in self.running.values()),
        }
        assert all(self.spool.jobs.cancel_requested(job_id) for job_id in self.cancelling)


TestLife = pytest.mark.slow(Life.TestCase)
TestLife.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
