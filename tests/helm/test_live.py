"""The rendered pods start and work on a real Docker engine, as a user that no image knows.

Each test continues from the state that the one before it left.
"""

import json
import secrets
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from compose_stack import FIND, PROCESSES, PROGRAMS, TAG, build_images, docker, require_engine
from helm import charts
from helm.charts import Rendered
from helm.matrix import ROLES
from helm.node import Node, RunningPod
from helm.pods import quantity
from helm.renders import pod_of

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
# With this release name the chart's Service is `tandem-controller`. Kubernetes' variable for it would be the setting
# TANDEM_CONTROLLER_PORT.
RELEASE, NAMESPACE = "tandem", "ml"
UID = 12345
KEYS = {name: secrets.token_hex(32) for name in ("api_key", "admin_token")}


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    values = charts.merged(charts.load_values(charts.CHART / "values-cpu.yaml"), {
        "image": {"tag": TAG if TAG != "0.1.0" else ""}, "podSecurity": {"runAsUser": UID},
    })  # fmt: skip
    return charts.render(values, release=RELEASE, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def pods(rendered) -> Iterator[dict[str, RunningPod]]:
    """The pod of each role, ready at its first start."""
    require_engine()
    build_images()
    with Node(rendered.all("Service"), {RELEASE: KEYS}, helper=f"tandem-controller:{TAG}") as node:
        running = {role: RunningPod(node, role, pod_of(rendered, role)) for role in ROLES}
        for pod in running.values():
            pod.wait_ready(400)
        yield running
    assert not node.left("container") + node.left("volume")


def main_container(pod: RunningPod) -> dict[str, Any]:
    (container,) = pod.spec["containers"]
    return container


def test_processes_have_no_capabilities_and_a_read_only_root(pods):
    for pod in pods.values():
        processes = json.loads(pod.exec("python", "-c", PROCESSES))
        assert "tandem" in processes["1"]["command"], "there is no init process"
        for status in processes.values():
            assert status["Uid"].split() == [str(UID)] * 4
            assert (status["Gid"].split()[0], status["Groups"]) == ("0", "0")
            assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")} == {"0" * 16}
            assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for path in ("/x", "/opt/tandem/x", "/etc/x"):
            assert "Read-only" in pod.exec("sh", "-c", f"echo x >{path}", check=False)


def settings(environ: list[str]) -> dict[str, str]:
    """The `NAME=value` that configure Tandem, without those that an image or an entrypoint sets for itself."""
    variables = dict(line.split("=", 1) for line in environ if line.startswith(("TANDEM_", "HF_", "NVIDIA_")))
    return {name: value for name, value in variables.items() if name not in ("TANDEM_ROLE", "TANDEM_ALIVE_DIR")}


def test_containers_have_the_settings_and_secrets_of_their_specs(pods):
    for role, pod in pods.items():
        container = main_container(pod)
        image = json.loads(docker("image", "inspect", "-f", "{{json .Config.Env}}", container["image"]).stdout)
        expected = settings(image) | {v["name"]: v["value"] for v in container["env"]}
        assert settings(pod.exec("cat", "/proc/1/environ").split("\0")) == expected
        names = {"api_key"} | ({"admin_token"} if role == "inference" else set())
        assert set(pod.exec("ls", "/etc/tandem/secrets").split()) == names
        for name in names:
            path = f"/etc/tandem/secrets/{name}"
            assert pod.exec("cat", path) == KEYS[name]
            assert pod.exec("stat", "-L", "-c", "%u:%g %a", path).strip() == "0:0 440"


def test_the_pods_of_helm_test_succeed(pods, rendered):
    tests = [obj for obj, _ in rendered.pods() if "helm.sh/hook" in obj["metadata"].get("annotations", {})]
    tests.sort(key=lambda obj: int(obj["metadata"]["annotations"].get("helm.sh/hook-weight", "0")))
    names = [obj["metadata"]["name"].removeprefix("tandem-test-") for obj in tests]
    assert sorted(names) == ["job", "reach", "volume-read", "volume-write"]
    node = pods["controller"].node
    for name, test in zip(names, tests, strict=True):
        pod = RunningPod(node, f"test-{name}", test)
        (container,) = pod.spec["containers"]
        assert pod.wait_end(container["name"], 240) == 0, pod.log(container["name"])
    assert names[-1] == "job"
    assert "helm-test@1 is served" in pod.log(container["name"])


# Sets the time of the runner's last sign of life to an hour ago.
_AGE = """
import os, pathlib, time
(path,) = pathlib.Path("/run/tandem").glob("tandem-*/runner.alive")
os.utime(path, (time.time() - 3600,) * 2)
"""


def test_the_liveness_probe_notices_a_runner_that_hangs(pods):
    pod = pods["trainer"]
    container = main_container(pod)
    assert pod.probe(container, "livenessProbe") is None
    pod.exec("python", "-c", FIND, PROGRAMS["runner"], str(int(signal.SIGSTOP)), "oldest")
    pod.exec("python", "-c", _AGE)
    assert "runner" in (pod.probe(container, "livenessProbe") or "")
    pod.exec("python", "-c", FIND, PROGRAMS["runner"], str(int(signal.SIGCONT)), "oldest")


def test_scratch_volumes_are_at_most_half_full(pods):
    for role, pod in pods.items():
        mounts = {mount["name"]: mount["mountPath"] for mount in main_container(pod)["volumeMounts"]}
        for volume in pod.spec["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                used = int(pod.exec("du", "-sk", mounts[volume["name"]]).split()[0]) * 1024
                assert used < quantity(limit) / 2, f"{role}: {volume['name']} holds {used} bytes of {limit}"


def test_every_pod_stops_within_its_grace_period(pods):
    assert {role: pod.stop() for role, pod in pods.items()} == dict.fromkeys(ROLES, 0)
