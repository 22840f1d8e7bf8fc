"""A rolling upgrade of two inference servers behind the real HAProxy, in the chart's order. One
server after the other runs `tandem.supervise.drain`, gets SIGTERM, starts again as the new version,
and becomes ready."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import fake_vllm
from free_ports import free_ports
from inference import upgraded_vllm
from inference.stage import Stage
from tandem.config import Settings
from tandem.supervise import proxy
from tandem.vllm_client.names import READY_ROUTE, SESSION_HEADER
from waiting import answers, until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason=f"haproxy is not installed: {proxy.INSTALL}"
    ),
]
DRAIN_SECONDS = "60"
CLIENTS = 8


class Pod:
    """A server with its publisher, in processes of their own."""

    def __init__(self, directory: Path, stage: Stage, name: str, port: int) -> None:
        directory.mkdir()
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "log"
        self._environment = os.environ | {
            "TANDEM_ROOT": str(stage.spool.root),
            "TANDEM_REPLICA": name,
            "TANDEM_INFERENCE_URL": self.url,
            "TANDEM_INFERENCE_PORT": str(port),
            "TANDEM_API_KEY": fake_vllm.API_KEY,
            "TANDEM_ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
            "TANDEM_DEVICE": "cpu",
            "TANDEM_MAX_LORAS": "25",
            "TANDEM_ROLE": "inference",
            "TMPDIR": str(directory),
            "PYTHONPATH": os.pathsep.join(
                [str(Path(upgraded_vllm.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        self._programs: list[subprocess.Popen[bytes]] = []

    def start(self, version: str) -> None:
        # A new pod has a new `/dev/shm`. The directory is below /tmp, because a socket's path must
        # be short.
        self._runtime = Path(tempfile.mkdtemp(prefix="pod-", dir="/tmp"))
        self._environment["XDG_RUNTIME_DIR"] = str(self._runtime)
        for command in (
            [upgraded_vllm.__file__, version],
            ["-m", "tandem.inference.publisher"],
        ):
            self._programs.append(self._run(command))

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command], env=self._environment, stdout=log, stderr=log
            )

    def ready(self) -> bool:
        """Whether the pod answers the request of the chart's readiness probe."""
        return answers(f"{self.url}{READY_ROUTE}")

    def stop(self, *, drained: bool) -> None:
        if drained:  # The chart's preStop hook runs `tandem.supervise.drain` too.
            assert self._run(["-m", "tandem.supervise.drain", DRAIN_SECONDS]).wait(90) == 0
        for program in reversed(self._programs):  # The publisher ends first, as in supervisord.
            program.terminate()
            program.wait(30)
        self._programs = []
        shutil.rmtree(self._runtime, ignore_errors=True)

    def log(self) -> str:
        return self._log.read_text()


class Clients:
    """Threads that request the announced step from the proxy without a break, and count the
    answers."""

    def __init__(self, stage: Stage, url: str) -> None:
        self._stage, self._url = stage, url
        self.failed: list[str] = []
        self.versions: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        rng, key = random.Random(number), {"Authorization": f"Bearer {fake_vllm.API_KEY}"}
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            turn = 0
            while not self._stopped.is_set():
                turn += 1
                record = self._stage.spool.served.get("run")
                assert record is not None
                body = {"model": record.model, "seconds": rng.choice([0.0, 0.1, 3.0])}
                headers = key | {SESSION_HEADER: f"{number}-{turn // 4}"}
                try:
                    answer = http.post("/v1/completions", json=body, headers=headers)
                    answer.raise_for_status()
                    self.versions[answer.json()["version"]] += 1
                except (httpx.HTTPError, ValueError) as error:
                    self.failed.append(repr(error))

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def pods(tmp_path: Path, stage: Stage) -> Iterator[tuple[list[Pod], str]]:
    """Two ready servers, and the proxy's address."""
    front, *ports = free_ports(3)
    made = [Pod(tmp_path / f"pod-{n}", stage, str(n), port) for n, port in enumerate(ports)]
    path = tmp_path / "haproxy.cfg"
    settings = Settings(inference_port=front, device="cpu")
    path.write_text(proxy.haproxy_config(settings, [f"127.0.0.1:{port}" for port in ports]))
    with subprocess.Popen(["haproxy", "-db", "-f", str(path)]) as haproxy:
        try:
            for pod in made:
                pod.start("old")
            for pod in made:
                until("a pod is ready", pod.ready)
            until("the proxy has one", lambda: answers(f"http://127.0.0.1:{front}/health"), 30)
            yield made, f"http://127.0.0.1:{front}"
        finally:
            for pod in made:
                pod.stop(drained=False)
                print(pod.log())
            haproxy.terminate()


@pytest.mark.sample(1, of="a replica that dies")
@pytest.mark.parametrize("drained", [True, False])
def test_no_request_fails_in_a_rolling_upgrade(
    pods: tuple[list[Pod], str], stage: Stage, drained: bool
) -> None:
    """`drained`: whether each server is drained before it stops. Without a drain, a stop cuts
    running answers off, and the clients see errors."""
    both, url = pods
    clients = Clients(stage, url)
    try:
        # The order is that of a StatefulSet, which upgrades its pods from the last to the first.
        for number, pod in enumerate(reversed(both), 1):
            time.sleep(3)
            pod.stop(drained=drained)
            stage.step(0.1 * number)  # Training goes on during the upgrade.
            pod.start("new")
            until("the new version is ready", pod.ready)
        time.sleep(3)
    finally:
        clients.stop()
    assert (clients.failed == []) == drained, clients.failed
    assert clients.versions["old"] > 20
    assert clients.versions["new"] > 20
    record = stage.spool.served.get("run")
    assert record is not None
    assert record.step == 2
