"""The publisher on GPUs that a trainer uses too. A hold is the record by which a runner takes the
GPUs from vLLM. The publisher lets vLLM sleep while a live hold exists, and wakes vLLM when no live
hold exists."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference.stage import Stage
from runner import fake_gpu
from tandem.config import Settings
from tandem.errors import SpoolUnusable
from tandem.inference.publisher.place import vllm_place
from tandem.inference.publisher.publisher import Publisher
from tandem.spool.schema import SharedVllm
from tandem.system.network import same_network
from tandem.vllm_client.client import InferenceRefused

MIB = 2**20
# A runner that takes the spool's lock and writes a hold. The runner ends when its standard input
# ends.
HOLDER = """
import os, sys, time
from tandem.spool import Spool
from tandem.spool.schema import Hold
spool, floor = Spool(sys.argv[1]), int(sys.argv[2])
name = f"holder:{os.getpid()}"
with spool.runner_lock(name):
    now = time.time()
    spool.hold.put(Hold(
        runner=name, job="j", attempt=1, phase=sys.argv[4], since=now, beat=now, lease=60,
        deadline=now + float(sys.argv[3]), floor={"GPU-aaaa1111": floor} if floor else {},
    ))
    print("holds", flush=True)
    sys.stdin.read()
"""


class SharedGpu:
    def __init__(self, directory: Path, stage: Stage) -> None:
        self.gpu, self.driver = fake_gpu.install(directory)
        self.stage, self.spool, self.vllm = stage, stage.spool, stage.vllm
        self.runners: list[subprocess.Popen[str]] = []

    def publisher(self) -> Publisher:
        return self.stage.publisher(device="cuda", gpu_mode="shared", grace=60.0)

    def hold(self, *, floor: int = 0, deadline: float = 600, phase: str = "training") -> None:
        values = (str(self.spool.root), str(floor), str(deadline), phase)
        command = [sys.executable, "-c", HOLDER, *values]
        runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.runners.append(runner)
        assert runner.stdout is not None
        assert runner.stdout.readline() == "holds\n"

    def kill_runner(self) -> None:
        self.runners[-1].kill()
        self.runners[-1].wait()

    def said(self) -> SharedVllm:
        record = self.spool.inference.shared()
        assert record is not None
        return record

    def answer(self) -> tuple[str, str]:
        answer = self.said().answer
        assert answer is not None
        assert answer.job == "j"
        return answer.outcome, answer.why

    def use(self, mib: int) -> None:
        fake_gpu.use(self.gpu, "rank", mib)


@pytest.fixture
def shared(stage, tmp_path, monkeypatch):
    shared = SharedGpu(tmp_path, stage)
    shared.driver.install(monkeypatch)
    yield shared
    for runner in shared.runners:
        runner.kill()
        runner.communicate()
    assert not stage.vllm.dead


def test_under_a_live_hold_the_publisher_neither_loads_nor_wakes(shared):
    publisher = shared.publisher()
    shared.hold()
    shared.vllm.asleep = True
    assert publisher.once() is False
    assert shared.vllm.asleep
    assert not [path for path, _ in shared.vllm.calls if path not in ("/health", "/is_sleeping")]
    shared.kill_runner()
    assert publisher.once() is True
    assert not shared.vllm.asleep
    assert shared.spool.hold.get() is None
    assert shared.stage.served() == (0, None)
    # After the next sleep the checkpoint is neither loaded nor verified again.
    verifications = shared.stage.called("/v1/completions")
    shared.vllm.asleep = True
    assert publisher.once()
    assert shared.vllm.loads() == ["run@0"]
    assert shared.stage.called("/v1/completions") == verifications > 0


@pytest.mark.parametrize(
    ("asleep", "mib", "deadline", "goes_on"),
    [
        (True, 30_000, 600, False),
        (True, 900 + 200, 600, True),  # The used memory is near the hold's floor of 900 MiB.
        (True, 30_000, -1, True),  # The hold's deadline is over.
        (False, 70_000, 600, True),  # vLLM is awake and uses the memory itself.
    ],
)
def test_the_publisher_waits_for_the_memory_of_a_lost_trainer(
    shared, asleep, mib, deadline, goes_on
):
    publisher = shared.publisher()
    shared.hold(floor=900 * MIB, deadline=deadline)
    shared.vllm.asleep = asleep
    shared.use(mib)
    shared.kill_runner()
    assert publisher.once() is goes_on
    assert shared.vllm.asleep is (not goes_on)
    assert shared.vllm.loads() == (["run@0"] if goes_on else [])
    assert (shared.spool.hold.get() is None) is goes_on


def test_a_hold_of_an_earlier_runner_is_not_live(shared):
    shared.hold()
    earlier = shared.spool.hold.get()
    shared.kill_runner()
    shared.hold()
    own = shared.spool.hold.get()
    shared.spool.hold.put(earlier)
    assert shared.spool.hold.live() is None
    for seconds, live in (
        (-0.5 * own.lease, True),
        (-2 * own.lease, False),
        (2 * own.lease, False),
    ):
        # A heartbeat in the future comes from a wrong clock, so the hold is not live.
        now = time.time()
        shared.spool.hold.put(own.model_copy(update={"beat": now + seconds}))
        assert (shared.spool.hold.live() is not None) is live


def test_a_vllm_that_sleeps_without_a_hold_is_woken_also_after_it_refused(shared):
    def refuse() -> None:
        raise MemoryError

    publisher = shared.publisher()
    shared.vllm.asleep, shared.vllm.on_wake = True, refuse
    for _ in range(2):
        with pytest.raises(InferenceRefused, match="MemoryError"):
            publisher.once()
    assert shared.vllm.loads() == []
    shared.vllm.on_wake = lambda: None
    assert publisher.once()


def test_the_publisher_puts_vllm_to_sleep_for_a_hold_once_and_wakes_it_after(shared):
    publisher = shared.publisher()
    assert publisher.once() is True
    assert (shared.said().state, shared.said().answer) == ("awake", None)
    shared.hold(phase="sleeping")
    for _ in range(3):
        assert publisher.once() is False
        assert shared.vllm.asleep
        assert (shared.said().state, *shared.answer()) == ("asleep", "asleep", "")
    assert shared.stage.called("/sleep") == 1
    # A publisher that starts during the hold does not order vLLM to sleep a second time.
    assert shared.publisher().once() is False
    assert shared.stage.called("/sleep") == 1
    looked = shared.said().looked
    shared.spool.hold.clear()
    assert publisher.once() is True
    assert not shared.vllm.asleep
    assert (shared.said().state, shared.said().answer) == ("awake", None)
    assert shared.said().looked > looked


def test_a_publisher_that_was_killed_before_it_answered_is_followed_by_one_that_does(shared):
    shared.hold(phase="sleeping")
    # The first publisher has put vLLM to sleep, and has died before it wrote its answer.
    shared.vllm.asleep = True
    assert shared.publisher().once() is False
    assert shared.answer() == ("asleep", "")
    assert shared.stage.called("/sleep") == 0


def test_a_vllm_that_is_not_ready_is_not_put_to_sleep(shared):
    """A vLLM that is not ready may be starting. A starting vLLM may have looked for a hold before
    the hold was written."""
    publisher = shared.publisher()
    shared.hold(phase="sleeping")
    shared.vllm.dead = True
    assert publisher.once() is False
    assert (shared.said().state, *shared.answer()) == (
        "gone",
        "refused",
        "vLLM stopped being ready",
    )
    shared.vllm.dead = False
    # The publisher still answers `refused`, so the runner gives up.
    assert publisher.once() is False
    assert (shared.said().state, shared.answer()[0]) == ("awake", "refused")


@pytest.mark.parametrize("dies", [False, True])
def test_a_vllm_that_fails_to_sleep_refuses_and_one_that_dies_is_gone(shared, dies):
    def fail() -> None:
        shared.vllm.dead = dies
        raise RuntimeError("for the test's sake")

    publisher = shared.publisher()
    shared.vllm.on_sleep = fail
    shared.hold(phase="sleeping")
    assert publisher.once() is False
    outcome, why = shared.answer()
    assert outcome == ("gone" if dies else "refused")
    assert "for the test's sake" in why
    shared.vllm.dead = False


def test_a_hold_ends_the_publishers_pause_and_so_does_its_end(shared):
    publisher = shared.publisher()
    publisher.once()
    for change in (lambda: shared.hold(phase="sleeping"), shared.spool.hold.clear):
        change()
        begin = time.monotonic()
        publisher.wait(60)
        assert time.monotonic() - begin < 5
        publisher.once()
    begin = time.monotonic()
    publisher.wait(0.5)
    assert time.monotonic() - begin >= 0.5


def test_a_volume_that_refuses_to_remove_a_lost_hold_does_not_keep_vllm_asleep(shared, monkeypatch):
    def refuse() -> None:
        raise SpoolUnusable("read-only")

    publisher = shared.publisher()
    shared.hold()
    shared.vllm.asleep = True
    shared.kill_runner()
    monkeypatch.setattr(publisher._spool.hold, "clear", refuse)
    assert publisher.once() is True
    assert not shared.vllm.asleep


def test_the_place_of_vllm_is_what_ranks_need(stage):
    """The `VllmPlace` of a vLLM on this machine names this process's network. The `VllmPlace` of a
    vLLM on another machine has the host of TANDEM_INFERENCE_URL."""
    here = stage.publisher(weights="merged", transport="nccl", base_model=str(stage.model))
    [place] = here._spool.inference.places()
    assert same_network(place.network)
    far = Settings(inference_url="http://192.0.2.7:8000", weights="merged", transport="nccl")
    assert vllm_place(far).address == "192.0.2.7"
