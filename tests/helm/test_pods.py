"""Pods' GPUs, shared memory, grace periods, probes, updates and rights.

Pods, test pods too, have the security contexts and no other fields than those of `helm.pods`, which
comply with the profile restricted of Kubernetes' Pod Security Standards; their account has no
rights.
"""

import copy

import pytest

from helm import charts, matrix
from helm.charts import merged
from helm.matrix import CASES, ROLES, SHARED, VALUES
from helm.pods import FIELDS, breaches, containers, pod_template, quantity
from helm.renders import (
    case,
    component_of,
    container_of,
    environment,
    is_shared,
    of,
    pod_of,
    preflight_of,
    templates,
    value,
    volume,
    with_values,
)
from tandem.config import Settings
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise.supervisord import programs_of, stop_seconds

GPU_ROLES = ("trainer", "inference")
STOP_SECONDS = {"controller": GRACE_SECONDS} | {
    role: stop_seconds(programs_of(Settings(device="cpu", inference_replicas=8), role))
    for role in GPU_ROLES
}
"""Role → the longest time between SIGTERM and its exit."""
KNOWN_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


def devices(container: dict) -> dict[str, str]:
    """A container's extended resources."""
    resources = container["resources"]
    requests, limits = (
        {
            name: amount
            for name, amount in resources.get(kind, {}).items()
            if name not in KNOWN_RESOURCES
        }
        for kind in ("requests", "limits")
    )
    assert requests == limits, "Kueue counts requests"
    return limits


@pytest.mark.parametrize("name", CASES)
def test_only_trainer_and_inference_get_gpus(name):
    rendered, cuda = case(name), value(name, "device") == "cuda"
    by_claim = is_shared(name) and value(name, "shared.via") == "claim"
    for obj, pod in rendered.pods():
        for container in containers(pod):
            role = container["name"]
            where = f"{obj['metadata']['name']}: {role}"
            gpu = cuda and role in GPU_ROLES
            limits = (
                {"nvidia.com/gpu": str(value(name, f"{role}.gpus"))} if gpu and not by_claim else {}
            )
            assert devices(container) == limits, where
            assert container["resources"].get("claims") == (
                [{"name": "gpus"}] if gpu and by_claim else None
            ), where
            assert environment(container).get("NVIDIA_VISIBLE_DEVICES") == (
                None if gpu else "void"
            ), where


def test_other_resources_and_more_gpus():
    mig, rdma = "nvidia.com/mig-3g.40gb", "rdma/hca"
    trainer = {"gpus": 4, "gpuResource": mig, "extendedResources": {rdma: 1}}
    rendered = with_values(trainer=trainer, inference={"gpus": 2})
    assert devices(container_of(rendered, "trainer")) == {mig: "4", rdma: "1"}
    assert devices(container_of(rendered, "inference")) == {"nvidia.com/gpu": "2"}
    cpu = with_values(device="cpu", trainer={"gpus": 4, "gpuResource": mig, "cpuRanks": 2})
    assert devices(container_of(cpu, "trainer")) == {}


def test_shared_gpus_are_one_claim_of_one_pod():
    rendered = case("shared by claim")
    claim = rendered.one("ResourceClaimTemplate")
    pod = pod_of(rendered, "trainer")
    assert pod is pod_of(rendered, "inference")
    assert pod["spec"]["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": claim["metadata"]["name"]}
    ]
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {
        "deviceClassName": "gpu.nvidia.com",
        "allocationMode": "ExactCount",
        "count": SHARED["trainer"]["gpus"],
    }
    for obj, other in rendered.pods():
        assert ("resourceClaims" in other["spec"]) == (other is pod), obj["metadata"]["name"]
    assert case("shared by resource").all("ResourceClaimTemplate") == []


@pytest.mark.parametrize("name", CASES)
def test_memory_limits_include_shared_memory(name):
    rendered = case(name)
    names = set()
    for role in GPU_ROLES:
        shm, resources = (
            volume(rendered, role, "/dev/shm"),
            container_of(rendered, role)["resources"],
        )
        names.add((component_of(name, role), shm["name"]))
        size = quantity(value(name, f"{role}.shmSize"))
        assert shm["emptyDir"]["medium"] == "Memory"
        assert quantity(shm["emptyDir"]["sizeLimit"]) == size > 0
        for kind in ("requests", "limits"):
            own = value(name, f"{role}.resources.{kind}")
            assert quantity(resources[kind]["memory"]) == quantity(own["memory"]) + size
            assert resources[kind].get("cpu") == own.get("cpu")
    assert len(names) == 2, "each role has a volume of its own"
    for _, pod in rendered.pods():
        temporary = {v["name"]: v["emptyDir"] for v in pod["spec"]["volumes"] if "emptyDir" in v}
        mounts = [
            mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]
        ]
        in_memory = [name for name, volume in temporary.items() if volume.get("medium") == "Memory"]
        assert in_memory == [mount["name"] for mount in mounts if mount["mountPath"] == "/dev/shm"]
        assert all("sizeLimit" in volume for volume in temporary.values())


def test_every_container_can_meet_a_quota_and_a_limit_range():
    """A ResourceQuota on limits.cpu asks every container for that limit; a LimitRange bounds limit
    / request."""
    amounts = {
        name: {"cpu": 2, "memory": "2Gi", "ephemeral-storage": "2Gi"}
        for name in ("requests", "limits")
    }
    own = {"resources": amounts}
    rendered = with_values(
        **matrix.roles(**own),
        initContainers=own,
        tests=own,
        baseModel="",
        tinyModel=True,
        device="cpu",
    )
    for obj, pod in rendered.pods():
        for container in containers(pod):
            resources, where = container["resources"], (obj["metadata"]["name"], container["name"])
            assert resources["limits"].keys() == KNOWN_RESOURCES, where
            assert resources["requests"] == resources["limits"], where


def test_an_empty_request_or_limit_is_none():
    """null would be replaced by the default, like a key that values of an older chart lack."""
    none = {
        "resources": {"requests": {"cpu": ""}, "limits": {"memory": "", "ephemeral-storage": ""}}
    }
    rendered = with_values(**matrix.roles(**none), initContainers=none, tests=none)
    found = [container["resources"] for _, pod in rendered.pods() for container in containers(pod)]
    amounts = [
        part for resources in found for part in (resources["requests"], resources.get("limits", {}))
    ]
    assert {name for part in amounts for name in part} == {"memory", "nvidia.com/gpu"}
    assert all(resources["requests"]["memory"] for resources in found)
    assert all("memory" not in resources.get("limits", {}) for resources in found)


@pytest.mark.parametrize(
    ("memory", "shm", "total"),
    [
        ("64Gi", "512Mi", "66048Mi"),
        ("1Ti", "1Gi", "1049600Mi"),
        ("100Mi", "3Mi", "103Mi"),
        ("1500Gi", "2Ti", "3548Gi"),
    ],
)
def test_memory_of_any_unit(memory, shm, total):
    role = {
        "shmSize": shm,
        "resources": {"requests": {"memory": memory}, "limits": {"memory": memory}},
    }
    resources = container_of(with_values(trainer=role), "trainer")["resources"]
    assert {quantity(resources[kind]["memory"]) for kind in ("requests", "limits")} == {
        quantity(total)
    }


@pytest.mark.parametrize("seconds", [None, 0, 600])
@pytest.mark.parametrize("name", ["defaults", "shared by resource", "values-cpu.yaml"])
def test_the_grace_period_covers_the_pre_stop_pause_and_the_slowest_stop(name, seconds):
    changed = {} if seconds is None else {"preStopSeconds": seconds}
    rendered = of(merged(VALUES[name], {"controller": changed, "inference": changed}))
    for role in ROLES:
        pause = (
            0
            if role == "trainer"
            else value(name, f"{role}.preStopSeconds")
            if seconds is None
            else seconds
        )
        hook = container_of(rendered, role).get("lifecycle", {}).get("preStop")
        assert hook == ({"exec": {"command": ["sleep", str(pause)]}} if pause else None)
        assert (
            pod_of(rendered, role)["spec"]["terminationGracePeriodSeconds"]
            >= pause + STOP_SECONDS[role] + 5
        )


@pytest.mark.parametrize("name", CASES)
def test_probes(name):
    rendered = case(name)
    for role in ROLES:
        container = container_of(rendered, role)
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        assert not any("initialDelaySeconds" in probe for probe in probes.values())
        seconds = {
            kind: probe["periodSeconds"] * probe.get("failureThreshold", 3)
            for kind, probe in probes.items()
        }
        minutes = value(name, "inference.startupMinutes") if role == "inference" else 5
        assert seconds["startup"] >= max(300, 60 * minutes)
        if role == "controller":
            paths = {kind: probe["httpGet"] for kind, probe in probes.items()}
            # /readyz is 503 on a full volume. The only endpoint must stay reachable then, because
            # deletes free space.
            assert all(path == {"path": "/healthz", "port": "http"} for path in paths.values())
            continue
        commands = {kind: probe["exec"]["command"] for kind, probe in probes.items()}
        health = ["python", "-m", "tandem.supervise.health"]
        assert commands == {
            "startup": [*health, "--started"],
            "readiness": health,
            "liveness": [*health, "--live"],
        }
        assert seconds["liveness"] >= 60, "one slow answer of a busy machine must not kill a pod"
    patient = container_of(with_values(inference={"startupMinutes": 600}), "inference")[
        "startupProbe"
    ]
    assert patient["periodSeconds"] * patient["failureThreshold"] >= 60 * 600


@pytest.mark.parametrize("name", CASES)
def test_workloads_have_one_pod_and_never_a_second_beside_it(name):
    rendered = case(name)
    lead = component_of(name, "trainer")
    workloads = {
        o["metadata"]["name"].removeprefix("a-tandem-"): o
        for kind in ("Deployment", "StatefulSet")
        for o in rendered.all(kind)
    }
    several = "two inference servers" in name
    assert set(workloads) == {component_of(name, role) for role in ROLES} | (
        {"proxy"} if several else set()
    )
    for component, workload in workloads.items():
        assert workload["spec"]["replicas"] == 1 + (several and component == "inference")
        # A Deployment may start a second pod during an update.
        may = component in ("controller", "proxy")
        assert workload["kind"] == ("Deployment" if may else "StatefulSet")
        if not may:
            strategy = "OnDelete" if component == lead else "RollingUpdate"
            assert workload["spec"]["updateStrategy"] == {"type": strategy}
    annotations = workloads[lead]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize(
    ("role", "how", "tests"),
    [
        ("trainer", {"enabled": False}, "reach volume-write volume-read"),
        ("trainer", {"replicas": 0}, "reach volume-write volume-read"),
        ("inference", {"replicas": 0}, "volume-write volume-read"),
        ("controller", {"replicas": 0}, "volume-write volume-read"),
    ],
    ids=str,
)
def test_a_role_can_be_off(role, how, tests):
    rendered = of(merged(VALUES["everything"], {role: how}))
    workloads = {
        o["metadata"]["name"].removeprefix("a-tandem-"): o["spec"]["replicas"]
        for kind in ("Deployment", "StatefulSet")
        for o in rendered.all(kind)
    }
    others = {other: 1 for other in ROLES if other != role}
    assert workloads == (others | {role: 0} if "replicas" in how else others)
    assert ("Paused" in rendered.notes) == ("replicas" in how)
    # No object waits for, calls or selects a role without a pod.
    assert {
        o["metadata"]["name"].removeprefix("a-tandem-test-") for o in rendered.all("Pod")
    } == set(tests.split())
    asked = [arg for o in rendered.all("Pod") for arg in o["spec"]["containers"][0]["args"]]
    assert not any(f"-{role}" in arg for arg in asked)
    names = [o["metadata"]["name"] for o in rendered.objects]
    assert ("a-tandem-trainer" in names) == ("enabled" not in how)


@pytest.mark.parametrize("name", ["defaults", "shared by claim"])
@pytest.mark.parametrize("strategy", ["OnDelete", "RollingUpdate"])
def test_the_notes_wait_for_each_workload_as_kubectl_can(name, strategy):
    """`kubectl rollout status` refuses a StatefulSet with OnDelete."""
    values = {role: {"updateStrategy": strategy} for role in GPU_ROLES}
    rendered = of(merged(VALUES[name], values))
    rollout, wait = (
        {
            word
            for line in rendered.notes.splitlines()
            if verb in line
            for word in line.split()
            if "/" in word
        }
        for verb in (" rollout status ", " wait --for=jsonpath='{.status.readyReplicas}'=1 ")
    )
    assert f" -c {preflight_of(rendered, 'inference')['name']} " in rendered.notes
    stateful = {f"statefulset/a-tandem-{component_of(name, 'inference')}"}
    assert rollout == {"deployment/a-tandem-controller"} | (
        stateful if strategy == "RollingUpdate" else set()
    )
    assert wait == (stateful if strategy == "OnDelete" else set())


@pytest.mark.parametrize("mode", [{}, SHARED], ids=["dedicated", "shared"])
def test_preflight_sees_what_a_role_mounts(mode):
    """A base model, or variables like SSL_CERT_FILE and HF_HOME, may name a path below such a
    mount."""
    mounts = {
        role: [{"name": f"of-{role}", "mountPath": f"/{role}", "readOnly": True}] for role in ROLES
    }
    more = {
        role: {"extraVolumes": [{"name": f"of-{role}"}], "extraVolumeMounts": mounts[role]}
        for role in ROLES
    }
    rendered = with_values(**merged(mode, more))
    for role in ROLES:
        for container in (container_of(rendered, role), preflight_of(rendered, role)):
            assert [m for m in container["volumeMounts"] if m["name"].startswith("of-")] == mounts[
                role
            ]


@pytest.mark.parametrize("name", ["defaults", "everything", "shared by claim"])
def test_another_chart_version_changes_no_pod(name, tmp_path):
    new = charts.render(VALUES[name], release="a", chart=charts.other_version(tmp_path, "0.2.0"))
    workload = new.one("StatefulSet", component_of(name, "trainer"))
    assert workload["metadata"]["labels"]["helm.sh/chart"].endswith("0.2.0")
    assert templates(new) == templates(case(name))


@pytest.mark.parametrize("name", CASES)
def test_pods_are_restricted(name):
    rendered = case(name)
    account = rendered.one("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    assert len(rendered.pods()) >= (6 if is_shared(name) else 7)
    for obj, pod in rendered.pods():
        assert breaches(pod, assigned_user=name == "OpenShift") == [], obj["metadata"]["name"]
        assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
        for container in containers(pod):
            for kind, resource in (
                ("requests", "cpu"),
                ("requests", "memory"),
                ("limits", "memory"),
            ):
                assert quantity(container["resources"][kind][resource]) > 0, (
                    container["name"],
                    kind,
                    resource,
                )
    kinds = {obj["kind"] for obj in rendered.objects}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"}


@pytest.mark.parametrize(("given", "expected"), [("mine", "mine"), ("", "default")])
def test_an_existing_account(given, expected):
    rendered = with_values(serviceAccount={"create": False, "name": given})
    assert rendered.all("ServiceAccount") == []
    assert {pod["spec"]["serviceAccountName"] for _, pod in rendered.pods()} == {expected}


@pytest.mark.parametrize("kind", [*FIELDS, "context", "token"])
def test_a_breach_is_seen(kind):
    pod = copy.deepcopy(case("defaults").one("StatefulSet", "trainer")["spec"]["template"])
    spec, container = pod["spec"], pod["spec"]["initContainers"][0]
    node = {
        "pod": spec,
        "container": container,
        "volume": spec["volumes"][0],
        "mount": container["volumeMounts"][0],
        "port": spec["containers"][0]["ports"][0],
        "probe": spec["containers"][0]["livenessProbe"],
        "source": spec["volumes"][-1]["projected"]["sources"][0],
        "context": container["securityContext"],
        "token": spec,
    }[kind]
    node["automountServiceAccountToken" if kind == "token" else "privileged"] = True
    assert breaches(pod)


@pytest.mark.parametrize("name", [name for name in CASES if "two inference servers" in name])
def test_an_upgrade_stops_one_of_several_inference_servers_after_the_other(name):
    """The proxy takes it out, its requests end, and the next one waits until it is ready again."""
    rendered = case(name)
    inference = container_of(rendered, "inference")
    seconds = value(name, "inference.drainSeconds")
    assert inference["lifecycle"]["preStop"]["exec"]["command"] == [
        *("python", "-m", "tandem.supervise.drain"),
        str(seconds),
    ]
    pod = pod_of(rendered, "inference")["spec"]
    assert pod["terminationGracePeriodSeconds"] == STOP_SECONDS["inference"] + seconds + 10
    assert inference["readinessProbe"]["exec"]["command"][-1] == "tandem.supervise.health"
    budget = rendered.one("PodDisruptionBudget", "-inference")["spec"]
    assert budget["maxUnavailable"] == 1, "a drained node takes one at a time"


@pytest.mark.parametrize("name", [name for name in CASES if "two inference servers" in name])
def test_the_proxy_finds_every_server_and_ends_its_answers(name):
    rendered = case(name)
    (container,) = pod_template(rendered.one("Deployment", "-proxy"))["spec"]["containers"]
    assert container["args"][:3] == ["python", "-m", "tandem.supervise.proxy"]
    service, namespace, *domain = container["args"][4].removesuffix(":8000").split(".")
    assert (container["args"][3], domain) == ("--resolve", ["svc", "cluster", "local"])
    headless = rendered.one("Service", "-inference-pods")
    assert headless["metadata"] | {"name": service, "namespace": namespace} == headless["metadata"]
    assert headless["spec"]["publishNotReadyAddresses"], "HAProxy asks each whether it is ready"
    assert "kill -USR1 1" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
    public = rendered.one("Service", "-inference")["spec"]["selector"]
    labels = pod_template(rendered.one("Deployment", "-proxy"))["metadata"]["labels"]
    assert labels.items() >= public.items()
