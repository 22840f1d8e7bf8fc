"""The publisher on GPUs that a trainer uses too: hands off while a hold is live, and the second waker when none is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fake_vllm
from fake_vllm import FakeVllm
from published_runs import make_run
from runner import fake_gpu
from tandem.config import Settings
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.store import AdapterStore
from tandem.spool import Spool
from tandem.vllm_client.admin import AdminClient, InferenceRefused
from tandem.vllm_client.waking import SharedTurns

MIB = 2**20
# A runner that holds the spool's lock, writes a hold, and says so; it ends with its standard input.
HOLDER = """
import sys, time
from pathlib import Path
from tandem.spool import Spool
from tandem.spool.schema import Hold
spool, floor, lease = Spool(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with spool.runner_lock("holder"):
    now = time.time()
    with spool.hold.lock():
        print("locked", flush=True)
        spool.hold.put(Hold(runner="holder", job="j", attempt=1, phase="training", since=now, beat=now, lease=lease,
                            deadline=now + float(sys.argv[4]), floor={"GPU-aaaa1111": floor} if floor else {}))
    print("held", flush=True)
    sys.stdin.read()
"""


class Scene:
    def __init__(self, directory: Path, vllm: FakeVllm) -> None:
        self.gpu, self.programs = fake_gpu.install(directory)
        self.spool, self.vllm = Spool.create(directory / "spool"), vllm
        self.holders: list[subprocess.Popen[str]] = []
        self.directory = directory

    def publisher(self) -> Publisher:
        admin = AdminClient(self.vllm.url, api_key=fake_vllm.API_KEY, admin_token=fake_vllm.ADMIN_TOKEN, timeout=5.0)
        settings = Settings(root=self.spool.root, device="cuda", gpu_mode="shared")
        turns = SharedTurns(settings, self.spool, admin)
        return Publisher(self.spool, admin, AdapterStore(self.directory / "store"), turns=turns)

    def hold(
        self, *, floor: int = 0, lease: float = 60, deadline: float = 600, wait: bool = True
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(self.spool.root), str(floor), str(lease), str(deadline)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.holders.append(holder)
        if wait:
            assert holder.stdout is not None
            assert [holder.stdout.readline(), holder.stdout.readline()] == ["locked\n", "held\n"]
        return holder

    def kill(self) -> None:
        self.holders[-1].kill()
        self.holders[-1].wait()

    def in_use(self, mib: int) -> None:
        (self.gpu / f"rank.{os.getpid()}").write_text(f"{mib}\n")


@pytest.fixture
def scene(tmp_path, monkeypatch):
    import tiny_model

    model = tiny_model.write_tiny_qwen3(tmp_path / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32)
    vllm = FakeVllm()
    vllm.start()
    made = Scene(tmp_path, vllm)
    monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    make_run(made.spool, "run", model)
    yield made
    vllm.stop()
    for holder in made.holders:
        holder.kill()
        holder.communicate()
    assert not vllm.dead


def test_under_a_live_hold_nothing_is_loaded_and_nobody_is_woken(scene):
    publisher = scene.publisher()
    scene.hold()
    scene.vllm.asleep = True
    assert publisher.once() is False
    assert scene.vllm.asleep
    assert scene.vllm.loads() == []
    assert not [path for path, _ in scene.vllm.calls if path not in ("/health", "/is_sleeping")]
    scene.kill()
    assert publisher.once() is True
    assert not scene.vllm.asleep
    assert scene.vllm.loads() == ["run@0"]
    assert scene.spool.hold.get() is None
    assert scene.spool.served.get("run") is not None


def test_what_is_loaded_before_a_sleep_is_neither_loaded_nor_verified_again(scene):
    publisher = scene.publisher()
    assert publisher.once()
    scene.hold()
    scene.vllm.asleep = True
    assert not publisher.once()
    scene.kill()
    assert publisher.once()
    assert scene.vllm.loads() == ["run@0"]
    assert sum(path == "/v1/completions" for path, _ in scene.vllm.calls) > 0
    calls = len(scene.vllm.calls)
    assert publisher.once()
    assert not [path for path, _ in scene.vllm.calls[calls:] if path == "/v1/completions"]


def test_the_memory_of_a_lost_trainer_is_waited_for(scene):
    publisher = scene.publisher()
    scene.hold(floor=900 * MIB)
    scene.vllm.asleep = True
    scene.in_use(30_000)
    scene.kill()
    assert not publisher.once()
    assert scene.vllm.asleep
    scene.in_use(900 + 200)
    assert publisher.once()
    assert not scene.vllm.asleep


def test_what_is_in_use_beside_an_awake_vllm_is_its_own(scene):
    """A runner was killed after vLLM had woken and before the hold went; or both were, and vLLM started again first."""
    publisher = scene.publisher()
    scene.hold(floor=900 * MIB)
    scene.in_use(70_000)
    scene.kill()
    assert publisher.once()
    assert scene.spool.hold.get() is None
    assert scene.vllm.loads() == ["run@0"]


def test_after_the_deadline_a_lost_trainers_memory_is_not_waited_for(scene):
    scene.hold(floor=900 * MIB, deadline=-1)
    scene.vllm.asleep = True
    scene.in_use(30_000)
    scene.kill()
    assert scene.publisher().once()
    assert not scene.vllm.asleep


def test_a_runner_that_hangs_is_lost_when_its_lease_is_over(scene):
    publisher = scene.publisher()
    scene.hold(floor=900 * MIB, lease=1)
    scene.vllm.asleep = True
    assert not publisher.once()
    time.sleep(1.1)
    assert publisher.once()
    assert not scene.vllm.asleep


def test_a_hold_that_an_earlier_runner_wrote_is_not_the_present_ones(scene):
    scene.hold()
    before = scene.spool.hold.get()
    scene.kill()
    scene.hold()
    assert scene.spool.hold.live() is not None
    scene.spool.hold.put(before)
    assert scene.spool.hold.live() is None


def test_vllm_asleep_without_a_hold_is_woken_and_a_refusal_is_asked_again(scene):
    def refuse() -> None:
        raise MemoryError

    publisher = scene.publisher()
    scene.vllm.asleep, scene.vllm.on_wake = True, refuse
    for _ in range(2):
        with pytest.raises(InferenceRefused, match="MemoryError"):
            publisher.once()
    assert scene.vllm.loads() == []
    scene.vllm.on_wake = lambda: None
    assert publisher.once()


def test_a_hold_waits_until_the_publisher_is_done(scene):
    """Inside a turn of the publisher, when vLLM is loading an adapter, nobody can begin to let vLLM sleep."""
    turns = scene.publisher()._turns
    with turns.turn() as why_not:
        assert why_not == ""
        holder = scene.hold(wait=False)
        time.sleep(2)
        assert scene.spool.hold.get() is None
        assert holder.poll() is None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert holder.stdout.readline() == "held\n"
    with turns.turn() as why_not:
        assert why_not == "the trainer has the GPUs (training, job j)"
