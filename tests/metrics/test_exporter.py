"""The exporter as a process: it needs nothing to start, answers without waiting, and stops on SIGTERM."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from free_ports import free_ports
from metrics.metric_tools import Scraped, fetch
from tandem.config import Settings
from tandem.metrics.exporter import MetricsServer, exported_sides, make_collectors
from tandem.spool import Spool
from tandem.system import ports
from waiting import answers, until

COMMAND = [sys.executable, "-m", "tandem.metrics.exporter"]
# What Prometheus 3 accepts.
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@contextmanager
def exporter(root: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(process, URL), once it answers."""
    [port] = free_ports(1)
    variables = os.environ | {"TANDEM_ROOT": str(root), "TANDEM_METRICS_PORT": str(port)} | environment
    process = subprocess.Popen(COMMAND, env=variables)
    url = f"http://127.0.0.1:{port}"
    try:
        until("the exporter answers", lambda: answers(f"{url}/health"))
        yield process, url
    finally:
        process.kill()
        process.wait()


def test_it_starts_without_the_volume_and_stops_on_sigterm(tmp_path: Path) -> None:
    root, multiproc = tmp_path / "spool", tmp_path / "multiproc"
    multiproc.mkdir()
    with exporter(root, TANDEM_DEVICE="cpu", PROMETHEUS_MULTIPROC_DIR=str(multiproc)) as (process, url):

        def success(collector: str) -> float | None:
            return Scraped(fetch(f"{url}/metrics")[2]).get("tandem_collector_success", collector=collector)

        def tried() -> set[str]:
            seen = Scraped(fetch(f"{url}/metrics")[2])
            return {labels["collector"] for labels in seen.all("tandem_collector_duration_seconds")}

        without_spool, with_spool = {"nvml", "supervisor", "build"}, {"ranks", "jobs", "policy", "publish",
                                                                     "checkpoints", "volumes"}  # fmt: skip
        until("every collector has tried", lambda: tried() == without_spool | with_spool)
        assert {name for name in tried() if success(name) == 0} == with_spool
        status, content_type, text = fetch(f"{url}/metrics", PROMETHEUS_3)
        assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
        seen = Scraped(text)
        assert seen.get("tandem_volume_free_bytes", volume="shm")
        assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
        assert seen.get("process_resident_memory_bytes") < 120 * 2**20
        assert not [name for name in seen.names if name.endswith("_created")]
        Spool.create(root)
        until("it has found the spool", lambda: success("jobs") == 1)
        assert "/metrics" in fetch(f"{url}/")[2]
        assert fetch(f"{url}/nothing")[0] == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not list(multiproc.iterdir())


def test_it_takes_the_port_that_tandem_up_holds_for_it() -> None:
    with ports.reserve() as held, MetricsServer("127.0.0.1", held.port, None, {"what": "a test"}) as server:
        server.serve_in_background()
        assert "a test" in fetch(f"http://127.0.0.1:{held.port}/")[2]
        server.shutdown()


@pytest.mark.parametrize(("port", "status"), [("taken", 1), ("x", 2)])
def test_a_taken_and_a_wrong_port_are_named(tmp_path: Path, port: str, status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port.replace("taken", str(server.getsockname()[1]))
        variables = os.environ | {"TANDEM_ROOT": str(tmp_path), "TANDEM_METRICS_PORT": port}
        done = subprocess.run(COMMAND, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert "TANDEM_METRICS_PORT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("role", "without", "devices"),
    [
        ("trainer", {"publish"}, ["0"]),
        ("inference", {"ranks", "jobs", "checkpoints"}, ["GPU-b"]),
        ("all", set(), ()),
        ("", set(), ()),
    ],
)
def test_the_role_decides_what_is_collected_and_of_which_devices(role, without, devices, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TANDEM_ROLE", role)
    settings = Settings(root=tmp_path, trainer_devices=["0"], inference_devices=["GPU-b"])
    collectors: dict[str, Any] = {made.name: made for made in make_collectors(settings, exported_sides())}
    merged = make_collectors(settings.model_copy(update={"weights": "merged"}), exported_sides())
    assert ("merged" in {made.name for made in merged}) == (role != "trainer")
    everything = {"build", "nvml", "ranks", "jobs", "policy", "publish", "checkpoints", "supervisor", "volumes"}
    assert collectors.keys() == everything - without
    assert list(collectors["nvml"]._selected) == list(devices)
