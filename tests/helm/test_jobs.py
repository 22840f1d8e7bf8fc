"""`trainer.executor: kubernetes`: what an idle release has, what the runner may do, and where the
Jobs' pods run and whom they reach."""

import json
import re
from typing import Any

import pytest

from executor.releases import template_of
from helm import charts, matrix, schemas
from helm.charts import NEWEST, OLDEST, Object, Rendered, merged
from helm.matrix import EVERYTHING, JOBS, ONE_NODE, at
from helm.pods import breaches, containers, quantity
from helm.renders import container_of, environment, of, pod_of
from helm.test_network import INTERNET, NAMESPACE, NCCL, STRANGERS, Pod, World

SETS: dict[str, dict[str, Any]] = {
    name: merged(matrix.BASE, values)
    for name, values in {
        "jobs": JOBS,
        "everything": merged(EVERYTHING, JOBS),
        "queue": merged(JOBS, {"kueue": {"queue": "research", "priorityClass": "high"}}),
        "one node": merged(ONE_NODE, {"trainer": {"executor": "kubernetes"}}),
        "cpu": {"device": "cpu", "trainer": {"executor": "kubernetes", "cpuRanks": 2}},
    }.items()
}
CASES = pytest.mark.parametrize("name", SETS)


def job(rendered: Rendered) -> Object:
    """A Job as the API server gets it, without the fields that the runner fills in."""
    made = template_of(rendered)
    for owner in made["metadata"]["ownerReferences"]:
        owner["uid"] = "9b2f9e1c-2e0a-4a9e-8a3e-0a3f6a3b7c11"
    return made


@CASES
def test_an_idle_release_asks_for_no_gpu_of_a_trainer(name):
    rendered = of(SETS[name])
    for _, pod in rendered.pods():
        for container in containers(pod):
            asked = [container["resources"].get(kind, {}) for kind in ("limits", "requests")]
            gpus = [resource for each in asked for resource in each if "/" in resource]
            assert bool(gpus) == (container["name"] == "inference" and name != "cpu")
    assert "resourceClaims" not in pod_of(rendered, "trainer")["spec"]
    runner = container_of(rendered, "trainer")
    assert "claims" not in runner["resources"]
    assert runner["image"] == container_of(rendered, "controller")["image"]
    assert runner["args"] == ["python", "-m", "tandem", "up", "--role", "trainer"]
    assert environment(runner)["NVIDIA_VISIBLE_DEVICES"] == "void"


@CASES
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_jobs_fit_their_schema_and_their_pods_are_restricted(name, version):
    made = job(of(SETS[name], version=version))
    assert schemas.validate(made, version) == []
    spec = made["spec"]["template"]["spec"]
    assert "initContainers" not in spec, "each would add a second to every step"
    template = made["spec"]["template"] | {"spec": spec | {"initContainers": []}}
    assert breaches(template) == []
    (container,) = spec["containers"]
    assert container["args"] == ["tandem", "rank-agent"]
    assert not [key for key in container if key.endswith("Probe")]
    limits = container["resources"]["limits"]
    gpus = {"one node": "1", "cpu": None}.get(name, "4")
    assert limits.get("nvidia.com/gpu") == gpus
    shm = next(v["emptyDir"] for v in spec["volumes"] if v["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert quantity(limits["memory"]) == quantity("64Gi") + quantity(shm["sizeLimit"])


@CASES
def test_only_the_runner_has_a_token_and_few_rights(name):
    rendered = of(SETS[name])
    role, binding = rendered.one("Role"), rendered.one("RoleBinding")
    (subject,) = binding["subjects"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    for _, pod in rendered.pods():
        runner = any(c["name"] == "trainer" for c in pod["spec"]["containers"])
        assert pod["spec"]["automountServiceAccountToken"] == runner
        assert (pod["spec"]["serviceAccountName"] == subject["name"]) == runner
    spec = job(rendered)["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] != subject["name"]
    rights = {
        (verb, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }
    queue = {("list", "workloads")} if name in ("everything", "queue") else set()
    assert rights == queue | {
        *((verb, "jobs") for verb in ("create", "get", "list", "delete")),
        ("list", "pods"),
        ("list", "events"),
        ("get", "statefulsets"),
    }
    (stateful,) = (rule for rule in role["rules"] if "statefulsets" in rule["resources"])
    assert stateful["resourceNames"] == ["a-tandem-trainer"]
    assert not {o["kind"] for o in rendered.objects} & {"ClusterRole", "ClusterRoleBinding"}


def test_an_existing_account_of_the_runner():
    values = merged(SETS["jobs"], at("trainer.runner.serviceAccountName", "mine"))
    rendered = of(values)
    assert rendered.all("Role") == rendered.all("RoleBinding") == []
    assert pod_of(rendered, "trainer")["spec"]["serviceAccountName"] == "mine"


def test_kueue_admits_the_jobs_and_not_the_runner():
    rendered = of(SETS["queue"])
    labels = job(rendered)["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    for kind, expected in (("trainer", None), ("inference", "research")):
        stateful = rendered.one("StatefulSet", f"-{kind}")
        assert stateful["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == expected


def test_placement_is_that_of_the_jobs():
    placed = {
        "trainer": {
            "nodeSelector": {"pool": "gpus"},
            "runtimeClassName": "nvidia",
            "priorityClassName": "high",
            "podAnnotations": {"kueue.x-k8s.io/podset-required-topology": "block"},
            "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "extraInitContainers": [{"name": "side", "image": "x", "restartPolicy": "Always"}],
        },
        "controller": {"nodeSelector": {"pool": "small"}},
    }
    rendered = of(merged(SETS["jobs"], placed))
    template = job(rendered)["spec"]["template"]
    spec, runner = template["spec"], pod_of(rendered, "trainer")["spec"]
    assert (spec["nodeSelector"], runner["nodeSelector"]) == ({"pool": "gpus"}, {"pool": "small"})
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("nvidia", "high")
    assert not {"runtimeClassName", "priorityClassName"} & set(runner)
    annotations = template["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "block"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
    assert [c["name"] for c in spec["initContainers"]] == ["side"]
    for container in (spec["containers"][0], container_of(rendered, "trainer")):
        assert environment(container)["NCCL_DEBUG"] == "INFO"


def test_a_volume_of_one_node_holds_the_job_at_inference():
    rendered = of(SETS["one node"])
    spec = job(rendered)["spec"]["template"]["spec"]
    for pod in (spec, pod_of(rendered, "trainer")["spec"], pod_of(rendered, "controller")["spec"]):
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (expression,) = term["labelSelector"]["matchExpressions"]
        assert expression["values"] == ["inference"]
    (term,) = pod_of(rendered, "inference")["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert "job" in term["labelSelector"]["matchExpressions"][0]["values"]


def test_runner_and_hosts_have_the_same_settings_and_threads():
    """Threads decide the order of sums: the cores that a pod requests, divided by its ranks."""
    for cpu, gpus, threads in (("32", 8, "4"), ("500m", 1, "1"), ("4500m", 2, "2"), ("", 1, "1")):
        trainer = {"gpus": gpus, "resources": {"requests": {"cpu": cpu}}}
        rendered = of(merged(SETS["jobs"], {"trainer": trainer}))
        (container,) = job(rendered)["spec"]["template"]["spec"]["containers"]
        runner = environment(container_of(rendered, "trainer"))
        agent = environment(container)
        assert agent["OMP_NUM_THREADS"] == runner["OMP_NUM_THREADS"] == threads
        assert agent["TANDEM_TRAINER_RANKS"] == str(2 * gpus)
        own = {"TANDEM_JOB_TEMPLATE", "TANDEM_PARALLEL_JOBS", "TANDEM_ROLE"}
        own |= {"NVIDIA_VISIBLE_DEVICES"}
        assert {key: value for key, value in runner.items() if key not in own} == agent
    given = of(
        merged(SETS["jobs"], at("trainer.extraEnv", [{"name": "OMP_NUM_THREADS", "value": "7"}]))
    )
    (container,) = job(given)["spec"]["template"]["spec"]["containers"]
    assert environment(container)["OMP_NUM_THREADS"] == "7"


def test_nodes_are_kept_warm_by_restricted_pods_without_a_gpu():
    place = {"nodeSelector": {"pool": "a"}, "warmup": {"enabled": True}}
    rendered = of(merged(SETS["jobs"], {"trainer": place, "models": {"existingClaim": "m"}}))
    template = rendered.one("DaemonSet")["spec"]["template"]
    assert breaches(template) == []
    spec, of_jobs = template["spec"], job(rendered)["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"pool": "a", "nvidia.com/gpu.present": "true"}
    assert spec["tolerations"] == of_jobs["tolerations"]
    (container,) = spec["containers"]
    assert container["image"] == of_jobs["containers"][0]["image"]
    # The page cache counts as its memory, so a limit would drop the files that it reads.
    assert container["resources"] == {"requests": {"cpu": "50m", "memory": "128Mi"}}
    mounts = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert mounts == {"/data": True, "/cache": True, "/models": True, "/tmp": None}
    agent = environment(of_jobs["containers"][0])
    assert environment(container)["TANDEM_BASE_MODEL"] == agent["TANDEM_BASE_MODEL"]
    assert not of(SETS["jobs"]).all("DaemonSet")


def test_only_the_jobs_pods_mount_the_claim_of_their_kernels():
    rendered = of(merged(SETS["jobs"], {"trainer": {"kernels": {"existingClaim": "kernels"}}}))
    of_job = job(rendered)["spec"]["template"]["spec"]["volumes"]
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in of_job
        if "persistentVolumeClaim" in volume
    }
    assert claims["private-cache"] == "kernels"
    volumes = [template["spec"].get("volumes") for _, template in rendered.pods()]
    assert volumes
    assert "kernels" not in str(volumes)


@pytest.mark.parametrize("name", ["jobs", "everything"])
def test_whom_jobs_and_runner_reach(name):
    rendered = of(SETS[name])
    found = World(rendered)
    template = job(rendered)["spec"]["template"]
    pods = {
        "job": Pod.of("job", NAMESPACE, template),
        "other host": Pod.of("other host", NAMESPACE, template),
        **found.own,
    }
    reaches = found.network.reaches
    for one, other in (("job", "other host"), ("job", "inference"), ("inference", "job")):
        assert reaches(pods[one], pods[other], NCCL), f"{one} to {other}"
    for stranger in (*STRANGERS.values(), *found.others.values(), pods["trainer"]):
        assert not reaches(stranger, pods["job"], NCCL), stranger
    assert not reaches(pods["controller"], pods["job"], NCCL)
    server = Pod("API server", address="10.0.0.1")
    for port in (443, 6443):
        callers = {n for n, pod in pods.items() if reaches(pod, server, port)}
        hub = {"job", "other host", "inference", "controller"} if port == 443 else set()
        assert callers == {"trainer"} | hub
    assert reaches(pods["job"], INTERNET, 443)
    assert not reaches(pods["inference"], pods["trainer"], NCCL)


def test_the_runner_starts_again_for_another_template_and_no_other_chart_version(tmp_path):
    key = "tandem/job-template"

    def digest(rendered: Rendered) -> str:
        return pod_of(rendered, "trainer")["metadata"]["annotations"][key]

    first = of(SETS["jobs"])
    assert digest(first) != digest(of(merged(SETS["jobs"], at("trainer.tmpSize", "3Gi"))))
    other = charts.other_version(tmp_path, "0.2.0")
    assert digest(first) == digest(charts.render(SETS["jobs"], release="a", chart=other))


def test_the_admission_policy_holds_the_runner_to_the_template():
    """Schemas check the policy, and its expressions name the template's parts. No control plane
    evaluates the policy here."""
    values = merged(SETS["jobs"], at("trainer.runner.admissionPolicy", True))
    rendered = of(values)
    policy = rendered.one("ValidatingAdmissionPolicy")
    binding = rendered.one("ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    text = json.dumps(policy["spec"])
    spec = job(rendered)["spec"]["template"]["spec"]
    account = pod_of(rendered, "trainer")["spec"]["serviceAccountName"]
    assert f"system:serviceaccount:{NAMESPACE}:{account}" in text
    for part in (spec["containers"][0]["image"], spec["serviceAccountName"], "a-tandem-data"):
        assert part in text
    assert {v["name"] for v in spec["volumes"]} <= set(re.findall(r"[a-z-]+", text))
    assert "hostPath" in text
    mounts = {"extraVolumes": [{"name": "fast", "hostPath": {"path": "/fast"}}]}
    rendered = of(merged(values, {"trainer": mounts}))
    text = json.dumps(rendered.one("ValidatingAdmissionPolicy")["spec"])
    assert "hostPath" not in text, "the template has one"
