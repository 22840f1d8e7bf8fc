"""Rules that hold for every golden, whatever the chart's output looks like. They are about rights
of pods, secrets, selectors, GPUs, volumes, probes, routes, and monitors."""

import json
from pathlib import PurePosixPath

import pytest
import yaml

from helm import charts, goldens
from helm.goldens import NAMES, SECRET, SECRETS, rendered, value
from helm.pods import (
    COMPONENT,
    INSTANCE,
    NAME,
    ROLES,
    Object,
    component,
    containers,
    environment,
    pod_of,
    pod_template,
    quantity,
    selects,
)
from tandem.vllm_client.names import PUBLIC_PATHS, ROLLOUT_PATHS

GOLDENS = pytest.mark.parametrize("name", NAMES)
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
KINDS_OF_VOLUMES = {"name", "emptyDir", "persistentVolumeClaim", "projected", "configMap"}
HOST_FIELDS = {"hostNetwork", "hostPID", "hostIPC", "hostAliases", "sysctls", "hostUsers"}


def own(name: str) -> list[Object]:
    """The pods that the chart renders for the golden `name`."""
    return rendered(name).pods()


def chart_containers(pod: Object) -> list[Object]:
    """The containers of a pod, without those that users add. The rules do not hold for containers
    of users."""
    return [c for c in containers(pod) if c["image"] not in ("busybox", "x")]


@GOLDENS
def test_pods_are_restricted(name):
    expected = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if not value(name, "podSecurity.assignedUser"):
        user = value(name, "podSecurity.runAsUser")
        expected |= {"runAsUser": user, "runAsGroup": 0, "fsGroup": 0}
    for pod in own(name):
        spec = pod["spec"]
        context = {k: v for k, v in spec["securityContext"].items() if k != "fsGroupChangePolicy"}
        assert context == expected
        assert not HOST_FIELDS & set(spec)
        assert spec["enableServiceLinks"] is False
        assert {key for volume in spec["volumes"] for key in volume} <= KINDS_OF_VOLUMES
        for container in chart_containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, container["name"]
            assert not [port for port in container.get("ports", []) if "hostPort" in port]


@GOLDENS
def test_only_the_runner_of_jobs_has_a_token_and_few_rights(name):
    found, jobs = rendered(name), value(name, "trainer.executor") == "kubernetes"
    runner = pod_of(own(name), "trainer")["spec"] if jobs else None
    for pod in own(name):
        assert pod["spec"]["automountServiceAccountToken"] == (pod["spec"] is runner)
        if runner and pod["spec"] is not runner:
            assert pod["spec"]["serviceAccountName"] != runner["serviceAccountName"]
    assert not any(o["automountServiceAccountToken"] for o in found.all("ServiceAccount"))
    own_account = jobs and not value(name, "trainer.runner.serviceAccountName")
    kinds = [o["kind"] for o in found.objects if "Role" in o["kind"] or o["kind"] == "Secret"]
    assert kinds == (["Role", "RoleBinding"] if own_account else [])
    if own_account:
        (subject,) = found.one("RoleBinding")["subjects"]
        assert subject["name"] == runner["serviceAccountName"]
        rights = {
            f"{verb} {resource} {rule.get('resourceNames', '')}".strip()
            for rule in found.one("Role")["rules"]
            for verb in rule["verbs"]
            for resource in rule["resources"]
        }
        queue = {"list workloads"} if value(name, "kueue.queue") else set()
        jobs = {f"{verb} jobs" for verb in ("create", "get", "list", "delete")}
        own_set = "get statefulsets ['a-tandem-trainer']"
        assert rights == queue | jobs | {"list pods", "list events", own_set}


@GOLDENS
def test_every_container_has_requests_and_a_limit_of_memory(name):
    for pod in own(name):
        for container in chart_containers(pod):
            requests, limits = (container["resources"].get(k, {}) for k in ("requests", "limits"))
            where = component(pod), container["name"]
            assert quantity(requests["memory"]) > 0, where
            if name != "no-trainer":
                # In the golden `no-trainer`, users have emptied a limit and a request of tests.
                assert requests["cpu"], where
                assert component(pod) == "warmup" or limits["memory"], where


@GOLDENS
def test_only_trainer_and_inference_get_gpus(name):
    cuda, jobs = value(name, "device") == "cuda", value(name, "trainer.executor") == "kubernetes"
    claim = value(name, "gpuMode") == "shared" and value(name, "shared.via") == "claim"
    for pod in own(name):
        for container in chart_containers(pod):
            role, resources = container["name"], container["resources"]
            role = "trainer" if component(pod) == "job" else role
            gpu = cuda and role in ROLES[1:] and not (jobs and component(pod) == "trainer")
            resource = value(name, f"{role}.gpuResource") if gpu else "nvidia.com/gpu"
            asked = resources.get("limits", {}).get(resource)
            assert asked == (str(value(name, f"{role}.gpus")) if gpu and not claim else None)
            assert bool(resources.get("claims")) == (gpu and claim)
            hidden = environment(container).get("NVIDIA_VISIBLE_DEVICES") == "void"
            assert hidden == (not gpu), (component(pod), role)


@GOLDENS
def test_secrets_are_files_and_only_inference_gets_the_admin_token(name):
    everything = json.dumps(rendered(name).objects) + rendered(name).notes
    assert not [v for v in (*SECRETS.values(), *SECRET["data"].values()) if v in everything]
    for pod in own(name):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in chart_containers(pod):
            assert "envFrom" not in container
            assert {v["name"] for v in container["env"] if "valueFrom" in v} <= {"TANDEM_REPLICA"}
            files = {}
            for mount in container["volumeMounts"]:
                if projected := volumes[mount["name"]].get("projected"):
                    assert (mount["readOnly"], projected["defaultMode"]) == (True, 0o440)
                    for secret in (s["secret"] for s in projected["sources"] if "secret" in s):
                        optional = secret.get("optional", False)
                        for item in secret["items"]:
                            assert optional == (item["path"] == "hf_token")
                            files[f"{mount['mountPath']}/{item['path']}"] = item["path"]
            named = {
                text
                for key, text in environment(container).items()
                if key.endswith("_FILE") or key == "HF_TOKEN_PATH"
            }
            assert named <= set(files), (component(pod), container["name"])
            if container["name"] in ROLES:
                admin = container["name"] == "inference"
                assert ("TANDEM_ADMIN_TOKEN_FILE" in environment(container)) == admin
            if "admin_token" in files.values():
                assert component(pod) in ("inference", "engine")
                of_inference = "inference" in container.get("args", [])
                assert of_inference or container["name"].startswith(("inference", "tiny-model"))


@GOLDENS
def test_a_selector_selects_the_pods_of_one_component_of_its_release(name):
    """This holds whatever labels users give. The labels in the golden `everything` are those of
    other pods."""
    releases = [rendered(name), rendered(name, "b")]
    pods = [pod["metadata"]["labels"] for one in releases for pod in one.pods()]
    assert all({NAME, INSTANCE, COMPONENT} <= labels.keys() for labels in pods)
    components = [component(pod) for pod in releases[0].pods()]
    assert len(set(components)) == len(components)
    for obj in releases[0].objects:
        selector = obj.get("spec", {}).get("selector")
        if selector is None or obj["kind"] == "ServiceMonitor":
            continue
        selector = {"matchLabels": selector} if obj["kind"] == "Service" else selector
        found = [labels for labels in pods if selects(selector, labels)]
        assert {labels[INSTANCE] for labels in found} == {"a"}, obj["metadata"]["name"]
        assert len({labels[COMPONENT] for labels in found}) == 1, obj["metadata"]["name"]
        if template := pod_template(obj):
            assert selects(selector, template["metadata"]["labels"])
    if "fullnameOverride" not in goldens.values(name):
        names = [{(o["kind"], o["metadata"]["name"]) for o in one.objects} for one in releases]
        shared = {("ConfigMap", "v339")} if name == "every-value" else set()
        assert names[0] & names[1] == shared


@GOLDENS
def test_no_volume_is_mounted_inside_another_and_images_can_write_their_own_files(name):
    """For a volume inside another volume, the container runtime would make the directory as root.
    On NFS root may have no rights."""
    for pod in own(name):
        for container in chart_containers(pod):
            mounts = {PurePosixPath(mount["mountPath"]) for mount in container["volumeMounts"]}
            assert not [path for path in mounts if set(path.parents) & mounts], container["name"]
            # /private-cache has TMPDIR and the caches of the images with torch.
            torch = "-controller" not in container["image"] and name not in ("existing", "open")
            if torch and component(pod) not in ("proxy", "warmup"):
                assert PurePosixPath("/private-cache") in mounts, container["name"]


@GOLDENS
def test_pods_share_a_node_if_a_volume_is_for_one_and_one_of_them_chooses_it(name):
    """All pods of a release must be on the node of one pod, the pod of the leading component. The
    leading component is the one that is hardest to place among the components that have a pod. No
    pod follows a test pod."""
    together = "ReadWriteOnce" in (
        value(name, "data.accessMode"),
        value(name, "cache.type") == "claim" and value(name, "cache.accessMode"),
    )
    leader = "trainer"
    if value(name, "gpuMode") == "shared":
        leader = "engine"
    elif value(name, "trainer.executor") == "kubernetes" or value(name, "trainer.replicas") == 0:
        leader = "inference"
    trainers = value(name, "trainer.tolerations") if value(name, "device") == "cuda" else []
    for pod in own(name):
        affinity = pod["spec"].get("affinity", {}).get("podAffinity", {}).get(REQUIRED, [])
        terms = [term for term in affinity if term["topologyKey"] == "kubernetes.io/hostname"]
        assert len(terms) == together, component(pod)
        for term in terms:
            assert term["labelSelector"]["matchLabels"] == {NAME: "tandem", INSTANCE: "a"}
            (among,) = term["labelSelector"]["matchExpressions"]
            chosen = set(among["values"])
            assert leader in chosen
            assert not [one for one in chosen if one.startswith("test-")]
            if component(pod) not in {leader} and not component(pod).startswith("test-"):
                paused = name == "one-node-paused" and component(pod) == "trainer"
                assert chosen == {leader} or paused, component(pod)
            assert all(one in pod["spec"].get("tolerations", []) for one in trainers)


def prefixes(route: Object) -> list[tuple[str, str]]:
    """(path prefix, Service) for each rule by which an Ingress or an HTTPRoute lets requests in."""
    if route["kind"] == "Ingress":
        paths = [path for rule in route["spec"]["rules"] for path in rule["http"]["paths"]]
        assert {path["pathType"] for path in paths} == {"Prefix"}
        return [(path["path"], path["backend"]["service"]["name"]) for path in paths]
    rules = [(m["path"], rule) for rule in route["spec"]["rules"] for m in rule["matches"]]
    assert {path["type"] for path, _ in rules} == {"PathPrefix"}
    return [(path["value"], rule["backendRefs"][0]["name"]) for path, rule in rules]


@GOLDENS
@pytest.mark.parametrize(("kind", "section"), [("Ingress", "ingress"), ("HTTPRoute", "gateway")])
def test_only_public_paths_are_routed(name, kind, section):
    found = [entry for route in rendered(name).all(kind) for entry in prefixes(route)]
    assert bool(found) == value(name, f"{section}.enabled")
    routed = {path for path, service in found if service.endswith("-inference")}
    assert {path for path, service in found if service.endswith("-controller")} <= {
        "/v1",
        "/api/v1",
    }
    public = {path for path in PUBLIC_PATHS if path.startswith("/v1/")} | ROLLOUT_PATHS
    closed = {"/", "/metrics", "/pause", "/tokenize", "/detokenize", "/update_weights", "/rollouts"}
    for path in public | closed if found else ():
        reached = any(f"{path}/".startswith(f"{prefix}/") for prefix in routed)
        assert reached == (path in public), path


PROMETHEUS = yaml.safe_load((goldens.IMAGES / "prometheus" / "prometheus.yml").read_text())
SCRAPED = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}


@GOLDENS
def test_each_monitor_finds_the_one_port_of_its_job(name):
    found, kind = rendered(name), value(name, "monitoring.monitors.kind")
    monitors = found.all("PodMonitor") + found.all("ServiceMonitor")
    assert len(monitors) == (0 if kind == "none" else len(SCRAPED))
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        labels = {r["targetLabel"]: r["replacement"] for r in endpoint["relabelings"][:2]}
        # Prometheus' jobs without an address scrape each vLLM of the container. In the chart a pod
        # has one vLLM.
        static = SCRAPED[labels["job"]].get("static_configs", [{"targets": [":8000"]}])
        port = int(static[0]["targets"][0].rpartition(":")[2])
        selected = [(monitor["spec"]["selector"], endpoint["port"])]
        if monitor["kind"] == "ServiceMonitor":
            selected = [
                ({"matchLabels": service["spec"]["selector"]}, listening["targetPort"])
                for service in found.all("Service")
                if selects(monitor["spec"]["selector"], service["metadata"]["labels"])
                for listening in service["spec"]["ports"]
                if listening["name"] == endpoint["port"]
            ]
        ((selector, declared),) = selected
        (pod,) = (p for p in own(name) if selects(selector, p["metadata"]["labels"]))
        ports = {p["name"]: p["containerPort"] for c in containers(pod) for p in c.get("ports", [])}
        assert ports[declared] == port, labels


@pytest.mark.parametrize("values", ["everything", "shared-claim", "jobs"])
def test_names_of_long_releases_fit_and_differ(values):
    made = [charts.render(goldens.values(values), release="r" * 50 + end) for end in ("one", "two")]
    names = [{(o["kind"], o["metadata"]["name"]) for o in one.objects} for one in made]
    assert not names[0] & names[1]
    assert not [name for kind, name in names[0] if kind != "ConfigMap" and len(name) > 63]
