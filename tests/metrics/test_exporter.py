"""The exporter as a process: it needs nothing to start, answers without waiting, and stops on
SIGTERM."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from metrics.metric_tools import Scraped
from tandem.config import Settings
from tandem.metrics.collector import Page
from tandem.metrics.exporter import MetricsServer, exported_sides, make_collectors
from tandem.spool import Spool
from tandem.supervise.supervisord import inference_ports
from tandem.system import ports
from waiting import until

COMMAND = [sys.executable, "-m", "tandem.metrics.exporter"]
# The content types that Prometheus 3 accepts.
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def test_it_starts_without_the_volume_on_a_port_that_tandem_up_holds_and_stops_on_sigterm(
    tmp_path: Path,
) -> None:
    root, multiproc = tmp_path / "spool", tmp_path / "multiproc"
    multiproc.mkdir()
    with ports.reserve() as held:
        variables = os.environ | {
            "TANDEM_ROOT": str(root),
            "TANDEM_METRICS_PORT": str(held.port),
            "TANDEM_DEVICE": "cpu",
            "PROMETHEUS_MULTIPROC_DIR": str(multiproc),
        }
        url = f"http://127.0.0.1:{held.port}"

        def succeeds() -> dict[str, float] | None:
            """The success of each collector that has tried; None before the exporter answers."""
            with suppress(httpx.TransportError):
                seen = Scraped(httpx.get(f"{url}/metrics").text)
                tried = seen.by("collector", "tandem_collector_duration_seconds")
                return {
                    name: value
                    for name, value in seen.by("collector", "tandem_collector_success").items()
                    if name in tried
                }
            return None

        with subprocess.Popen(COMMAND, env=variables) as process:
            try:
                tried = dict.fromkeys(("nvml", "supervisor", "build"), 1)
                tried |= dict.fromkeys(
                    ("ranks", "jobs", "policy", "publish", "checkpoints", "volumes"), 0
                )
                until("every collector has tried", lambda: succeeds() == tried)
                answer = httpx.get(f"{url}/metrics", headers={"Accept": PROMETHEUS_3})
                assert (answer.status_code, answer.headers["content-type"]) == (
                    200,
                    CONTENT_TYPE_PLAIN_0_0_4,
                )
                seen = Scraped(answer.text)
                assert seen.get("tandem_volume_free_bytes", volume="shm")
                assert seen.get("tandem_jobs_finished_total", outcome="failed") == 0
                assert seen.get("process_resident_memory_bytes") < 120 * 2**20
                assert not [name for name in seen.names if name.endswith("_created")]
                Spool.create(root)
                until("it has found the spool", lambda: succeeds()["jobs"] == 1)
                assert httpx.get(f"{url}/").status_code == 404
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()
    assert not list(multiproc.iterdir())


@pytest.mark.parametrize(("port", "status"), [("taken", 1), ("x", 2)])
def test_a_taken_and_a_wrong_port_are_named(tmp_path: Path, port: str, status: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = port.replace("taken", str(server.getsockname()[1]))
        variables = os.environ | {"TANDEM_ROOT": str(tmp_path), "TANDEM_METRICS_PORT": port}
        done = subprocess.run(
            COMMAND, env=variables, capture_output=True, text=True, timeout=60, check=False
        )
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
def test_the_role_decides_what_is_collected_and_of_which_devices(
    role, without, devices, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("TANDEM_ROLE", role)
    settings = Settings(root=tmp_path, trainer_devices=["0"], inference_devices=["GPU-b"])
    collectors: dict[str, Any] = {
        made.name: made for made in make_collectors(settings, exported_sides())
    }
    merged = make_collectors(settings.model_copy(update={"weights": "merged"}), exported_sides())
    assert ("merged" in {made.name for made in merged}) == (role != "trainer")
    everything = {
        "build",
        "nvml",
        "ranks",
        "jobs",
        "policy",
        "publish",
        "checkpoints",
        "supervisor",
        "volumes",
    }
    assert collectors.keys() == everything - without
    assert list(collectors["nvml"]._selected) == list(devices)


def test_prometheus_is_told_where_each_vllm_is() -> None:
    """The targets have the host name by which Prometheus has reached the exporter. The target of a
    single vLLM has no label."""
    several = inference_ports(Settings(inference_port=8000, inference_replicas=2))
    one = inference_ports(Settings(inference_port=8000))
    of_pod = inference_ports(Settings(inference_port=8000, inference_replicas=2, replica="pod-1"))
    expected: list[tuple[dict[str, int], list[tuple[str, dict[str, str]]]]] = [
        (several, [("inference:8001", {"replica": "0"}), ("inference:8002", {"replica": "1"})]),
        (one, [("inference:8000", {})]),
        (of_pod, [("inference:8000", {"replica": "pod-1"})]),
    ]
    for targets, answer in expected:
        server = MetricsServer("127.0.0.1", 0, Page([]), targets)
        server.serve_in_background()
        url = f"http://127.0.0.1:{server.server_port}/targets"
        found = httpx.get(url, headers={"Host": "inference:9401"}).json()
        assert found == [{"targets": [at], "labels": labels} for at, labels in answer]
        server.shutdown()
        server.server_close()


def test_the_runner_of_jobs_has_no_gpus_to_look_for(monkeypatch, tmp_path) -> None:
    """The ranks of a runner may run on other machines. If the exporter beside the runner looked for
    GPUs, a machine without a driver would cause an alert."""
    monkeypatch.setenv("TANDEM_ROLE", "trainer")
    for executor, device in (("kubernetes", "cpu"), ("local", "cuda")):
        settings = Settings(root=tmp_path, device="cuda", executor=executor)
        made = {one.name: one for one in make_collectors(settings, exported_sides())}
        nvml: Any = made["nvml"]
        assert nvml._device == device
