"""The publisher on GPUs that a trainer uses too: under a live hold it does nothing, and without one
it wakes vLLM."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference.stage import Stage
from runner import fake_gpu
from tandem.inference.publisher.publisher import Publisher
from tandem.vllm_client.client import InferenceRefused

MIB = 2**20
# A runner that takes the spool's lock and writes a hold. It ends when its standard input does.
HOLDER = """
import os, sys, time
from tandem.spool import Spool
from tandem.spool.schema import Hold
spool, floor = Spool(sys.argv[1]), int(sys.argv[2])
name = f"holder:{os.getpid()}"
with spool.runner_lock(name):
    print("starts", flush=True)
    with spool.hold.lock():
        now = time.time()
        spool.hold.put(Hold(
            runner=name, job="j", attempt=1, phase="training", since=now, beat=now, lease=60,
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

    def start_runner(self, *, floor: int = 0, deadline: float = 600) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(self.spool.root), str(floor), str(deadline)]
        runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.runners.append(runner)
        assert runner.stdout is not None
        assert runner.stdout.readline() == "starts\n"
        return runner

    def hold(self, **values: float) -> None:
        assert self.start_runner(**values).stdout.readline() == "holds\n"

    def kill_runner(self) -> None:
        self.runners[-1].kill()
        self.runners[-1].wait()

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
        (True, 900 + 200, 600, True),  # the memory is back at the floor
        (True, 30_000, -1, True),  # the deadline is over
        (False, 70_000, 600, True),  # vLLM is awake, so the memory is its own
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
        now = time.time()  # a beat of the future is by a clock that was wrong, so it says nothing
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


def test_no_hold_is_written_while_the_publisher_works(shared):
    publisher = shared.publisher()
    with publisher._vllm_awake() as why_not:
        assert why_not == ""
        runner = shared.start_runner()
        time.sleep(0.5)
        assert shared.spool.hold.get() is None
        assert runner.poll() is None
    assert runner.stdout.readline() == "holds\n"
    with publisher._vllm_awake() as why_not:
        assert why_not == "the trainer has the GPUs (training, job j)"
