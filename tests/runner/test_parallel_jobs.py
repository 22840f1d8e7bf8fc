"""A real runner runs several jobs at the same time. The test controls the executor's attempts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spool.spool_tools import memory_directory, run_spec, submit
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.schema import TERMINAL, EventType, JobError
from tandem.trainer.executor import Ended, Order, Running, Waiting
from tandem.trainer.runner.loop import Runner

State = Waiting | Running | Ended


class Told:
    """An `Execution` whose status the test sets."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state: State = Waiting("quota")
        self.error: Exception | None = None
        self.stops = 0

    def poll(self) -> State:
        if self.error is not None:
            raise self.error
        return self.state

    def succeed(self) -> None:
        files, spec = self.order.files, self.order.job.spec
        files.staged.mkdir(exist_ok=True)
        (files.staged / "adapter_model.safetensors").write_text(spec.id)
        step = spec.base_step + 1
        files.spool.checkpoints.commit(files.staged, spec.run, step, spec.id)
        self.state = Ended(0)

    def stop(self) -> None:
        self.stops += 1
        self.state = Ended(-15)

    def kill(self) -> None: ...

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        return []


class Cluster:
    """An `Executor` whose attempts outlive their runner."""

    devices = "a cluster"
    stays = True

    def __init__(self, begin: Callable[[Told], None] = lambda _: None) -> None:
        self.attempts: dict[str, Told] = {}  # <job>/<attempt> -> the attempt's `Execution`.
        self.living: list[Told] = []  # Attempts of jobs that have not ended.
        self.most = 0
        self._begin = begin

    def prepare(self) -> None: ...

    def wait_until_free(self) -> None: ...

    def rest(self) -> None: ...

    def adopts(self, attempt: Attempt, /) -> bool:
        return str(attempt) in self.attempts

    def start(self, order: Order) -> Told:
        name, spec = str(order.files), order.job.spec
        if name not in self.attempts:
            spool = order.files.spool
            running = {key.id: key.run for key in spool.jobs.index.running()}
            assert list(running.values()).count(spec.run) == 1, "two jobs of one run at once"
            self.most = max(self.most, len(running))
            self.attempts[name] = Told(order)
            self._begin(self.attempts[name])
        return self.attempts[name]

    def close(self) -> None: ...


@contextmanager
def runner(spool: Spool, cluster: Cluster, jobs: int = 2) -> Iterator[Runner]:
    """A runner in a thread. At the end of the block the runner gets the request to stop, and must
    end."""
    known = Settings(
        root=spool.root,
        device="cpu",
        executor="kubernetes",
        parallel_jobs=jobs,
        heartbeat_seconds=0.05,
    )
    made, raised = Runner(known, "fake_rank"), list[BaseException]()
    made._make_executor = lambda: cluster  # type: ignore[method-assign]

    def run() -> None:
        try:
            made.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield made
    finally:
        made.stop.request()
        thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def until[T](condition: Callable[[], T], timeout: float = 60) -> T:
    end = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return spool_with_runs(tmp_path)


def spool_with_runs(root: Path, runs: str = "abc") -> Spool:
    spool = Spool.create(root)
    for run in runs:
        spool.runs.create(run_spec(run), lambda made: (made / "weights").write_text("0"))
    return spool


def phase(spool: Spool, job_id: str) -> str:
    lease = spool.leases.get(job_id)
    return lease.phase if lease is not None else ""


def states(spool: Spool) -> dict[str, str]:
    return {job.spec.id: state for state, job in spool.jobs.list()}


def test_runs_train_at_once_and_a_runs_second_job_waits_for_its_first(spool: Spool) -> None:
    for job_id, run in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("c0", "c")):
        submit(spool, job_id, run=run)
    cluster = Cluster()
    with runner(spool, cluster):
        until(lambda: {"a0/1", "b0/1"} <= cluster.attempts.keys())
        cluster.attempts["b0/1"].state = Running()
        until(lambda: [phase(spool, "a0"), phase(spool, "b0")] == ["waiting: quota", "start"])
        assert cluster.attempts.keys() == {"a0/1", "b0/1"}, "there is room for two"
        cluster.attempts["b0/1"].succeed()
        until(lambda: "c0/1" in cluster.attempts)
        assert states(spool) == {
            "a0": "running",
            "a1": "queued",
            "b0": "succeeded",
            "c0": "running",
        }
        cluster.attempts["a0/1"].succeed()
        until(lambda: "a1/1" in cluster.attempts)
        cluster.attempts["a1/1"].succeed()
        cluster.attempts["c0/1"].succeed()
        until(lambda: set(states(spool).values()) == {"succeeded"})
    assert spool.checkpoints.steps("a") == [0, 1, 2]
    assert cluster.most == 2


def test_one_is_cancelled_and_the_other_goes_on(spool: Spool) -> None:
    submit(spool, "a0", run="a")
    submit(spool, "b0", run="b")
    cluster = Cluster()
    with runner(spool, cluster):
        until(lambda: len(cluster.attempts) == 2)
        spool.queue.cancel("a0")
        until(lambda: states(spool)["a0"] == "cancelled")
        assert cluster.attempts["b0/1"].stops == 0
        cluster.attempts["b0/1"].succeed()
        until(lambda: states(spool)["b0"] == "succeeded")


def test_all_attempts_are_left_and_adopted_by_a_runner_that_has_room_for_one(spool: Spool) -> None:
    for run in "abc":
        submit(spool, f"{run}0", run=run)
    cluster = Cluster()
    with runner(spool, cluster, jobs=3):
        until(lambda: len(cluster.attempts) == 3)
    assert set(states(spool).values()) == {"running"}
    beats = {run: spool.leases.get(f"{run}0") for run in "abc"}
    with runner(spool, cluster, jobs=1):
        until(lambda: all(spool.leases.get(f"{run}0") != beats[run] for run in "abc"))
        submit(spool, "a1", run="a")
        for run in "abc":
            cluster.attempts[f"{run}0/1"].succeed()
        until(lambda: "a1/1" in cluster.attempts)
        cluster.attempts["a1/1"].succeed()
        until(lambda: set(states(spool).values()) == {"succeeded"})
    assert cluster.attempts.keys() == {"a0/1", "b0/1", "c0/1", "a1/1"}


def test_an_attempt_whose_thread_ends_by_an_error_ends_the_runner(spool: Spool) -> None:
    """The runner ends, and leaves its attempts running. The next runner continues these attempts or
    decides their outcome, as after any end of a runner."""
    submit(spool, "a0", run="a")
    submit(spool, "b0", run="b")
    cluster = Cluster()

    def ends_by_an_error() -> None:
        with runner(spool, cluster) as running:
            until(lambda: len(cluster.attempts) == 2)
            cluster.attempts["a0/1"].error = ZeroDivisionError()
            until(lambda: running.stop.requested)

    with pytest.raises(ZeroDivisionError):
        ends_by_an_error()
    assert states(spool) == {"a0": "running", "b0": "running"}
    with runner(spool, cluster):
        cluster.attempts["a0/1"].error = None
        for attempt in list(cluster.attempts.values()):
            attempt.succeed()
        until(lambda: set(states(spool).values()) == {"succeeded"})


OUTCOMES = ("commit", "exit", "preempted", "refused", "unusable")


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(OUTCOMES)), min_size=2, max_size=7),
    st.integers(1, 3),
)
def test_whatever_attempts_do_each_job_has_one_end_in_its_runs_order(
    jobs: list[tuple[str, str]], most: int
) -> None:
    with memory_directory() as directory:
        spool = spool_with_runs(Path(directory))
        outcomes = {}
        for number, (run, outcome) in enumerate(jobs):
            job_id = f"{run}{number}"
            outcomes[job_id] = outcome
            submit(spool, job_id, run=run, max_attempts=1)

        def begin(told: Told) -> None:
            outcome, number = outcomes[told.order.job.spec.id], told.order.files.number
            error = JobError(type=outcome, message="by it", retriable=outcome != "refused")
            match outcome:
                case "exit":
                    told.state = Ended(1)
                case "refused":
                    told.state = Ended(error=error)
                case "preempted" if number == 1:
                    told.state = Ended(error=error)
                case "unusable" if number == 1:
                    told.state = Ended(error=JobError(type="x", message="", retriable=True))
                case _:
                    told.succeed()

        cluster = Cluster(begin)
        with runner(spool, cluster, most):
            until(lambda: set(states(spool).values()) <= set(TERMINAL))
        assert cluster.most <= most
        for run in "abc":
            steps = spool.checkpoints.steps(run)
            assert steps == list(range(len(steps)))
        for job_id, outcome in outcomes.items():
            kinds = [event.type for event in spool.events.read(job_id)]
            assert sum(kinds.count(kind) for kind in TERMINAL) == 1
            if outcome == "refused":
                assert states(spool)[job_id] == "failed"
