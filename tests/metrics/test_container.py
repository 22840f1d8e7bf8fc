"""The container: its volumes, its programs, and what is installed."""

import os
from pathlib import Path

import pytest

from metrics.metric_tools import Exported, opener
from spool.volume_tools import full_disk
from tandem.config import Settings
from tandem.metrics.container import (
    BuildCollector,
    SupervisorCollector,
    VolumesCollector,
    downloads,
    local_directories,
)
from tandem.metrics.exporter import make_collectors
from tandem.spool import Spool
from tandem.supervise.supervisord import Status


def test_a_missing_volume_is_a_failure_and_the_others_are_exported(
    volume: Spool, tmp_path: Path
) -> None:
    exported = Exported(
        VolumesCollector(opener(volume), {"tmp": tmp_path, "cache": tmp_path / "none"})
    )
    seen = exported.collect()
    assert seen.by("volume", "tandem_volume_free_bytes").keys() == {"tmp", "shared"}
    status = os.statvfs(tmp_path)
    assert seen.get("tandem_volume_total_bytes", volume="tmp") == status.f_blocks * status.f_frsize
    free = pytest.approx(status.f_bavail * status.f_frsize, abs=2**30)
    assert seen.get("tandem_volume_free_bytes", volume="tmp") == free
    assert seen.get("tandem_volume_write_probe_seconds", volume="shared") > 0
    volume.root.rename(tmp_path / "gone")
    seen = exported.collect()
    assert seen.get("tandem_collector_success", collector="volumes") == 0
    assert seen.by("volume", "tandem_volume_free_bytes").keys() == {"tmp"}
    (tmp_path / "gone").rename(volume.root)
    assert exported.works("volumes")


def test_the_volume_of_downloaded_models_has_its_own_series(tmp_path: Path, monkeypatch) -> None:
    """The cache of downloaded models differs from the private cache of kernels, even before the
    first download."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "private"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache" / "huggingface"))
    (tmp_path / "cache").mkdir()
    assert local_directories()["downloads"] == tmp_path / "cache"
    (tmp_path / "cache" / "huggingface").mkdir()
    assert downloads() == {"downloads": tmp_path / "cache" / "huggingface"}
    assert local_directories()["cache"] == tmp_path / "private"
    monkeypatch.delenv("HF_HOME")
    assert downloads() == {"downloads": tmp_path}


def test_a_full_volume_can_be_read_and_has_no_probe(volume: Spool, monkeypatch) -> None:
    monkeypatch.setattr("tandem.spool.fs.write_all", full_disk)
    exported = Exported(*make_collectors(Settings(root=volume.root, device="cpu"), ("trainer",)))
    for _ in range(2):  # the second collection is between two probes
        seen = exported.collect()
        assert seen.get("tandem_policy_version", side="trainer", run="r") == 0
        assert seen.get("tandem_collector_success", collector="volumes") == 0
        assert seen.get("tandem_volume_write_probe_seconds", volume="shared") is None
        assert seen.get("tandem_volume_free_bytes", volume="shared") is not None
    assert not [path for path in volume.root.iterdir() if path.name.startswith(".tmp")]


def test_programs_their_states_and_restarts(tmp_path: Path, monkeypatch) -> None:
    answers: list[dict[str, Status]] = [
        {},
        {"vllm": Status("RUNNING", 7, 1.7e9), "runner": Status("STARTING", 0, 0)},
        {"vllm": Status("BACKOFF", 0, 1.7e9), "runner": Status("RUNNING", 7, 1.7e9)},
        {"vllm": Status("RUNNING", 8, 1.8e9), "runner": Status("RUNNING", 7, 1.7e9)},
        {},
    ]
    monkeypatch.setattr("tandem.metrics.container.statuses", lambda _: answers.pop(0))
    exported = Exported(SupervisorCollector(Settings(root=tmp_path)))
    assert exported.works("supervisor")  # without a supervisord
    seen = exported.collect()
    assert seen.by("program", "tandem_supervisor_process_up") == {"vllm": 1, "runner": 0}
    assert seen.get("tandem_supervisor_process_state", program="runner", state="starting") == 1
    assert seen.get("tandem_supervisor_process_state", program="runner", state="fatal") == 0
    assert seen.by("program", "tandem_supervisor_process_start_time_seconds") == {"vllm": 1.7e9}
    for restarts in (0, 1):
        counts = exported.collect().by("program", "tandem_supervisor_process_restarts_total")
        assert counts == {"vllm": restarts, "runner": 0}
    # supervisord has answered before, so a missing answer is a failure
    assert not exported.works("supervisor")


def test_the_build_says_what_is_installed(monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_REVISION", "abc123")
    (info,) = Exported(BuildCollector()).collect().all("tandem_build_info")
    assert info["revision"] == "abc123"
    assert info["torch"][:2] == "2."
    assert info["megatron"]
