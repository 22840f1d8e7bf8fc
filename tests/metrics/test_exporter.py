"""The exporter as a process: it starts without anything, waits for nobody, and stops when it is told to."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from metrics.metric_tools import Scraped, fetch, rig, until
from spool.spool_tools import spool_with_run
from tandem.config import Settings
from tandem.metrics import collector
from tandem.metrics.catalogue import BY_NAME
from tandem.metrics.collector import Collector, PartlyFailed
from tandem.metrics.exporter import SpoolOpener, make_collectors, roles
from tandem.metrics.host import BuildCollector, SupervisorCollector, VolumesCollector
from tandem.metrics.samples import Counts, Distribution
from tandem.metrics.server import MetricsServer
from tandem.spool import Spool
from tandem.supervise.supervisord import Status
from tandem.system import ports


@contextmanager
def exporter(root: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, URL), once it answers."""
    with ports.reserve() as held:
        port = held.port
    variables = os.environ | {"TANDEM_ROOT": str(root), "TANDEM_METRICS_PORT": str(port)} | environment
    process = subprocess.Popen([sys.executable, "-m", "tandem.metrics.exporter"], env=variables)
    url = f"http://127.0.0.1:{port}"
    try:
        until("the exporter answers", lambda: _answers(url), 20)
        yield process, url
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return fetch(f"{url}/health")[0] == 200
    except OSError:
        return False


def test_it_waits_for_the_volume_and_stops_at_once(tmp_path: Path) -> None:
    root = tmp_path / "spool"
    with exporter(root, TANDEM_DEVICE="cpu") as (process, url):

        def scrape() -> Scraped:
            return Scraped(fetch(f"{url}/metrics")[2])

        until("collectors have tried", lambda: scrape().get("tandem_collector_duration_seconds", collector="jobs"))
        seen = scrape()
        for name in ("ranks", "jobs", "policy", "publish", "checkpoints", "volumes"):
            assert seen.get("tandem_collector_success", collector=name) == 0, name
        for name in ("nvml", "supervisor", "build"):
            assert seen.get("tandem_collector_success", collector=name) == 1, name
        assert seen.get("tandem_volume_free_bytes", volume="shm")
        assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
        assert seen.get("process_resident_memory_bytes") < 120 * 2**20
        Spool.create(root)
        until("it found the spool", lambda: scrape().get("tandem_collector_success", collector="jobs") == 1)
        assert scrape().get("tandem_train_active") == 0
        assert fetch(f"{url}/")[0] == 200
        assert "/metrics" in fetch(f"{url}/")[2]
        assert fetch(f"{url}/nothing")[0] == 404
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 2


def test_prometheus_multiproc_directory_changes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "multiproc"
    directory.mkdir()
    root = Spool.create(tmp_path / "spool").root
    with exporter(root, TANDEM_DEVICE="cpu", PROMETHEUS_MULTIPROC_DIR=str(directory)) as (_, url):

        def info() -> list[dict[str, str]]:
            return Scraped(fetch(f"{url}/metrics")[2]).all("tandem_build_info")

        until("the version is told", info)
        assert not [name for name in fetch(f"{url}/metrics")[2].split() if "_created" in name]
    assert not list(directory.iterdir())


def test_it_takes_the_port_that_tandem_up_holds_for_it(tmp_path: Path) -> None:
    with ports.reserve() as held, MetricsServer("127.0.0.1", held.port, {}, {"what": "a test"}) as server:
        server.serve_in_background()
        assert "a test" in fetch(f"http://127.0.0.1:{held.port}/")[2]
        server.shutdown()


def test_a_taken_port_and_wrong_settings_are_said(tmp_path: Path) -> None:
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tandem.metrics.exporter"]
        variables = os.environ | {"TANDEM_ROOT": str(tmp_path)} | environment
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = run(TANDEM_METRICS_PORT=str(server.getsockname()[1]))
    assert taken.returncode == 1
    assert "TANDEM_METRICS_PORT" in taken.stderr
    for variable, value in (
        ("TANDEM_METRICS_BACKEND", "real"),
        ("TANDEM_METRICS_PORT", "x"),
    ):
        wrong = run(**{variable: value})
        assert wrong.returncode == 2, wrong.stderr
        assert variable in wrong.stderr
        assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("role", "without"),
    [("trainer", {"publish"}), ("inference", {"ranks", "jobs", "checkpoints"}), ("all", set()), ("", set())],
)
def test_the_role_decides_what_is_collected(role, without, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TANDEM_ROLE", role)
    names = {made.name for made in make_collectors(Settings(root=tmp_path), roles())}
    everything = {"build", "nvml", "ranks", "jobs", "policy", "publish", "checkpoints", "supervisor", "volumes"}
    assert names == everything - without


def test_one_roles_container_tells_about_its_own_devices_only(tmp_path, monkeypatch) -> None:
    settings = Settings(root=tmp_path, trainer_devices=["0"], inference_devices=["GPU-b"])
    found = {}
    monkeypatch.setattr("tandem.metrics.exporter.NvmlCollector", lambda device, selected: found.update(now=selected))
    for sides, selected in ((("trainer",), ["0"]), (("inference",), ["GPU-b"]), (("trainer", "inference"), ())):
        make_collectors(settings, sides)
        assert found["now"] == selected


def test_a_full_volume_can_still_be_read(tmp_path, monkeypatch) -> None:
    settings = Settings(root=spool_with_run(tmp_path / "spool").root)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.spool.fs.write_all", full)
    assert SpoolOpener(settings)().runs.names() == ["r"]


def test_a_value_on_a_buckets_bound_is_within_it() -> None:
    counts = Counts([BY_NAME["tandem_job_release_seconds"]])
    for value in (0.1, 0.10001, 20, 21):
        counts.observe("tandem_job_release_seconds", value)
    (seen,) = counts.series()["tandem_job_release_seconds"].values()
    assert seen == Distribution((1, 1, 0, 0, 0, 0, 0, 0, 1, 1), pytest.approx(41.20001))


# ---------------------------------------------------------------- collectors that fail or hang


class Naughty(Collector):
    """Stands in for a device driver."""

    name = "nvml"
    interval = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.value, self.error = 1.0, None
        self.hang = threading.Event()
        self.hang.set()

    def collect(self, gauges) -> None:
        self.hang.wait()
        gauges.set("tandem_gpu_memory_used_bytes", self.value, uuid="GPU-a")
        if self.error is not None:
            raise self.error


def test_a_hung_collector_holds_up_neither_scrape_nor_others(monkeypatch, tmp_path: Path) -> None:
    naughty = Naughty()
    spool = spool_with_run(tmp_path / "spool")
    places = {"tmp": tmp_path}
    with rig(naughty, VolumesCollector(lambda: spool, places)) as made:
        made.loops[1].collector.interval = 0.05
        for loop in made.loops:
            loop.start()
        until("both have collected", lambda: made.scrape().get("tandem_gpu_memory_used_bytes", uuid="GPU-a"))
        naughty.hang.clear()
        naughty.value = 2.0
        time.sleep(0.2)
        begin = time.monotonic()
        seen = made.scrape()
        assert time.monotonic() - begin < 1
        assert seen.get("tandem_gpu_memory_used_bytes", uuid="GPU-a") == 1  # what was true a moment ago
        assert seen.get("tandem_collector_success", collector="nvml") == 1
        stuck = seen.get("tandem_collector_last_success_timestamp_seconds", collector="nvml")
        assert seen.get("tandem_volume_write_probe_seconds", volume="shared") is not None
        now = collector.time.monotonic
        monkeypatch.setattr(collector.time, "monotonic", lambda: now() + 61)
        seen = until("the other one went on", lambda: _fresh(made.scrape()))
        assert seen.get("tandem_collector_success", collector="nvml") == 0
        assert seen.get("tandem_gpu_memory_used_bytes", uuid="GPU-a") is None  # a minute later it may be a lie
        assert seen.get("tandem_collector_last_success_timestamp_seconds", collector="nvml") == stuck
        monkeypatch.undo()
        naughty.hang.set()
        until("it goes on", lambda: made.scrape().get("tandem_gpu_memory_used_bytes", uuid="GPU-a") == 2)
        for loop in made.loops:
            loop.stop()


def _fresh(seen: Scraped) -> Scraped | None:
    return seen if seen.get("tandem_volume_free_bytes", volume="tmp") is not None else None


def test_a_failing_collector_shows_and_what_it_said_stays_for_a_minute(caplog) -> None:
    caplog.set_level("INFO")
    naughty = Naughty()
    with rig(naughty) as made:
        made.collect()
        naughty.error, naughty.value = RuntimeError("driver says no"), 3.0
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="nvml") == 0
        assert seen.get("tandem_gpu_memory_used_bytes", uuid="GPU-a") == 1
        naughty.error = PartlyFailed("one device is lost")
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="nvml") == 0
        assert seen.get("tandem_gpu_memory_used_bytes", uuid="GPU-a") == 3
        naughty.error = None
        assert made.collect().get("tandem_collector_success", collector="nvml") == 1
    said = [record for record in caplog.records if record.name == "exporter"]
    assert len(said) == 2  # that it can't, and that it can again


# ---------------------------------------------------------------- the container


def test_a_volume_that_is_gone_or_full_shows_and_the_others_are_told(tmp_path: Path, monkeypatch) -> None:
    spool = spool_with_run(tmp_path / "spool")

    def opened() -> Spool:
        return Spool(spool.root, writable=False)

    with rig(VolumesCollector(opened, {"tmp": tmp_path, "cache": tmp_path / "none"})) as made:
        seen = made.collect()
        assert {labels["volume"] for labels in seen.all("tandem_volume_free_bytes")} == {"tmp", "shared"}
        status = os.statvfs(tmp_path)
        assert seen.get("tandem_volume_total_bytes", volume="tmp") == status.f_blocks * status.f_frsize
        assert seen.get("tandem_volume_free_bytes", volume="tmp") == pytest.approx(
            status.f_bavail * status.f_frsize, abs=2**30
        )
        assert 0 < seen.get("tandem_volume_write_probe_seconds", volume="shared") < 5
        spool.root.rename(tmp_path / "gone")
        seen = made.collect()
        assert seen.get("tandem_collector_success", collector="volumes") == 0
        assert {labels["volume"] for labels in seen.all("tandem_volume_free_bytes")} == {"tmp"}
        (tmp_path / "gone").rename(spool.root)
        assert made.collect().get("tandem_collector_success", collector="volumes") == 1


def test_a_volume_that_can_not_be_written_has_no_probe(tmp_path: Path, monkeypatch) -> None:
    spool = spool_with_run(tmp_path / "spool")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.spool.fs.write_all", full)
    with rig(VolumesCollector(lambda: Spool(spool.root, writable=False), {})) as made:
        for _ in range(2):  # also between two probes
            seen = made.collect()
            assert seen.get("tandem_collector_success", collector="volumes") == 0
            assert seen.get("tandem_volume_write_probe_seconds", volume="shared") is None
            assert seen.get("tandem_volume_free_bytes", volume="shared") is not None
    assert not [path for path in spool.root.iterdir() if path.name.startswith(".tmp")]


def test_programs_their_states_and_restarts(tmp_path: Path) -> None:
    ours = os.getpid()
    answers: list[dict[str, Status]] = [
        {},
        {"vllm": Status("vllm", "RUNNING", ours), "runner": Status("runner", "STARTING", 0)},
        {"vllm": Status("vllm", "BACKOFF", 0), "runner": Status("runner", "RUNNING", ours)},
        {"vllm": Status("vllm", "RUNNING", 1), "runner": Status("runner", "RUNNING", ours)},
        {},
    ]
    with rig(SupervisorCollector(Settings(root=tmp_path), lambda _: answers.pop(0))) as made:
        seen = made.collect()  # nobody supervises here
        assert seen.get("tandem_collector_success", collector="supervisor") == 1
        seen = made.collect()
        assert seen.get("tandem_supervisor_process_up", program="vllm") == 1
        assert seen.get("tandem_supervisor_process_up", program="runner") == 0
        assert seen.get("tandem_supervisor_process_state", program="runner", state="starting") == 1
        assert seen.get("tandem_supervisor_process_state", program="runner", state="fatal") == 0
        started = seen.get("tandem_supervisor_process_start_time_seconds", program="vllm")
        assert seen.get("process_start_time_seconds") == pytest.approx(started, abs=2)
        assert seen.get("tandem_supervisor_process_restarts_total", program="vllm") == 0
        assert made.collect().get("tandem_supervisor_process_restarts_total", program="vllm") == 0
        seen = made.collect()
        assert seen.get("tandem_supervisor_process_restarts_total", program="vllm") == 1
        assert seen.get("tandem_supervisor_process_restarts_total", program="runner") == 0
        assert made.collect().get("tandem_collector_success", collector="supervisor") == 0  # it was there, and is gone


def test_the_build_says_what_is_installed(monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_REVISION", "abc123")
    with rig(BuildCollector()) as made:
        (info,) = made.collect().all("tandem_build_info")
    import torch

    assert info["revision"] == "abc123"
    assert info["torch"] == torch.__version__.split("+")[0]
    assert info["megatron"]
