"""Trainer and vLLM on one GPU. The trainer and vLLM never use the GPU at the same time. vLLM is
awake again after any failure of the trainer or of vLLM."""

import signal
import time

import pytest

from runner import fake_gpu
from runner.shared_stack import MIB, SharedStack
from spool.volume_tools import read_only
from tandem.system import processes
from tandem.trainer.runner import loop

pytestmark = pytest.mark.sample(1, of="processes of jobs")

CYCLE = ["vllm falls asleep", "vllm sleeps", "rank runs", "vllm wakes", "vllm is awake"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    stack = SharedStack(tmp_path_factory.mktemp("shared"))
    yield stack
    stack.close()


@pytest.fixture
def stack(shared):
    """A stack with a running runner, a running vLLM and a running publisher. `stack.name` is the
    name of a new run."""
    shared.forget()
    shared.vllm_does()
    if not shared._processes:
        shared.vllm(wait=False)
        shared.start()
    elif shared.runner.poll() is not None:
        shared.start()
    if not shared.publishes:
        shared.publisher()
    shared.until(shared.healthy, "vLLM")
    shared.until(lambda: not shared.asleep(), "vLLM to be awake")
    shared.forget()
    shared.name = shared.run(f"run-{len(shared.spool.runs.names())}")
    yield shared
    assert not [line for line in shared.journal() if "out of memory" in line]


def awake_and_unheld(stack):
    """Checks the facts that hold after any job: vLLM is awake, no runner holds the GPU, and only
    vLLM uses the GPU's memory."""
    assert not stack.asleep()
    assert stack.spool.hold.get() is None
    assert fake_gpu.others(stack.gpu) == fake_gpu.AWAKE


def live_hold(stack):
    """Waits until a runner holds the GPU, and returns this live hold. On a busy machine the runner
    may renew its hold of the GPU late, so the hold may be stale for a moment."""
    return stack.until(stack.spool.hold.live, "a live hold")


def floor(mib=0):
    """UUID -> bytes in use while vLLM sleeps and other processes use `mib` MiB. The driver uses 3
    MiB of these bytes."""
    return {fake_gpu.UUID: (fake_gpu.ASLEEP + 3 + mib) * MIB}


def test_a_whole_cycle_in_its_order_and_in_bytes(stack):
    for number in (1, 2):
        job_id = stack.submit(stack.name)
        state, _ = stack.wait(job_id)
        # vLLM is awake when the job ends, so a client that samples right after the job's end gets
        # an answer.
        awake_and_unheld(stack)
        assert state == "succeeded"
        assert stack.kinds(job_id) == ["claimed", "slept", "released", "woken", "succeeded"]
        assert stack.journal() == CYCLE * number
    slept, released = stack.event(job_id, "slept"), stack.event(job_id, "released")
    assert slept["before"] == {fake_gpu.UUID: (fake_gpu.AWAKE + 3) * MIB}
    assert slept["devices"] == released["floor"] == released["devices"] == floor()
    assert released["bytes"] == 0
    assert stack.event(job_id, "woken")["devices"] == slept["before"]


@pytest.mark.slow
@pytest.mark.parametrize(("keeps", "stay"), [(2800, True), (9000, False)])
def test_vllm_wakes_beside_ranks_that_stay_if_they_keep_little(tmp_path, keeps, stay):
    stack = SharedStack(tmp_path, "resident", FAKE_RANK_KEEPS=str(keeps))
    try:
        stack.start()
        stack.vllm()
        stack.publisher()
        stack.run()
        for number in (1, 2):
            job_id = stack.submit("run")
            state, _ = stack.wait(job_id)
            assert (state, stack.asleep(), stack.spool.hold.get()) == ("succeeded", False, None)
            assert fake_gpu.others(stack.gpu) == fake_gpu.AWAKE + (keeps if stay else 0)
            assert stack.journal() == ["vllm is up", *CYCLE * number]
            # Before the second job, the ranks of the first job still use memory when vLLM falls
            # asleep.
            assert stack.event(job_id, "slept")["devices"] == floor(
                keeps if stay and number == 2 else 0
            )
            released = stack.event(job_id, "released")
            if stay:
                assert released["devices"] == floor(keeps)
                assert (released["floor"], released["resident"]) == (
                    floor(),
                    {fake_gpu.UUID: keeps * MIB},
                )
            else:
                assert (released["bytes"], "resident" in released) == (0, False)
        assert ("keep too much" in stack.logged()) == (not stay)
    finally:
        stack.close()


@pytest.mark.slow
def test_while_a_job_trains_the_hold_says_so_and_nobody_wakes_vllm(stack):
    job_id = stack.submit(stack.name, do="wait", until=1)
    stack.until_beating(job_id)
    hold = live_hold(stack)
    assert (hold.job, hold.attempt, hold.phase, hold.floor) == (job_id, 1, "training", floor())
    stack.until(lambda: live_hold(stack).beat > hold.beat, "a beat in the hold")
    # The runner hangs for longer than its lease. So the runner's hold of the GPU is stale, but the
    # ranks still use their memory.
    stack.runner.send_signal(signal.SIGSTOP)
    stack.until(lambda: stack.spool.hold.live() is None, "the hold to be stale")
    stack.until(lambda: "is lost, and" in stack.text("publisher"), "the publisher to notice")
    time.sleep(1)
    assert "vllm wakes" not in stack.journal()
    stack.runner.send_signal(signal.SIGCONT)
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    awake_and_unheld(stack)


@pytest.mark.parametrize(
    ("order", "kinds"),
    [
        ({"do": "fail"}, ["failed"]),
        (
            {"do": "die", "until": 1},
            ["requeued", "claimed", "slept", "released", "woken", "succeeded"],
        ),
        ({"do": "wait", "deadline": 2, "attempts": 1}, ["failed"]),
    ],
)
def test_a_job_that_fails_leaves_vllm_awake(stack, order, kinds):
    job_id = stack.submit(stack.name, **order)
    stack.wait(job_id)
    awake_and_unheld(stack)
    assert stack.kinds(job_id) == ["claimed", "slept", "released", "woken", *kinds]


def test_a_job_cancelled_while_vllm_falls_asleep_starts_no_rank(stack):
    stack.vllm_does(sleep_seconds=3)
    job_id = stack.submit(stack.name)
    stack.until_journal("vllm falls asleep")
    stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == "cancelled"
    awake_and_unheld(stack)
    assert "rank runs" not in stack.journal()


@pytest.mark.slow
def test_jobs_wait_for_vllm_and_the_log_says_so_once(stack):
    stack.kill_vllm()
    job_id = stack.submit(stack.name)
    stack.until_logged("jobs wait: vLLM is not ready")
    time.sleep(3)  # The runner looks at vLLM more often than every 3 s.
    assert stack.logged().count("jobs wait") == 1
    assert stack.spool.jobs.get(job_id)[0] == "queued"
    stack.vllm()
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)


PHASES = [
    pytest.param("vllm falls asleep", {}, marks=SLOW),
    pytest.param("rank runs", {"do": "wait", "until": 1}),
    pytest.param("vllm wakes", {}, marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("moment", "order"), PHASES)
def test_kill_9_of_the_runner_and_the_publisher_wakes_vllm(stack, moment, order):
    stack.vllm_does(sleep_seconds=2, wake_seconds=1)
    job_id = stack.submit(stack.name, **order)
    stack.until_journal(moment)
    stack.kill()
    stack.until_journal("vllm is awake")
    stack.until(lambda: stack.spool.hold.get() is None, "the hold to be gone")
    stack.start()
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)


def test_vllm_wakes_while_the_volume_refuses_the_event_of_the_release(stack):
    job_id = stack.submit(stack.name, do="wait", attempts=1)
    stack.until_beating(job_id)
    stack.runner.send_signal(signal.SIGSTOP)
    with read_only(stack.spool.paths.job_dir(job_id)):
        # The list of children names parents before their children, so the last process is the rank.
        processes.send(stack.children()[-1], signal.SIGKILL)
        stack.runner.send_signal(signal.SIGCONT)
        stack.until_logged("can't write the event released")
        stack.until(lambda: not stack.asleep(), "vLLM to be awake", 20)
    stack.wait(job_id)
    assert stack.kinds(job_id) == ["claimed", "slept", "released", "woken", "failed"]
    awake_and_unheld(stack)


@pytest.mark.slow
def test_no_rank_starts_once_the_publisher_took_a_hold_that_a_full_volume_did_not_renew(stack):
    stack.vllm_does(sleep_seconds=2)
    job_id = stack.submit(stack.name)
    stack.until_journal("vllm falls asleep")
    with read_only(stack.spool.paths.job_dir(job_id)):
        stack.until_journal("vllm is awake")
    state, job = stack.wait(job_id)
    assert (state, job.attempt, job.last_error.type) == ("succeeded", 2, "inference_unavailable")
    end = ["requeued", "claimed", "slept", "released", "woken", "succeeded"]
    assert stack.kinds(job_id) == ["claimed", "slept", "woken", *end]
    awake_and_unheld(stack)


@pytest.mark.slow
@pytest.mark.parametrize("awake", [False, True])
def test_a_publisher_that_finds_a_stale_hold_settles_it(stack, awake):
    """Runner and publisher are killed, and the runner's hold of the GPU stays on the volume.
    `awake`: whether vLLM is awake although the hold still exists. If vLLM is awake, vLLM itself
    uses the GPU's memory."""
    job_id = stack.submit(stack.name, do="wait", attempts=1)
    stack.until_journal("rank runs")
    stack.until(
        lambda: (hold := stack.spool.hold.get()) is not None and hold.floor, "the floor in the hold"
    )
    stack.signal_publisher(signal.SIGKILL)
    stack.kill()
    if awake:
        stack.until(lambda: fake_gpu.others(stack.gpu) == fake_gpu.ASLEEP, "the ranks to be gone")
        stack.wake_vllm()
    assert stack.spool.hold.get() is not None
    stack.start()
    next_id = stack.submit(stack.run(f"{stack.name}-next"))
    stack.until_logged("jobs wait: the publisher has not settled")
    stack.publisher()
    assert stack.wait(job_id)[0] == "failed"
    stack.until_journal("vllm is awake")
    assert stack.wait(next_id)[0] == "succeeded"
    awake_and_unheld(stack)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("moment", "order"), PHASES)
def test_kill_9_of_the_publisher_and_the_next_one_goes_on(stack, moment, order):
    stack.vllm_does(sleep_seconds=1, wake_seconds=1)
    job_id = stack.submit(stack.name, **order)
    stack.until_journal(moment)
    stack.signal_publisher(signal.SIGKILL)
    stack.publisher()
    if order:
        stack.until(lambda: stack.text("publisher").count("the trainer has the GPUs"), "a turn")
        time.sleep(1)
        assert "vllm wakes" not in stack.journal()
        stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == ("cancelled" if order else "succeeded")
    awake_and_unheld(stack)


def test_a_job_ends_without_a_publisher_and_the_next_publisher_wakes_vllm(stack):
    job_id = stack.submit(stack.name, do="wait", until=1)
    stack.until_beating(job_id)
    stack.signal_publisher(signal.SIGKILL)
    stack.spool.queue.cancel(job_id)
    stack.until(lambda: stack.spool.hold.get() is None, "the hold to be gone")
    assert stack.asleep()
    stack.publisher()
    assert stack.wait(job_id)[0] == "cancelled"
    awake_and_unheld(stack)


def test_sigterm_in_a_cycle_wakes_vllm_and_puts_the_job_back(stack):
    job_id = stack.submit(stack.name, do="wait", until=1, attempts=1)
    stack.until_beating(job_id)
    assert stack.stop(timeout=loop.STOP_SECONDS) == 0
    assert stack.spool.jobs.get(job_id)[0] == "queued"
    awake_and_unheld(stack)
    stack.spool.queue.cancel(job_id)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("moment", "order"), PHASES)
def test_kill_9_of_vllm_and_the_next_one_waits_for_the_trainer(stack, moment, order):
    stack.vllm_does(sleep_seconds=1, wake_seconds=1)
    job_id = stack.submit(stack.name, **order)
    stack.until_journal(moment)
    waits = stack.text("vllm").count("waiting until the trainer gives")
    stack.kill_vllm()
    stack.vllm(wait=False)  # In a deployment supervisord starts the next vLLM at once.
    if order:
        stack.until(
            lambda: stack.text("vllm").count("waiting until the trainer gives") > waits,
            "vLLM to wait",
        )
        time.sleep(1)
        assert "vllm is up" not in stack.journal()
        stack.spool.queue.cancel(job_id)
    assert stack.wait(job_id)[0] == ("cancelled" if order else "succeeded")
    stack.until(stack.healthy, "vLLM")
    awake_and_unheld(stack)
    if moment == "vllm falls asleep":
        # vLLM's death freed the memory sooner than a sleep would have freed it, and the job went
        # on. The events contain `woken` only if the next vLLM was up when the publisher looked.
        kinds = [kind for kind in stack.kinds(job_id) if kind != "woken"]
        assert kinds == ["claimed", "slept", "released", "succeeded"]


def test_a_refused_wake_is_tried_again_before_the_end(stack):
    stack.vllm_does(refuse_wakes=2)
    job_id = stack.submit(stack.name)
    assert stack.wait(job_id)[0] == "succeeded"
    awake_and_unheld(stack)
    assert stack.journal().count("vllm wakes") == 3
    assert stack.logged().count("vLLM does not wake; the publisher tries again") == 1


@SLOW
def test_a_vllm_that_says_it_sleeps_and_keeps_its_memory_fails_the_job(stack):
    stack.vllm_does(keep=1)
    job_id = stack.submit(stack.name, attempts=1)
    state, job = stack.wait(job_id)
    assert (state, job.result.error.type) == ("failed", "gpus_not_freed")
    assert f"{(fake_gpu.AWAKE + 3) * MIB}" in job.result.error.message
    assert stack.kinds(job_id) == ["claimed", "woken", "failed"]
    assert "rank runs" not in stack.journal()
    awake_and_unheld(stack)


@pytest.mark.slow
def test_sigterm_ends_a_runner_that_waits_for_the_publisher(stack):
    assert stack.wait(stack.submit(stack.name))[0] == "succeeded"
    # The stopped publisher stands for a publisher that loads an adapter for a long time.
    stack.signal_publisher(signal.SIGSTOP)
    job_id = stack.submit(stack.name)
    stack.until(stack.spool.hold.get, "a hold")
    time.sleep(2)
    assert stack.spool.events.read(job_id)[-1].type == "claimed"
    assert stack.stop() == 0
    assert stack.spool.jobs.get(job_id)[0] == "queued"
    assert stack.spool.hold.get() is None
    stack.signal_publisher(signal.SIGCONT)
    stack.spool.queue.cancel(job_id)
