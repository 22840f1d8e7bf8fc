"""The runner's decisions about attempts. The executor's processes follow a script, and the clock is
simulated. In every order of events a job has exactly one end. After its fence an attempt can
neither commit nor write anything. A job never has two unfenced attempts at the same time."""

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spool.spool_tools import memory_directory, spool_with_run, submit
from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.checkpoints import Checkpoints
from tandem.spool.recovery import recover
from tandem.spool.schema import TERMINAL, Event, EventType, Job, JobError, Lease
from tandem.trainer.executor import Ended, Order, Running, Waiting
from tandem.trainer.runner import failure, job
from tandem.trainer.runner.job import TERMINATE_SECONDS, JobRun
from tandem.trainer.stop import Stop

DEADLINE, STALL, ATTEMPTS = 1000.0, 200.0, 3
HANG = 150.0
"""The seconds that pass in one action `hang`, in which ranks do nothing."""


class RunnerKilledError(BaseException):
    """Stands for `kill -9` of the runner."""


class Clock:
    """Stands for the module `time`. The stand-in's `sleep` returns at once and moves the simulated
    time on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.time, self.strftime, self.gmtime = time.time, time.strftime, time.gmtime

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(job, "time", clock)
        patch.setattr(failure, "time", clock)
        yield clock


class Processes:
    """An `Execution` that follows the executor's script. The attempt's ranks may go on after the
    attempt's end, like ranks on a host that can't be reached."""

    def __init__(self, executor: "Scripted", order: Order) -> None:
        self._executor, self._order = executor, order
        self.files = order.files
        self._job = order.job
        self.committed = False
        self._stopped = False
        self._end: Ended | None = None
        self.running_since: float | None = None

    def poll(self) -> Waiting | Running | Ended:
        executor, now = self._executor, self._executor.clock.now
        lease = self.files.spool.leases.get("j")
        if lease is not None and lease.phase not in executor.phases:
            executor.phases.append(lease.phase)
        if lease is not None and lease not in executor.leases[-1:]:
            executor.leases.append(lease)
        if self._end is None and executor.ranks_end and self._stopped:
            self._end = Ended(-15)
        if self._end is not None:
            return self._end
        if self.running_since is not None:
            latest = DEADLINE + TERMINATE_SECONDS + HANG + 1
            assert now - self.running_since < latest, "no bound ended the attempt"
        state = self._do(executor.next())
        if isinstance(state, Ended):
            self._end = state
        if isinstance(state, Running) and self.running_since is None:
            self.running_since = now
        return state

    def _do(self, action: str) -> Waiting | Running | Ended:
        match action:
            case "wait" | "hours":
                self._executor.clock.now += 4000 if action == "hours" else 0
                return Waiting("quota")
            case _ if action.startswith("wait for"):
                return Waiting(action)
            case "beat":
                beat = f'{{"time": {self._executor.clock.now}, "phase": "train"}}'
                self.files.beat(0).write_text(beat)
            case "stage":
                self.stage()
            case "commit":
                self.commit(late=False)
            case "hang":
                self._executor.clock.now += HANG
            case "exit 0" | "exit 1":
                return Ended(int(action[-1]))
            case "preempted" | "refused" | "job_deleted":
                retriable = action != "refused"
                return Ended(error=JobError(type=action, message="by it", retriable=retriable))
            case _:
                self._executor.happens(action)
        since = self.running_since
        return Running(0.0 if since is None else self._executor.clock.now - since)

    def stage(self) -> None:
        """Writes an adapter into the directory `staged`, as ranks do. A fenced attempt can't write
        an adapter, because the attempt's directory is gone and is not made again."""
        try:
            self.files.staged.mkdir()
        except FileNotFoundError:
            assert self._executor.is_fenced(self), "a living attempt lost its directory"
        except FileExistsError:
            pass
        else:
            content = str(self.files.number)
            (self.files.staged / "adapter_model.safetensors").write_text(content)

    def commit(self, *, late: bool) -> None:
        """Commits the staged checkpoint. `late`: the rank has checked the job's state before the
        rank was frozen, so the rank does not check this state again."""
        spool, spec = self.files.spool, self._job.spec
        try:
            spool.checkpoints.commit(
                self.files.staged,
                spec.run,
                spec.base_step + 1,
                spec.id,
                check=(lambda: None) if late else self.files.check,
            )
        except (TandemError, OSError):
            return
        assert not self._executor.is_fenced(self), "an attempt committed after its fence"
        self.committed = True

    def thaw(self) -> None:
        """Frozen ranks continue, even if the job has ended. The frozen ranks stage and commit a
        checkpoint and write an event."""
        fenced = self._executor.is_fenced(self)
        self.stage()
        self.commit(late=True)
        try:
            self.files.event("offered", step=1)
        except TandemError:
            assert fenced or self.committed
        else:
            assert not fenced, "an attempt wrote an event after its fence"

    def stop(self) -> None:
        self._stopped = True

    def kill(self) -> None: ...

    def give_back(self) -> list[tuple[EventType, dict[str, object]]]:
        # These actions may come between the attempt's end and its fence.
        if (action := self._executor.next()) in ("commit", "late", "cancel", "kill the runner"):
            self._do(action)
        return [("released", {"processes": 0, "bytes": 0})]


class Scripted:
    """An `Executor` whose attempts take their actions from one script."""

    devices = "cpu"

    def __init__(
        self, spool: Spool, script: Iterator[str], clock: Clock, ranks_end: bool, adopting: bool
    ) -> None:
        self._spool, self._script = spool, script
        self.clock, self.ranks_end, self._adopting = clock, ranks_end, adopting
        self.stays = adopting
        self.attempts: list[Processes] = []
        self.phases: list[str] = []  # The phases that the job's lease has had.
        self.leases: list[Lease] = []
        self.found: list[int] = []  # The number of each attempt that an earlier runner had started.
        self.runner_stop = Stop()

    def next(self) -> str:
        return next(self._script, "exit 1")

    def happens(self, action: str) -> None:
        match action:
            case "cancel":
                self._spool.queue.cancel("j")
            case "stop the runner":
                self.runner_stop.request()
            case "kill the runner":
                raise RunnerKilledError
            case "late":
                for attempt in self.attempts:
                    attempt.thaw()
            case _:
                assert action == "run", action

    def is_fenced(self, attempt: Processes) -> bool:
        state, found = self._spool.jobs.get("j")
        return state != "running" or found.attempt != attempt.files.number

    def prepare(self) -> None: ...

    def wait_until_free(self) -> None: ...

    def rest(self) -> None: ...

    def adopts(self, attempt: Attempt, /) -> bool:
        return self._adopting and bool(self._of(attempt))

    def _of(self, attempt: Attempt) -> list[Processes]:
        return [one for one in self.attempts if one.files.number == attempt.number]

    def start(self, order: Order) -> Processes:
        if started := self._of(order.files):
            assert self._adopting, "an attempt starts twice"
            self.found.append(order.files.number)
            return started[0]
        for earlier in self.attempts:
            assert not earlier.files.work.exists(), "two attempts are unfenced"
            assert not earlier.committed, "an attempt starts after a commit"
        self.attempts.append(Processes(self, order))
        return self.attempts[-1]

    def close(self) -> None: ...


class Racing(Checkpoints):
    """Checkpoints for a race: frozen ranks commit right after each call of `made_by`. The runner
    looks for the job's checkpoint with `made_by`."""

    executor: Scripted

    def made_by(self, job: Job) -> bool:
        made = super().made_by(job)
        for attempt in self.executor.attempts:
            attempt.commit(late=True)
        return made


def runners(
    root: Path,
    script: list[str],
    clock: Clock,
    *,
    ranks_end: bool,
    racing: bool,
    adopting: bool = False,
) -> Scripted:
    """Runs one runner after another until the job `j` has ended."""
    spool = Spool(root)
    executor = Scripted(spool, iter(script), clock, ranks_end, adopting)
    if racing:
        spool.checkpoints.__class__ = Racing
        spool.checkpoints.executor = executor  # type: ignore[attr-defined]
    known = Settings(root=root, device="cpu")
    for _ in range(len(script) + 2):
        executor.runner_stop = Stop()
        try:
            recover(spool, "runner", lambda job: executor.adopts(Attempt(spool, "j", job.attempt)))
            run_job = partial(JobRun, known, spool, executor, executor.runner_stop, "runner")
            for key in spool.jobs.index.running():
                run_job(spool.jobs.get(key.id)[1], adopted=True).run()
            while not executor.runner_stop.requested and (claimed := spool.queue.claim("runner")):
                run_job(claimed).run()
        except RunnerKilledError:
            continue
        if spool.jobs.get("j")[0] in TERMINAL:
            return executor
    raise AssertionError("the job has no end")


def ends_once(executor: Scripted, spool: Spool) -> tuple[str, Job, list[Event]]:
    """Checks an ended job. Returns the job's state, record and events."""
    state, ended = spool.jobs.get("j")
    events = spool.events.read("j")
    kinds = Counter(event.type for event in events)
    assert events[-1].type == state
    assert sum(kinds[kind] for kind in TERMINAL) == 1
    assert [event.attempt for event in events if event.type == "claimed"] == [
        *range(1, ended.attempt + 1)
    ]
    assert [event.attempt for event in events] == sorted(event.attempt for event in events)
    assert ended.attempt - ended.stopped <= ATTEMPTS
    made = spool.checkpoints.steps("r") == [0, 1]
    assert made == (state == "succeeded")
    assert [attempt.files.number for attempt in executor.attempts if attempt.committed] == (
        [ended.attempt] if made else []
    )
    if made:
        content = spool.checkpoints.path("r", 1) / "adapter_model.safetensors"
        assert content.read_text() == str(ended.attempt)
    for attempt in executor.attempts:  # Frozen ranks may continue at any later time.
        attempt.thaw()
    assert spool.events.read("j") == events
    assert (spool.checkpoints.steps("r") == [0, 1]) == made
    return state, ended, events


def run(
    script: list[str],
    clock: Clock,
    *,
    ranks_end: bool = True,
    racing: bool = False,
    adopting: bool = False,
    phases: list[str] | None = None,
    found: list[int] | None = None,
    leases: list[Lease] | None = None,
) -> tuple[str, Job, list[Event]]:
    with memory_directory() as directory:
        root = Path(directory)
        spool = spool_with_run(root)
        limits = {"deadline_seconds": DEADLINE, "stall_seconds": STALL, "max_attempts": ATTEMPTS}
        submit(spool, "j", **limits)
        executor = runners(
            root, script, clock, ranks_end=ranks_end, racing=racing, adopting=adopting
        )
        if phases is not None:
            phases += executor.phases
        if found is not None:
            found += executor.found
        if leases is not None:
            leases += executor.leases
        return ends_once(executor, spool)


ACTIONS = [
    *("wait", "run", "beat", "stage", "stage", "commit", "hang", "late"),
    *("exit 0", "exit 1", "preempted", "refused", "job_deleted"),
    *("cancel", "stop the runner", "kill the runner"),
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(ACTIONS), max_size=25), st.booleans(), st.booleans(), st.booleans())
# A hanging attempt commits after its end and before its fence.
@example(["stage", *["hang"] * 4, "commit"], False, False, False)
@example(
    ["stage", "exit 1", "late", "stage", "late", "commit", "exit 0", "run"], True, False, False
)
@example(
    ["stage", "kill the runner", "late", "stage", "commit", "kill the runner"], True, False, False
)
@example(["stage", "cancel", "commit", "run"], True, False, False)
@example(["run", "stage", "kill the runner", "late", "commit", "exit 0"], True, False, True)
@example(["run", "kill the runner", "cancel", "kill the runner", "commit"], False, True, True)
# The ranks commit after the runner's last check for the checkpoint, and before the fence. The ranks
# try the commit again after the fence.
@example(["stage", "exit 1", "run", "run"], True, True, False)
@example(["stage", "kill the runner", "run", "run"], True, True, False)
def test_any_order_of_events_leads_to_one_end(
    clock: Clock, script: list[str], ranks_end: bool, racing: bool, adopting: bool
) -> None:
    run(script, clock, ranks_end=ranks_end, racing=racing, adopting=adopting)


def test_an_adopted_attempt_has_one_end_and_its_bounds_go_on(clock: Clock) -> None:
    """A new runner continues an attempt that an earlier runner has started. The attempt's time
    limits count from the start of its ranks."""
    killed = ["run", "beat", "stage", "kill the runner", "run", "beat", "kill the runner"]
    state, ended, events = run([*killed, "commit", "exit 0"], clock, adopting=True)
    assert (state, ended.attempt) == ("succeeded", 1)
    assert [event.type for event in events].count("released") == 1
    steps = ["beat", "hang"]
    script = ["run", *[*steps, "kill the runner"] * 4, *steps * 4, *["run", *steps * 8] * 2]
    state, ended, _ = run(script, clock, adopting=True)
    assert (state, ended.attempt) == ("failed", 3)
    assert ended.last_error is not None
    assert ended.last_error.type == "deadline"


def test_a_runner_that_stops_leaves_what_goes_on_to_the_next(clock: Clock) -> None:
    script = ["run", "beat", "stage", "stop the runner", "beat", "stop the runner", "commit"]
    found: list[int] = []
    state, ended, events = run([*script, "exit 0"], clock, adopting=True, found=found)
    assert (state, ended.attempt, ended.stopped) == ("succeeded", 1, 0)
    assert found == [1, 1], "two runners went on with it"
    assert "requeued" not in {event.type for event in events}
    state, ended, _ = run([*script, "exit 0", "run", "exit 1"], clock)
    assert ended.stopped == 2


def test_a_job_that_is_deleted_again_and_again_has_an_end(clock: Clock) -> None:
    # The last action comes while the executor gives the devices back.
    deleted = ["run", "job_deleted", "run"]
    state, ended, _ = run([*deleted * 2, "preempted", "run", *deleted * 9], clock)
    assert (state, ended.attempt, ended.stopped) == ("failed", ATTEMPTS + 3, 3)


def test_ranks_that_nothing_ends_keep_no_job_from_its_end(clock: Clock) -> None:
    state, ended, _ = run(["run", *["hang"] * 60], clock, ranks_end=False)
    assert (state, ended.attempt) == ("failed", ATTEMPTS)
    assert ended.result is not None
    assert ended.result.error is not None
    assert ended.result.error.type == "rank_hung"


def test_hours_of_waiting_count_for_no_bound(clock: Clock) -> None:
    before = clock.now
    script = ["hours", *["wait"] * 5] * 3
    state, ended, _ = run([*script, "run", "beat", "stage", "commit", "exit 0"], clock)
    assert clock.now - before > 3 * DEADLINE
    assert (state, ended.attempt) == ("succeeded", 1)


def test_a_job_that_waits_says_for_what_and_can_be_cancelled(clock: Clock) -> None:
    phases: list[str] = []
    state, ended, events = run(["wait", "wait", "cancel", "wait"], clock, phases=phases)
    assert phases == ["claimed", "waiting: quota"]
    assert (state, ended.attempt) == ("cancelled", 1)
    assert "requeued" not in {event.type for event in events}


@pytest.mark.slow
def test_the_reasons_of_a_wait_are_events_and_a_new_runner_goes_on_with_it(clock: Clock) -> None:
    """An unchanged reason is reported once, even if a new runner continues the wait. A reason that
    changes all the time is reported at longer and longer intervals."""
    script = [*["wait"] * 400, "kill the runner", *["wait"] * 400, "stage", "commit", "exit 0"]
    state, _, events = run(script, clock, adopting=True)
    told = [event.data["reason"] for event in events if event.type == "waiting"]
    assert (state, told) == ("succeeded", ["quota"])
    # The waits take 800 s of simulated time.
    changing = [f"wait for {number % 7}" for number in range(8_000)]
    state, _, events = run([*changing, "stage", "commit", "exit 0"], clock)
    told = [event.data["reason"] for event in events if event.type == "waiting"]
    assert state == "succeeded"
    assert 5 <= len(told) <= 7
    assert len(set(told)) > 1


def test_a_lease_says_since_when_its_attempt_waits(clock: Clock) -> None:
    leases: list[Lease] = []
    script = [*["wait"] * 100, "kill the runner", *["wait"] * 100, *["stage"] * 100, "commit"]
    before = time.time()
    run([*script, "exit 0"], clock, adopting=True, leases=leases)
    waiting = [lease for lease in leases if lease.phase == "waiting: quota"]
    assert len({lease.waits_since for lease in waiting}) == 1, "the new runner began anew"
    assert before <= (waiting[0].waits_since or 0) <= time.time()
    assert {lease.waited for lease in leases if lease.phase.startswith("start")} == {None}


HUNG = ["run", *["hang"] * 3]


@pytest.mark.parametrize(
    ("script", "error", "attempts"),
    [
        (["refused"], "refused", 1),
        # A preemption does not count as an attempt.
        (["preempted", "run"] * 3 + ["exit 1", "run"] * 3, "rank_crashed", 6),
        ([*HUNG, "wait", *HUNG, "wait", *HUNG], "rank_hung", 3),
        (["run", *["beat", "hang"] * 30], "deadline", 3),
        (["exit 0", "run"] * 3, "no_checkpoint", 3),
        (["exit 1", "run"] * 3, "rank_crashed", 3),
    ],
)
def test_why_an_attempt_failed(clock: Clock, script: list[str], error: str, attempts: int) -> None:
    state, ended, _ = run(script, clock)
    assert state == "failed"
    assert ended.result is not None
    assert ended.result.error is not None
    assert (ended.result.error.type, ended.attempt) == (error, attempts)
