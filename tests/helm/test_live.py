"""The rendered pods start and work on a real Docker engine. The pods run as a user id that no image
defines.

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

import pytest
from lightkube.utils.quantity import parse_quantity

from compose_stack import TAG, Compose, build_images, require_engine
from helm import charts, pods
from helm.charts import Object, Rendered
from helm.pods import ROLES, component, container_of, mounted

pytestmark = [
    pytest.mark.sample(1, of="Docker's engine"),
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
# With this release name the chart's Service is `tandem-controller`. The variable that Kubernetes
# can set for this Service would have the name of the setting TANDEM_CONTROLLER_PORT.
RELEASE, NAMESPACE = "tandem", "ml"
UID = 12345
KEYS = {name: secrets.token_hex(32) for name in ("api_key", "admin_token")}
# Sets the owners and modes of scratch volumes, claims and the files of Secrets, as Kubernetes does.
PREPARE = """chmod 2777 /volumes/*; chmod 2775 /volumes/tandem-*; chgrp -R 0 /secrets
chmod 755 /secrets/*; chmod 440 /secrets/*/*"""


def command_of(container: Object, kind: str) -> list[str]:
    """The command that a probe runs in its container, or a command that sends the probe's HTTP
    request."""
    probe = container[f"{kind}Probe"]
    if "exec" in probe:
        return probe["exec"]["command"]
    (port,) = (p for p in container["ports"] if p["name"] == probe["httpGet"]["port"])
    url = f"http://127.0.0.1:{port['containerPort']}{probe['httpGet']['path']}"
    return ["python", "-c", f"import urllib.request; urllib.request.urlopen({url!r}, timeout=5)"]


def volumes_of(pod: Object, container: Object, directory: Path) -> Object:
    """The fields of a service for the volumes of a container."""
    found: Object = {"volumes": []}
    for path, volume in mounted(pod, container).items():
        if projected := volume.get("projected"):
            (files := directory / component(pod)).mkdir(exist_ok=True)
            for item in (i for source in projected["sources"] for i in source["secret"]["items"]):
                if item["key"] in KEYS:
                    (files / item["path"]).write_text(KEYS[item["key"]])
            found["volumes"].append(f"{files}:{path}:ro")
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            found["shm_size"] = int(parse_quantity(volume["emptyDir"]["sizeLimit"]))
        else:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            name = claim or f"{component(pod)}-{volume['name']}"
            # By default Docker copies files from the image into a new volume, but Kubernetes does
            # not.
            found["volumes"].append(f"{name}:{path}:nocopy")
    return found


def service_of(pod: Object, container: Object, directory: Path) -> Object:
    user = pod["spec"]["securityContext"]
    memory = int(parse_quantity(container["resources"]["limits"]["memory"]))
    return {
        "image": container["image"],
        "command": container.get("args"),
        "environment": pods.environment(container),
        # `test_policies` checks the container's other rights.
        "user": f"{user['runAsUser']}:{user['runAsGroup']}",
        "group_add": [str(user["fsGroup"])],
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "mem_limit": memory,
        "memswap_limit": memory,
        "stop_grace_period": f"{pod['spec'].get('terminationGracePeriodSeconds', 30)}s",
        # While the pods start, Docker runs the image's health check instead of the pod's probes.
        "healthcheck": {"interval": "3s", "disable": "readinessProbe" not in container},
        "profiles": ["test"] if component(pod).startswith("test-") else [],
        **volumes_of(pod, container, directory),
    }


def services_of(rendered: Rendered, directory: Path) -> Object:
    """The pods' containers as services of Compose. The last container of a pod is the service
    <component>, with the names of the pod's Services. Each earlier container is a service
    <component>-<name>. The service `node` runs before all others."""
    found = {}
    for pod in rendered.pods():
        before = "node"
        hosts = [
            f"{service['metadata']['name']}.{NAMESPACE}.svc"
            for service in rendered.all("Service")
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        *earlier, last = pods.containers(pod)
        for container in (*earlier, last):
            name = component(pod) + (f"-{container['name']}" if container is not last else "")
            found[name] = service_of(pod, container, directory) | {
                "depends_on": {before: {"condition": "service_completed_successfully"}},
                "networks": {"default": {"aliases": hosts if container is last else []}},
            }
            before = name
    return found


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    own = {"image": {"tag": TAG if TAG != "0.1.0" else ""}, "podSecurity": {"runAsUser": UID}}
    values = charts.merged(charts.load(charts.CHART / "values-cpu.yaml"), own)
    return charts.render(values, release=RELEASE, namespace=NAMESPACE)


@pytest.fixture(scope="module")
def stack(rendered: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """The pods of all roles. Each pod becomes ready at its first start."""
    require_engine()
    build_images()
    (directory := tmp_path_factory.mktemp("pods") / "secrets").mkdir()
    services = services_of(rendered, directory)
    mounts = {mount for service in services.values() for mount in service["volumes"]}
    volumes = {mount.partition(":")[0] for mount in mounts if mount.endswith(":nocopy")}
    services["node"] = {
        "image": f"tandem-controller:{TAG}",
        "user": "0:0",
        "entrypoint": ["sh", "-c", PREPARE],
        "healthcheck": {"disable": True},
        "network_mode": "none",
        "volumes": [f"{directory}:/secrets", *(f"{name}:/volumes/{name}" for name in volumes)],
    }
    content = json.dumps({"services": services, "volumes": {name: {} for name in volumes}})
    (file := directory.with_suffix(".json")).write_text(content.replace("$", "$$"))
    with Compose(str(file), project=f"tandem-node-{secrets.token_hex(3)}") as stack:
        stack.up(timeout=400)
        yield stack


def test_the_pods_of_helm_test_succeed(stack, rendered):
    tests = rendered.all("Pod")
    tests.sort(key=lambda obj: int(obj["metadata"]["annotations"]["helm.sh/hook-weight"]))
    command = ("--profile", "test", "run", "--rm", "--no-deps", "-T")
    for name in map(component, tests):
        done = stack.run(*command, name, timeout=240)
    assert "helm-test@1 is served" in done.stdout + done.stderr


def test_probes_succeed_and_the_liveness_probe_notices_a_runner_that_hangs(stack, rendered):
    def probe(role: str, kind: str, check: bool = True):
        command = command_of(container_of(rendered.pods(), role), kind)
        return stack.exec(role, *command, check=check)

    for role in ROLES:
        for kind in ("startup", "readiness", "liveness"):
            probe(role, kind)
    stack.kill_program("trainer", "runner", signal.SIGSTOP)
    stack.exec("trainer", "sh", "-c", "touch -cd '1 hour ago' /run/tandem/tandem-*/runner.alive")
    done = probe("trainer", "liveness", check=False)
    assert done.returncode != 0
    assert "runner" in done.stdout + done.stderr
    stack.kill_program("trainer", "runner", signal.SIGCONT)


def test_scratch_volumes_are_at_most_half_full(stack, rendered):
    for role in ROLES:
        pod, container = (of(rendered.pods(), role) for of in (pods.pod_of, container_of))
        for path, volume in mounted(pod, container).items():
            if limit := volume.get("emptyDir", {}).get("sizeLimit"):
                used = int(stack.exec(role, "du", "-sk", path).stdout.split()[0]) * 1024
                assert used < parse_quantity(limit) / 2, f"{role}: {path} holds {used} bytes"


def test_every_pod_stops_within_its_grace_period(stack, rendered):
    begin = time.time()
    for role in ROLES:
        if hook := container_of(rendered.pods(), role).get("lifecycle", {}).get("preStop"):
            stack.exec(role, *hook["exec"]["command"])
    stack.run("stop", *ROLES, timeout=200)
    assert stack.exits(begin) == dict.fromkeys(ROLES, 0)
