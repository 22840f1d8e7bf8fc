"""The rendered pods start and work on a real Docker engine, as a user that no image knows.

Docker Compose starts the pods' containers with the user, rights, limits, variables, volumes,
Secrets, order and probes of the pods' specs. The tests have no Kubernetes controllers, no
scheduling, no NetworkPolicies and no GPUs. Each test continues from the state that the test before
it left.
"""

import json
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compose_stack import TAG, Compose, build_images, check_processes, require_engine
from helm import charts
from helm.charts import Object, Rendered
from helm.pods import (
    ROLES,
    component,
    container_of,
    containers,
    environment,
    pod_of,
    quantity,
    selects,
)

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
# With this release name the chart's Service is `tandem-controller`. The variable that Kubernetes
# can set for this Service would have the name of the setting TANDEM_CONTROLLER_PORT.
RELEASE, NAMESPACE = "tandem", "ml"
UID = 12345
KEYS = {name: secrets.token_hex(32) for name in ("api_key", "admin_token")}
# Sets the owners and modes of claims, of scratch volumes and of the files of Secrets, as Kubernetes
# does.
PREPARE = (
    "chmod 2775 /claims/*; chmod 2777 /scratch/*; chgrp -R 0 /secrets; find /secrets -type f -exec"
    " chmod 440 {} +"
)


def command_of(container: Object, kind: str) -> list[str]:
    """The command that a probe runs in its container, or a command that sends the probe's HTTP
    request."""
    probe = container[f"{kind}Probe"]
    if "exec" in probe:
        return probe["exec"]["command"]
    port = {p["name"]: p["containerPort"] for p in container["ports"]}[probe["httpGet"]["port"]]
    url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
    return ["python", "-c", f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"]


class Pods:
    """The pods' containers as services of Compose. The last container of a pod is the service
    <component>. Each earlier container is a service <component>-<name>."""

    def __init__(self, rendered: Rendered, directory: Path) -> None:
        self.directory = directory
        self.claims: set[str] = set()
        self.scratch: set[str] = set()
        self.services: dict[str, Any] = {}
        for pod in rendered.pods():
            before, name = "node", component(pod)
            for container in containers(pod):
                last = container is pod["spec"]["containers"][-1]
                service = name if last else f"{name}-{container['name']}"
                self.services[service] = self.service(name, pod["spec"], container) | {
                    "depends_on": {before: {"condition": "service_completed_successfully"}},
                    "profiles": ["test"] if name.startswith("test-") else [],
                    "networks": {
                        "default": {
                            "aliases": [
                                f"{s['metadata']['name']}.{s['metadata']['namespace']}.svc"
                                for s in rendered.all("Service")
                                if last
                                and selects(
                                    {"matchLabels": s["spec"]["selector"]},
                                    pod["metadata"]["labels"],
                                )
                            ]
                        }
                    },
                }
                before = service
        mounts = [f"{kind}:/claims/{kind}" for kind in self.claims] + [
            f"{kind}:/scratch/{kind}" for kind in self.scratch
        ]
        self.services["node"] = {
            "image": f"tandem-controller:{TAG}",
            "user": "0:0",
            "entrypoint": ["sh", "-c", PREPARE],
            "healthcheck": {"disable": True},
            "network_mode": "none",
            "volumes": [*mounts, f"{directory}:/secrets"],
        }

    def service(self, pod: str, spec: Object, container: Object) -> Object:
        user, memory = (
            spec["securityContext"],
            int(quantity(container["resources"]["limits"]["memory"])),
        )
        assert "command" not in container
        health: Object = {"disable": True}
        if "readinessProbe" in container:
            start, ready = container["startupProbe"], container["readinessProbe"]
            health = {
                "test": ["CMD", *command_of(container, "readiness")],
                "interval": "3s",
                "timeout": f"{ready['timeoutSeconds']}s",
                "retries": 3,
                "start_period": f"{start['periodSeconds'] * start['failureThreshold']}s",
            }
        return {
            "image": container["image"],
            "command": container.get("args"),
            "environment": environment(container),
            # `test_policies` compares the container's other rights.
            "user": f"{user['runAsUser']}:{user['runAsGroup']}",
            "group_add": [str(user["fsGroup"])],
            "read_only": True,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "mem_limit": memory,
            "memswap_limit": memory,
            "healthcheck": health,
            "stop_grace_period": f"{spec.get('terminationGracePeriodSeconds', 30)}s",
            **self.mounts(pod, spec, container),
        }

    def mounts(self, pod: str, spec: Object, container: Object) -> Object:
        found, shm = [], {}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume, target = volumes[mount["name"]], mount["mountPath"]
            if "projected" in volume:
                source = self.secret_files(pod, volume["projected"])
                found.append(
                    {
                        "type": "bind",
                        "source": str(source),
                        "target": target,
                        "read_only": mount["readOnly"],
                    }
                )
            elif volume.get("emptyDir", {}).get("medium") == "Memory":
                shm = {"shm_size": int(quantity(volume["emptyDir"]["sizeLimit"]))}
                assert target == "/dev/shm"
            else:
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                (self.claims if claim else self.scratch).add(
                    source := claim or f"{pod}-{mount['name']}"
                )
                # Docker would copy files from the image into a new volume. Kubernetes does not.
                found.append(
                    {
                        "type": "volume",
                        "source": source,
                        "target": target,
                        "volume": {"nocopy": True},
                    }
                )
        return {"volumes": found, **shm}

    def secret_files(self, pod: str, projected: Object) -> Path:
        (directory := self.directory / pod).mkdir(exist_ok=True)
        directory.chmod(0o755)
        assert projected["defaultMode"] == 0o440
        for secret in (source["secret"] for source in projected["sources"]):
            assert secret["name"] == RELEASE
            for item in secret["items"]:
                assert item["key"] in KEYS or secret.get("optional"), item
                if item["key"] in KEYS:
                    (directory / item["path"]).write_text(KEYS[item["key"]])
        return directory


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    values = charts.merged(
        charts.load(charts.CHART / "values-cpu.yaml"),
        {
            "image": {"tag": TAG if TAG != "0.1.0" else ""},
            "podSecurity": {"runAsUser": UID},
        },
    )
    return charts.render(values, release=RELEASE, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def stack(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The pods of all roles. Each pod becomes ready at its first start."""
    require_engine()
    build_images()
    (directory := tmp_path_factory.mktemp("pods") / "secrets").mkdir()
    pods = Pods(rendered, directory)
    file = directory.with_suffix(".json")
    content = {
        "services": pods.services,
        "volumes": {name: {} for name in pods.claims | pods.scratch},
    }
    file.write_text(json.dumps(content).replace("$", "$$"))
    with Compose(str(file), project=f"tandem-node-{secrets.token_hex(3)}") as stack:
        stack.up(timeout=400)
        yield stack


def test_processes_have_no_rights_and_a_read_only_root(stack):
    for role in ROLES:
        check_processes(stack, role, str(UID))


def test_the_pods_of_helm_test_succeed(stack, rendered):
    tests = rendered.all("Pod")
    tests.sort(key=lambda obj: int(obj["metadata"]["annotations"]["helm.sh/hook-weight"]))
    names = [component(test) for test in tests]
    assert sorted(names) == ["test-job", "test-reach", "test-volume-read", "test-volume-write"]
    assert names[-1] == "test-job"
    for name in names:
        done = stack.run("--profile", "test", "run", "--rm", "--no-deps", "-T", name, timeout=240)
    assert "helm-test@1 is served" in done.stdout + done.stderr


# Sets the time of the runner's last sign of life to an hour ago.
_AGE = """
import os, pathlib, time
(path,) = pathlib.Path("/run/tandem").glob("tandem-*/runner.alive")
os.utime(path, (time.time() - 3600,) * 2)
"""


def test_probes_succeed_and_the_liveness_probe_notices_a_runner_that_hangs(stack, rendered):
    for role in ROLES:
        for kind in ("startup", "readiness", "liveness"):
            stack.exec(role, *command_of(container_of(rendered.pods(), role), kind))
    stack.kill_program("trainer", "runner", signal.SIGSTOP)
    stack.exec("trainer", "python", "-c", _AGE)
    done = stack.exec(
        "trainer", *command_of(container_of(rendered.pods(), "trainer"), "liveness"), check=False
    )
    assert done.returncode != 0
    assert "runner" in done.stdout + done.stderr
    stack.kill_program("trainer", "runner", signal.SIGCONT)


def test_scratch_volumes_are_at_most_half_full(stack, rendered):
    for role in ROLES:
        mounts = {
            mount["name"]: mount["mountPath"]
            for mount in container_of(rendered.pods(), role)["volumeMounts"]
        }
        for volume in pod_of(rendered.pods(), role)["spec"]["volumes"]:
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                used = (
                    int(stack.exec(role, "du", "-sk", mounts[volume["name"]]).stdout.split()[0])
                    * 1024
                )
                assert used < quantity(limit) / 2, (
                    f"{role}: {volume['name']} holds {used} bytes of {limit}"
                )


def test_every_pod_stops_within_its_grace_period(stack, rendered):
    begin = time.time()
    for role in ROLES:
        if hook := container_of(rendered.pods(), role).get("lifecycle", {}).get("preStop"):
            stack.exec(role, *hook["exec"]["command"])
    stack.run("stop", *ROLES, timeout=200)
    assert stack.exits(begin) == dict.fromkeys(ROLES, 0)
