"""What pods get and how they live: GPUs, shared memory, grace, probes, updates."""

from __future__ import annotations

import pytest

from helm import charts
from helm.charts import CHART, merged
from helm.pods import quantity
from helm.renders import (
    CASES,
    ROLES,
    SHARED,
    VALUES,
    case,
    container_of,
    containers,
    environment,
    is_shared,
    of,
    pod_of,
    value,
    volume,
    with_values,
)
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise import programs

GPU_ROLES = ("trainer", "inference")
VOID = {"NVIDIA_VISIBLE_DEVICES": "void"}
KNOWN_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


def devices(container: dict) -> dict[str, str]:
    """The extended resources that a container asks for."""
    resources = container["resources"]
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}
    return {name: amount for name, amount in asked.items() if name not in KNOWN_RESOURCES}


@pytest.mark.parametrize("name", CASES)
def test_gpus_go_to_the_two_roles_and_nobody_else(name):
    rendered = case(name)
    by_claim = is_shared(name) and value(name, "shared.via") == "claim"
    for role in GPU_ROLES:
        container = container_of(rendered, role)
        asks = value(name, "device") == "cuda" and not by_claim
        assert devices(container) == ({"nvidia.com/gpu": str(value(name, f"{role}.gpus"))} if asks else {})
        assert container["resources"].get("claims") == ([{"name": "gpus"}] if by_claim else None)
        has_gpu = asks or by_claim
        assert ("NVIDIA_VISIBLE_DEVICES" in environment(container)) == (not has_gpu)
    for obj, pod in rendered.pods():
        for container in containers(pod):
            if container["name"] in GPU_ROLES and value(name, "device") == "cuda":
                continue
            where = f"{obj['metadata']['name']}: {container['name']}"
            assert devices(container) == {}, where
            assert "claims" not in container["resources"], where
            assert environment(container).items() >= VOID.items(), where


def test_other_resources_and_more_gpus():
    mig, rdma = "nvidia.com/mig-3g.40gb", "rdma/hca"
    rendered = with_values(
        trainer={"gpus": 4, "gpuResource": mig, "extendedResources": {rdma: 1}}, inference={"gpus": 2}
    )
    assert devices(container_of(rendered, "trainer")) == {mig: "4", rdma: "1"}
    assert environment(container_of(rendered, "trainer"))["TANDEM_TRAINER_RANKS"] == "4"
    assert devices(container_of(rendered, "inference")) == {"nvidia.com/gpu": "2"}
    assert environment(container_of(rendered, "inference"))["TANDEM_INFERENCE_TENSOR_PARALLEL"] == "2"
    cpu = with_values(device="cpu", trainer={"gpus": 4, "gpuResource": mig, "cpuRanks": 2})
    assert devices(container_of(cpu, "trainer")) == {}
    assert environment(container_of(cpu, "trainer"))["TANDEM_TRAINER_RANKS"] == "2"


def test_shared_gpus_are_one_claim_of_one_pod():
    rendered = case("shared by claim")
    claim = rendered.one("ResourceClaimTemplate")
    pod = pod_of(rendered, "trainer")
    assert pod is pod_of(rendered, "inference")
    assert pod["spec"]["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": claim["metadata"]["name"]}]
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {
        "deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": SHARED["trainer"]["gpus"]
    }  # fmt: skip
    for obj, other in rendered.pods():
        assert ("resourceClaims" in other["spec"]) == (other is pod), obj["metadata"]["name"]
    assert case("shared by resource").all("ResourceClaimTemplate") == []


@pytest.mark.parametrize("name", CASES)
def test_shared_memory_is_there_and_counted(name):
    rendered = case(name)
    for role in GPU_ROLES:
        pod, container = pod_of(rendered, role), container_of(rendered, role)
        shm = volume(pod, container, "/dev/shm")["emptyDir"]
        size = quantity(value(name, f"{role}.shmSize"))
        assert shm["medium"] == "Memory"
        assert quantity(shm["sizeLimit"]) == size > 0
        for kind in ("requests", "limits"):
            own = quantity(value(name, f"{role}.resources.{kind}.memory"))
            assert quantity(container["resources"][kind]["memory"]) == own + size
            assert container["resources"][kind].get("cpu") == value(name, f"{role}.resources.{kind}").get("cpu")
    assert not is_shared(name) or volume(
        pod_of(rendered, "trainer"), container_of(rendered, "trainer"), "/dev/shm"
    ) != (volume(pod_of(rendered, "inference"), container_of(rendered, "inference"), "/dev/shm"))
    for _, pod in rendered.pods():
        memory = [v["name"] for v in pod["spec"]["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        mounted = [
            m["name"] for c in pod["spec"]["containers"] for m in c["volumeMounts"] if m["mountPath"] == "/dev/shm"
        ]
        assert memory == mounted, "memory that nobody's limit counts"
        assert all("sizeLimit" in v["emptyDir"] for v in pod["spec"]["volumes"] if "emptyDir" in v)


@pytest.mark.parametrize(
    ("memory", "shm", "total"),
    [("64Gi", "512Mi", "66048Mi"), ("1Ti", "1Gi", "1049600Mi"), ("100Mi", "3Mi", "103Mi"), ("1500Gi", "2Ti", "3548Gi")],
)
def test_memory_of_any_unit(memory, shm, total):
    role = {"shmSize": shm, "resources": {"requests": {"memory": memory}, "limits": {"memory": memory}}}
    resources = container_of(with_values(trainer=role), "trainer")["resources"]
    assert {quantity(resources[kind]["memory"]) for kind in ("requests", "limits")} == {quantity(total)}


def stop_seconds(role: str) -> int:
    """The longest that a role's container may take after SIGTERM."""
    if role == "controller":
        return GRACE_SECONDS
    return programs.stop_seconds(programs.PROGRAMS[role])


@pytest.mark.parametrize("name", CASES)
def test_grace_is_longer_than_every_stop(name):
    rendered = case(name)
    for role in ROLES:
        hook = container_of(rendered, role).get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
        assert hook["exec"]["command"][0] == "sleep"
        before = int(hook["exec"]["command"][1])
        assert before == (0 if role == "trainer" else value(name, f"{role}.preStopSeconds"))
        grace = pod_of(rendered, role)["spec"]["terminationGracePeriodSeconds"]
        assert grace >= before + stop_seconds(role) + 5


@pytest.mark.parametrize("seconds", [0, 1, 600])
@pytest.mark.parametrize("more", [{}, {**SHARED, "shared": {"via": "resource"}}], ids=["dedicated", "shared"])
def test_grace_follows_the_pause_before(seconds, more):
    paused = {role: {"preStopSeconds": seconds} for role in ("controller", "inference")}
    rendered = with_values(**merged(paused, more))
    for role in ("controller", "inference"):
        assert pod_of(rendered, role)["spec"]["terminationGracePeriodSeconds"] > seconds + stop_seconds(role)
        assert ("lifecycle" in container_of(rendered, role)) == (seconds > 0)


@pytest.mark.parametrize("name", CASES)
def test_probes(name):
    rendered = case(name)
    for role in ROLES:
        container = container_of(rendered, role)
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        assert not any("initialDelaySeconds" in probe for probe in probes.values())
        startup = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
        if role == "inference":
            assert startup >= 60 * value(name, "inference.startupMinutes")
        assert startup >= 300
        if role == "controller":
            paths = {kind: probe["httpGet"] for kind, probe in probes.items()}
            assert paths["liveness"] == paths["startup"] == {"path": "/healthz", "port": "http"}
            assert paths["readiness"] == {"path": "/readyz", "port": "http"}
            continue
        commands = {kind: probe["exec"]["command"] for kind, probe in probes.items()}
        health = ["python", "-m", "tandem.supervise.health"]
        assert commands == {"startup": [*health, "--started"], "readiness": health, "liveness": [*health, "--live"]}
        # Patient enough that one slow answer of a busy machine kills nothing.
        assert probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"] >= 60


def test_startup_waits_as_long_as_told():
    for minutes in (1, 600):
        probe = container_of(with_values(inference={"startupMinutes": minutes}), "inference")["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60 * minutes


@pytest.mark.parametrize("name", CASES)
def test_one_pod_each_and_never_a_second_beside_it(name):
    rendered = case(name)
    made = [o for o in rendered.objects if o["kind"] in ("Deployment", "StatefulSet")]
    workloads = {o["metadata"]["name"].removeprefix("a-tandem-"): o for o in made}
    gpu = {"engine"} if is_shared(name) else {"trainer", "inference"}
    assert set(workloads) == gpu | {"controller"}
    for component, workload in workloads.items():
        spec = workload["spec"]
        assert spec["replicas"] == 1
        assert workload["kind"] == ("Deployment" if component == "controller" else "StatefulSet"), "a surge is possible"
    lead = "engine" if is_shared(name) else "trainer"
    assert (
        workloads[lead]["spec"]["updateStrategy"]
        == {"type": value(name, "trainer.updateStrategy")}
        == {"type": "OnDelete"}
    )
    if not is_shared(name):
        assert workloads["inference"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    annotations = workloads[lead]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize(("role", "strategy"), [("trainer", "RollingUpdate"), ("inference", "OnDelete")])
def test_the_update_strategy_is_a_value(role, strategy):
    rendered = with_values(**{role: {"updateStrategy": strategy}})
    assert rendered.one("StatefulSet", role)["spec"]["updateStrategy"] == {"type": strategy}


def templates(rendered: charts.Rendered) -> dict[str, dict]:
    return {obj["metadata"]["name"]: pod for obj, pod in rendered.pods() if obj["kind"] != "Pod"}


@pytest.mark.parametrize("name", CASES)
def test_another_image_tag_waits_for_the_trainer(name):
    old, new = case(name), of(merged(VALUES[name], {"image": {"tag": "2"}}))
    lead = "engine" if is_shared(name) else "trainer"
    before, after = templates(old), templates(new)
    assert before[f"a-tandem-{lead}"] != after[f"a-tandem-{lead}"], "the new image is what its next pod has"
    assert new.one("StatefulSet", lead)["spec"]["updateStrategy"] == {"type": "OnDelete"}


@pytest.mark.parametrize("name", ["defaults", "everything", "shared by claim"])
def test_another_chart_version_changes_no_pod(name, tmp_path):
    copy = tmp_path / "tandem"
    charts.shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    assert "\nversion: 0.1.0\n" in text
    (copy / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0\n", "\nversion: 0.2.0\n"))
    new = charts.render(VALUES[name], release="a", chart=copy)
    assert new.one("StatefulSet", "engine" if is_shared(name) else "trainer")["metadata"]["labels"][
        "helm.sh/chart"
    ].endswith("0.2.0")
    assert templates(new) == templates(case(name))
