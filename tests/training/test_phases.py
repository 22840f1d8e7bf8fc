"""Each phase has its own peak of memory, and the attempt has the largest peak. Nothing is measured
before the device starts."""

import pytest
import torch

from tandem.model import device
from tandem.model.device import memory
from tandem.training.phases import MemoryWatch, Phases


class Allocator:
    """Stands for torch's allocator on a device that has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(device, "started", lambda: True)
        monkeypatch.setattr(device, "uuid", lambda: "GPU-a")
        monkeypatch.setattr(memory, "stats", self.stats)
        monkeypatch.setattr(memory, "reset_peaks", self.reset)
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
        }

    def reset(self) -> None:
        self.peak = self.now


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_each_phase_has_its_own_peak_and_the_attempt_the_largest(allocator: Allocator) -> None:
    watch = MemoryWatch()
    watch.begin_phase()
    allocator.allocate(100)
    allocator.allocate(-70)
    build = {"allocated": 30, "reserved": 31, "device_used": 60, "host_pinned": 7, "peak": 100}
    assert watch.end_phase("build") == build
    allocator.allocate(200)  # An allocation between two phases counts in the attempt's peak only.
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


def test_a_phase_that_comes_again_is_reported_as_it_ended_last_and_at_its_highest(
    allocator: Allocator,
) -> None:
    watch = MemoryWatch()
    for most, stays in ((30, 5), (90, 1), (60, 3)):
        watch.begin_phase()
        allocator.allocate(most)
        allocator.allocate(stays - most)
        watch.end_phase("step")
        allocator.allocate(-stays)
    report = watch.report()
    assert report.phases == {
        "step": {"allocated": 3, "reserved": 4, "device_used": 6, "host_pinned": 7, "peak": 60}
    }
    assert report.highest == {
        "step": {"allocated": 5, "reserved": 6, "device_used": 10, "host_pinned": 7, "peak": 90}
    }


def test_a_phase_that_ends_before_the_device_has_started_has_no_memory(
    allocator: Allocator, monkeypatch
) -> None:
    watch = MemoryWatch()
    with monkeypatch.context() as early:
        early.setattr(device, "started", lambda: False)
        for module, name in (
            (device, "uuid"),
            (memory, "stats"),
            (memory, "reset_peaks"),
            (memory, "used"),
        ):
            early.delattr(module, name)
        watch.begin_phase()
        assert watch.beat() == watch.end_phase("rendezvous") == {}
    watch.begin_phase()
    allocator.allocate(10)
    watch.end_phase("build")
    assert list(watch.report().phases) == ["build"]


def test_a_rank_that_stays_counts_from_0_in_each_job(allocator: Allocator, monkeypatch) -> None:
    """Each job's counters begin at 0, because the exporter adds up the ranks' counters over
    jobs."""
    counts = {"ooms": 0, "alloc_retries": 2}
    monkeypatch.setattr(memory, "stats", lambda: allocator.stats() | counts)
    # The allocator still counts the first job's failure when the second job begins.
    for failures in (1, 3):
        watch = MemoryWatch()
        counts["ooms"] += failures
        assert {name: watch.beat()["memory"][name] for name in counts} == {
            "ooms": failures,
            "alloc_retries": 0,
        }


def test_a_phase_that_fails_is_reported_as_well(allocator: Allocator, monkeypatch) -> None:
    watch = MemoryWatch()
    monkeypatch.setattr(device, "synchronize", lambda: None)

    def fails() -> None:
        with Phases(lambda _: None, watch).phase("forward_backward"):
            allocator.allocate(40)
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fails()
    assert watch.report().phases["forward_backward"]["peak"] == 40
