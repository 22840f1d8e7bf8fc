"""What ranks tell about their memory: each phase's own peak, the attempt's, the floor of a step; and that telling it
changes nothing that is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.metrics.metric import PHASES
from tandem.model import device
from tandem.model.device import memory
from tandem.spool import Spool
from tandem.spool.schema import Beat, RLLoss
from tandem.trainer.rank import worker
from tandem.trainer.rank.heartbeat import Heartbeat
from tandem.training.phases import MemoryWatch, Phases
from tandem.training.steps import Training
from trainer_ranks import jobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def spool(tmp_path: Path, model: Path) -> Spool:
    spool = Spool.create(tmp_path / "spool")
    jobs.make_run(spool, model)
    return spool


def run_and_listen(spool: Spool, job_id: str) -> tuple[list[Beat], Beat]:
    """All beats of a job's only rank, and the last one, as it is on the volume."""
    beats: list[Beat] = []
    original = Heartbeat.write

    def now(self: Heartbeat, phase: str) -> None:
        original(self, phase)
        beats.append(spool.jobs.beats(job_id, 1)[0])

    job = jobs.claim(spool, job_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "write", now)
        assert worker.main(spool.root, job_id, 1) == 0, jobs.error_of(spool, job)
    last = spool.jobs.beats(job_id, 1)[0]
    jobs.finish(spool, job)
    return beats, last


def test_a_beat_tells_steps_device_and_memory(spool: Spool) -> None:
    loss = RLLoss(kl_coef=0.1, old_logprobs="trainer")
    beats, last = run_and_listen(spool, jobs.submit_rl(spool, loss=loss, epochs=2))
    total = len(jobs.steps_of(spool, "rl"))
    assert (last.step, last.steps, last.phase, last.uuid) == (total, total, "leave", "cpu")
    # Every phase is known to the catalogue, happened, and left its peak; only GPUs need a rehearsal.
    happened = set(PHASES) - {"offload", "rehearsal"}
    assert {beat.phase for beat in beats} - {"leave"} == happened == set(last.phases)
    assert last.memory.keys() == {"allocated", "reserved", "allocated_peak", "reserved_peak"}
    assert last.memory["allocated_peak"] >= max(held["peak"] for held in last.phases.values())
    peaks = [beat.memory["allocated_peak"] for beat in beats]
    assert peaks == sorted(peaks)
    assert all(beat.memory["allocated"] <= beat.memory["allocated_peak"] for beat in beats)
    assert last.step_floor is not None
    assert last.device_used_peak >= last.device_used > last.memory["allocated"] > 50 * 2**20
    assert all(beat.step_floor is None for beat in beats if beat.phase in ("data", "build"))


def test_telling_about_memory_changes_no_bit_of_what_is_computed(spool: Spool, model: Path, monkeypatch) -> None:
    jobs.make_run(spool, model, "silent")
    told = jobs.run_here(spool, jobs.submit_rl(spool, job_id="told", epochs=2))
    silent = jobs.submit_rl(spool, "silent", job_id="silent", epochs=2)
    monkeypatch.setattr(MemoryWatch, "begin_phase", lambda self: None)
    monkeypatch.setattr(MemoryWatch, "begin_step", lambda self: None)
    monkeypatch.setattr(MemoryWatch, "beat", lambda self: {})
    assert jobs.same_bytes(jobs.run_here(spool, silent), told)

    def numbers(job_id: str) -> list[dict[str, float]]:
        return [
            {name: value for name, value in step.items() if not name.startswith(("seconds_", "memory_", "tokens_per"))}
            for step in jobs.steps_of(spool, job_id)
        ]

    assert numbers("told") == numbers("silent")


def test_running_out_of_memory_is_an_error_of_its_own_and_the_last_beat_tells_it(spool: Spool, monkeypatch) -> None:
    original = Training._optimizer_step

    def second_runs_out(training, step, *rest):
        if step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(training, step, *rest)

    monkeypatch.setattr(Training, "_optimizer_step", second_runs_out)
    error = jobs.fail_here(spool, jobs.submit_sft(spool, epochs=4))
    assert (error.type, error.retriable) == ("oom", True)
    assert "Tried to allocate" in error.message
    beat = spool.jobs.beats("sft", 1)[0]
    assert (beat.phase, beat.step) == ("out of memory", 1)


class FakeAllocator:
    """torch's allocator, as far as `device` passes it on."""

    def __init__(self, monkeypatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(device, "uuid", lambda: "GPU-a")
        monkeypatch.setattr(memory, "stats", self.stats)
        monkeypatch.setattr(memory, "reset_peaks", self.reset)
        monkeypatch.setattr(memory, "allocated", lambda: self.now)
        monkeypatch.setattr(memory, "used", lambda: 2 * self.now)

    def allocate(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def stats(self) -> dict[str, int]:
        return {
            "allocated": self.now,
            "allocated_peak": self.peak,
            "reserved": self.now + 1,
            "host_pinned": 7,
            "ooms": 0,
        }

    def reset(self) -> None:
        self.peak = self.now


def test_each_phase_has_its_own_peak_and_the_attempt_the_largest(monkeypatch) -> None:
    allocator, watch = FakeAllocator(monkeypatch), MemoryWatch()
    watch.begin_phase()
    allocator.allocate(100)
    allocator.allocate(-70)
    build = {"allocated": 30, "reserved": 31, "device_used": 60, "host_pinned": 7, "peak": 100}
    assert watch.end_phase("build") == build
    allocator.allocate(200)  # between two phases: the attempt's, no phase's
    allocator.allocate(-200)
    watch.begin_phase()
    allocator.allocate(20)
    watch.begin_step()
    beat = watch.beat()
    assert (beat["memory"]["allocated"], beat["memory"]["allocated_peak"]) == (50, 230)
    assert (beat["phases"], beat["highest"]) == ({"build": build}, {})
    first = {"allocated": 50, "reserved": 51, "device_used": 100, "host_pinned": 7, "peak": 50}
    assert watch.end_phase("optimizer") == first
    beat = watch.beat()
    assert beat["phases"] == {"build": build, "optimizer": first}
    assert (beat["step_floor"], beat["uuid"]) == (50, "GPU-a")
    assert (beat["device_used"], beat["device_used_peak"]) == (100, 100)


def test_a_phase_that_comes_again_is_told_as_it_ended_last_and_at_its_highest(monkeypatch) -> None:
    allocator, watch = FakeAllocator(monkeypatch), MemoryWatch()
    for most, stays in ((30, 5), (90, 1), (60, 3)):
        watch.begin_phase()
        allocator.allocate(most)
        allocator.allocate(stays - most)
        watch.end_phase("step")
        allocator.allocate(-stays)
    report = watch.report()
    assert report.phases == {"step": {"allocated": 3, "reserved": 4, "device_used": 6, "host_pinned": 7, "peak": 60}}
    assert report.highest == {"step": {"allocated": 5, "reserved": 6, "device_used": 10, "host_pinned": 7, "peak": 90}}


def test_what_ends_before_the_device_has_started_has_no_memory(monkeypatch) -> None:
    allocator, watch = FakeAllocator(monkeypatch), MemoryWatch()
    with monkeypatch.context() as early:
        early.setattr(device, "started", lambda: False)
        early.delattr(device, "uuid")
        for name in ("stats", "reset_peaks", "allocated", "used"):
            early.delattr(memory, name)
        watch.begin_phase()
        assert watch.beat() == watch.end_phase("rendezvous") == {}
    watch.begin_phase()
    allocator.allocate(10)
    watch.end_phase("build")
    assert list(watch.report().phases) == ["build"]


def test_a_phase_that_fails_is_told_as_well(monkeypatch) -> None:
    allocator, watch = FakeAllocator(monkeypatch), MemoryWatch()
    monkeypatch.setattr(device, "synchronize", lambda: None)

    def fails() -> None:
        with Phases(lambda _: None, watch).phase("forward_backward"):
            allocator.allocate(40)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fails()
    assert watch.report().phases["forward_backward"]["peak"] == 40
