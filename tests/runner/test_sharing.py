"""Trainer and vLLM on one GPU: never both at once, and vLLM is awake again whatever happened to whom."""

import random
import signal
import time

import httpx
import pytest

from fake_vllm import ADMIN_TOKEN
from runner import fake_gpu
from runner.shared_stack import MIB, SharedStack
from tandem.system import processes
from tandem.trainer.runner import loop

CYCLE = ["vllm falls asleep", "vllm sleeps", "rank runs", "vllm wakes", "vllm is awake"]


@pytest.fixture
def make(tmp_path):
    stacks = []

    def build(**variables: str) -> SharedStack:
        stacks.append(SharedStack(tmp_path, **variables))
        return stacks[-1]

    yield build
    for stack in stacks:
        print(stack.log.read_text() if stack.log.exists() else "no runner")
        stack.close()
        assert not [line for line in stack.journal() if "out of memory" in line]


@pytest.fixture
def stack(make):
    stack = make()
    stack.vllm()
    stack.start()
    stack.run()
    return stack


def awake_and_unheld(stack):
    """What holds after any job."""
    assert not stack.asleep()
    assert stack.spool.hold.get() is None
    assert fake_gpu.others(stack.gpu) == fake_gpu.AWAKE


def test_a_whole_cycle_in_its_order_and_in_bytes(stack):
    stack.publisher()
    for number in (1, 2):
        job_id = stack.submit("run")
        state, _ = stack.wait(job_id)
        # At once: who samples right after the end finds vLLM awake.
        awake_and_unheld(stack)
        assert state == "succeeded"
        assert stack.kinds(job_id) == ["claimed", "slept", "released", "woken", "succeeded"]
        assert stack.journal() == ["vllm is up", *CYCLE * number]
    slept, released = stack.event(job_id, "slept"), stack.event(job_id, "released")
    assert slept["before"] == {fake_gpu.UUID: (fake_gpu.AWAKE + 3) * MIB}
    assert slept["devices"] == released["floor"] == released["devices"] == {fake_gpu.UUID: (fake_gpu.ASLEEP + 3) * MIB}
    assert released["bytes"] == 0
    assert stack.event(job_id, "woken")["devices"] == slept["before"]


@pytest.mark.parametrize(("keeps", "stay"), [(2800, True), (9000, False)])
def test_vllm_wakes_beside_ranks_that_stay_if_they_keep_little(make, keeps, stay):
    stack = make(TANDEM_LAUNCH="resident", FAKE_RANK_KEEPS=str(keeps))
    stack.vllm()
    stack.start()
    stack.run()
    for number in (1, 2):
        job_id = stack.submit("run")
        state, _ = stack.wait(job_id)
        assert (state, stack.asleep(), stack.spool.hold.get()) == ("succeeded", False, None)
        assert fake_gpu.others(stack.gpu) == fake_gpu.AWAKE + (keeps if stay else 0)
        assert stack.journal() == ["vllm is up", *CYCLE * number]
        # The second time they are there already when vLLM falls asleep.
        before = fake_gpu.ASLEEP + 3 + (keeps if stay and number == 2 else 0)
        assert stack.event(job_id, "slept")["devices"] == {fake_gpu.UUID: before * MIB}
        released = stack.event(job_id, "released")
        if stay:
            assert released["devices"] == {fake_gpu.UUID: (fake_gpu.ASLEEP + 3 + keeps) * MIB}
            assert released["resident"] == {fake_gpu.UUID: (keeps if number == 1 else 0) * MIB}
        else:
            assert (released["bytes"], "resident" in released) == (0, False)
    assert ("keep too much" in stack.log.read_text()) == (not stay)


def test_while_a_job_trains_the_hold_says_so_and_nobody_wakes_vllm(stack):
    stack.publisher()
    job_id = stack.submit("run", do="wait", until=1)
    stack.until_beating(job_id)
    hold = stack.spool.hold.live()
    assert (hold.job, hold.attempt, hold.phase) == (job_id, 1, "training")
    assert hold.floor == {fake_gpu.UUID: (fake_gpu.ASLEEP + 3) * MIB}
    time.sleep(3)
    assert stack.spool.hold.live().beat > hold.beat
    # A runner that hangs for longer than its lease: the hold is stale, but its ranks' memory is not free.
    stack.runner.send_signal(signal.SIGSTOP)
    stack.until(lambda: stack.spool.hold.live() is None, 20, "the hold to be stale")
    time.sleep(2)
    assert "vllm wakes" not in stack.journal()
    assert "is lost, and" in stack.text("publisher")
    stack.runner.send_signal(signal.SIGCONT)
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    awake_and_unheld(stack)


@pytest.mark.parametrize(
    ("order", "kinds"),
    [
        ({"do": "fail"}, ["failed"]),
        ({"do": "die", "until": 1}, ["requeued", "claimed", "slept", "released", "woken", "succeeded"]),
        ({"do": "wait", "deadline": 2, "attempts": 1}, ["failed"]),
    ],
)
def test_a_job_that_fails_leaves_vllm_awake(stack, order, kinds):
    job_id = stack.submit("run", **order)
    stack.wait(job_id)
    awake_and_unheld(stack)
    assert stack.kinds(job_id) == ["claimed", "slept", "released", "woken", *kinds]


def test_a_job_cancelled_while_vllm_falls_asleep_starts_no_rank(make):
    stack = make(FAKE_SLEEP_SECONDS="1")
    stack.vllm()
    stack.start()
    stack.run()
    job_id = stack.submit("run")
    stack.until_told("vllm falls asleep")
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    awake_and_unheld(stack)
    assert "rank runs" not in stack.journal()


def test_jobs_wait_for_vllm_and_it_is_said_once(make):
    stack = make()
    stack.start()
    stack.run()
    job_id = stack.submit("run")
    stack.until(lambda: "jobs wait: vLLM is not ready" in stack.log.read_text(), 30, "the complaint")
    time.sleep(3)
    assert stack.log.read_text().count("jobs wait") == 1
    assert stack.spool.jobs.get(job_id)[0] == "queued"
    stack.vllm()
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)


SLOW = pytest.mark.slow
PHASES = [pytest.param("sleeping", marks=SLOW), "training", pytest.param("waking", marks=SLOW)]


@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_of_the_runner_and_the_publisher_wakes_vllm(make, phase):
    stack = make(FAKE_SLEEP_SECONDS="2", FAKE_WAKE_SECONDS="1")
    stack.vllm()
    stack.publisher()
    stack.start()
    stack.run()
    job_id = stack.submit("run", **({"do": "wait", "until": 1} if phase == "training" else {}))
    stack.until_told({"sleeping": "vllm falls asleep", "training": "rank runs", "waking": "vllm wakes"}[phase])
    stack.runner.kill()
    stack.runner.wait()
    stack.until_told("vllm is awake")
    stack.until(lambda: stack.spool.hold.get() is None, 10, "the hold to be gone")
    stack.start()
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)


def test_a_runner_that_finds_its_own_stale_hold_wakes_vllm(stack):
    """No publisher is there to do it, and no job is queued."""
    job_id = stack.submit("run", do="wait", attempts=1)
    stack.until_told("rank runs")
    stack.runner.kill()
    stack.runner.wait()
    assert stack.spool.hold.get() is not None
    stack.start()
    assert stack.wait(job_id)[0] == "failed"
    stack.until_told("vllm is awake")
    awake_and_unheld(stack)
    assert "no trainer holds its GPUs: waking it" in stack.log.read_text()


def test_a_stale_hold_beside_an_awake_vllm_is_not_waited_for(stack):
    """Its runner was killed after vLLM had woken, before the hold went: what is in use is vLLM's own."""
    job_id = stack.submit("run", do="wait", attempts=1)
    stack.until_told("rank runs")
    stack.until(lambda: (hold := stack.spool.hold.get()) is not None and hold.floor, 10, "the floor in the hold")
    stack.runner.kill()
    stack.runner.wait()
    stack.until(lambda: fake_gpu.others(stack.gpu) == fake_gpu.ASLEEP, 10, "the ranks to be gone")
    httpx.post(f"{stack.url}/wake_up", headers={"x-tandem-admin-token": ADMIN_TOKEN}, timeout=20).raise_for_status()
    assert stack.spool.hold.get() is not None
    stack.start()
    assert stack.wait(job_id, 20)[0] == "failed"
    assert stack.wait(stack.submit("run"), 20)[0] == "succeeded"
    awake_and_unheld(stack)


def test_sigterm_in_a_cycle_wakes_vllm_and_puts_the_job_back(stack):
    job_id = stack.submit("run", do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    begin = time.monotonic()
    assert stack.stop(timeout=loop.STOP_SECONDS) == 0
    assert time.monotonic() - begin < loop.STOP_SECONDS
    assert stack.spool.jobs.get(job_id)[0] == "queued"
    awake_and_unheld(stack)


@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_of_vllm_and_the_next_one_waits_for_the_trainer(make, phase):
    stack = make(FAKE_SLEEP_SECONDS="1", FAKE_WAKE_SECONDS="1")
    vllm = stack.vllm()
    stack.start()
    stack.run()
    job_id = stack.submit("run", **({"do": "wait", "until": 1} if phase == "training" else {}))
    stack.until_told({"sleeping": "vllm falls asleep", "training": "rank runs", "waking": "vllm wakes"}[phase])
    vllm.kill()
    vllm.wait()
    stack.vllm(wait=False)  # as supervisord does, at once
    if phase == "training":
        stack.until(lambda: "waiting until the trainer gives" in stack.text("vllm"), 20, "vLLM to wait")
        time.sleep(1)
        assert stack.journal().count("vllm is up") == 1
        stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == ("cancelled" if phase == "training" else "succeeded")
    stack.until(stack.healthy, 30, "vLLM")
    awake_and_unheld(stack)
    if phase == "sleeping":
        # Its memory was free all the sooner; the job didn't need it.
        assert stack.kinds(job_id) == ["claimed", "slept", "released", "succeeded"]


def test_a_wake_that_is_refused_at_first_is_tried_again_before_the_end(make):
    stack = make()
    stack.vllm(FAKE_REFUSED_WAKES="2")
    stack.start()
    stack.run()
    job_id = stack.submit("run")
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)
    assert stack.journal().count("vllm wakes") == 3
    assert stack.log.read_text().count("vLLM does not wake; trying again") == 1


@pytest.mark.slow
def test_a_vllm_that_says_it_sleeps_and_keeps_its_memory_fails_the_job(make):
    stack = make()
    stack.vllm(FAKE_KEEPS="1")
    stack.start()
    stack.run()
    job_id = stack.submit("run", attempts=1)
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("failed", "gpus_not_freed")
    assert f"{(fake_gpu.AWAKE + 3) * MIB}" in job.result.error.message
    assert stack.kinds(job_id) == ["claimed", "woken", "failed"]
    assert "rank runs" not in stack.journal()
    awake_and_unheld(stack)


def test_what_outlives_a_killed_runner_is_waited_for(make):
    """A process that the kernel did not end with its parent has memory yet: vLLM is not woken into it."""
    stack = make()
    stack.vllm()
    stack.publisher()
    stack.start()
    stack.run()
    stack.submit("run", do="leak_and_wait", until=1, attempts=1)
    stack.until(lambda: len(stack.children()) == 4, 30, "server, leader, rank and its child")
    (rank,) = (path for path in stack.gpu.glob("rank.*"))
    stack.runner.kill()
    stack.runner.wait()
    stack.until(lambda: len(stack.marked()) == 1, 10, "the orphan to be alone")
    (orphan,) = stack.marked()
    rank.rename(stack.gpu / f"orphan.{orphan.pid}")
    stack.until(lambda: "is lost, and" in stack.text("publisher"), 20, "the publisher to wait")
    assert "vllm wakes" not in stack.journal()
    processes.send(orphan, signal.SIGKILL)
    stack.until_told("vllm is awake")


@pytest.mark.slow
def test_vllm_and_the_runner_start_and_die_at_any_time(make):
    """Whoever dies when, both never have the memory (`make` looks for an OOM), and every job succeeds."""
    stack = make(FAKE_SLEEP_SECONDS="0.2", FAKE_WAKE_SECONDS="0.2")
    chance = random.Random(0)
    vllm = stack.vllm(wait=False)
    stack.publisher()
    stack.start()
    stack.run()
    for round_ in range(8):
        job_id = stack.submit("run", attempts=9)
        time.sleep(chance.uniform(0, 3))
        if round_ % 2:
            stack.runner.kill()
            stack.runner.wait()
            stack.start()
        else:
            vllm.kill()
            vllm.wait()
            vllm = stack.vllm(wait=False)
        assert stack.wait(job_id)[0] == "succeeded"
    stack.until(lambda: stack.healthy() and not stack.asleep(), 30, "vLLM awake")
    awake_and_unheld(stack)
