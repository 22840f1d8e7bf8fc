"""Rules that the chart's output follows in every golden. The rules are about rights of pods,
secrets, GPUs, selectors, routes, and monitors."""

import json

import pytest
import yaml

from helm import charts, goldens, pods, schemas
from helm.charts import NEWEST
from helm.goldens import NAMES, SECRET, SECRETS, rendered, value
from helm.pods import COMPONENT, INSTANCE, Object, component, environment, selects
from tandem.vllm_client.names import PUBLIC_PATHS, ROLLOUT_PATHS

GOLDENS = pytest.mark.parametrize("name", NAMES)
KINDS_OF_VOLUMES = {"name", "emptyDir", "persistentVolumeClaim", "projected", "configMap"}
HOST_FIELDS = {"hostNetwork", "hostPID", "hostIPC", "hostAliases", "sysctls", "hostUsers"}
RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def own(name: str) -> list[tuple[Object, Object]]:
    """(pod, container) for the containers of a golden, without containers that users add. The rules
    do not hold for containers that users add."""
    found = [(pod, c) for pod in rendered(name).pods() for c in pods.containers(pod)]
    return [(pod, c) for pod, c in found if c["image"] not in ("busybox", "x")]


@GOLDENS
def test_pods_are_restricted(name):
    for pod, container in own(name):
        spec = pod["spec"]
        assert spec["securityContext"].items() >= RESTRICTED.items()
        assert ("runAsUser" in spec["securityContext"]) != value(name, "podSecurity.assignedUser")
        assert not HOST_FIELDS & set(spec)
        assert {key for volume in spec["volumes"] for key in volume} <= KINDS_OF_VOLUMES
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not [port for port in container.get("ports", []) if "hostPort" in port]


@GOLDENS
def test_a_container_hides_gpus_for_which_it_does_not_ask(name):
    of_gpus = {value(name, f"{role}.gpuResource") for role in ("trainer", "inference")}
    for pod, container in own(name):
        resources = container["resources"]
        asks = bool(of_gpus & resources.get("limits", {}).keys() or "claims" in resources)
        hidden = environment(container).get("NVIDIA_VISIBLE_DEVICES") == "void"
        assert hidden != asks, (component(pod), container["name"])


@GOLDENS
def test_only_the_runner_of_jobs_has_a_token_and_few_rights(name):
    found, jobs = rendered(name), value(name, "trainer.executor") == "kubernetes"
    runner = pods.pod_of(found.pods(), "trainer")["spec"] if jobs else {}
    for spec in (pod["spec"] for pod in found.pods()):
        assert spec["automountServiceAccountToken"] == (spec is runner)
        account_of_runner = spec["serviceAccountName"] == runner.get("serviceAccountName")
        assert account_of_runner == (spec is runner)
    if not jobs or value(name, "trainer.runner.serviceAccountName"):
        assert not found.all("Role") + found.all("RoleBinding")
        return
    (subject,) = found.one("RoleBinding")["subjects"]
    assert subject["name"] == runner["serviceAccountName"]
    rules = found.one("Role")["rules"]
    rights = {resource: rule["verbs"] for rule in rules for resource in rule["resources"]}
    assert rights.pop("workloads", None) == (["list"] if value(name, "kueue.queue") else None)
    assert rights.pop("jobs") == ["create", "get", "list", "delete"]
    assert rights == {"pods": ["list"], "events": ["list"], "statefulsets": ["get"]}


@GOLDENS
def test_secrets_are_files_and_only_inference_gets_the_admin_token(name):
    everything = json.dumps(rendered(name).objects) + rendered(name).notes
    assert not [v for v in (*SECRETS.values(), *SECRET["data"].values()) if v in everything]
    for pod, container in own(name):
        files = {
            f"{path}/{item['path']}"
            for path, volume in pods.mounted(pod, container).items()
            for source in volume.get("projected", {}).get("sources", [])
            for item in source.get("secret", {}).get("items", [])
        }
        variables = environment(container).items()
        named = {v for k, v in variables if k.endswith("_FILE") or k == "HF_TOKEN_PATH"}
        assert named <= files, (component(pod), container["name"])
        of_inference = component(pod) == "inference" or container["name"].startswith("inference")
        assert of_inference or "/etc/tandem/secrets/admin_token" not in files


@pytest.mark.sample(8)
@GOLDENS
def test_a_selector_selects_the_pods_of_one_component_of_its_release(name):
    """A selector selects the right pods, even if users add labels to pods. In the golden
    `everything`, users add the labels of other pods."""
    releases = [rendered(name), rendered(name, "b")]
    labels = [pod["metadata"]["labels"] for one in releases for pod in one.pods()]
    assert len({(one[INSTANCE], one[COMPONENT]) for one in labels}) == len(labels)
    for obj in releases[0].objects:
        selector = obj.get("spec", {}).get("selector")
        if selector is None or obj["kind"] == "ServiceMonitor":
            continue
        selector = {"matchLabels": selector} if obj["kind"] == "Service" else selector
        (selected,) = (one for one in labels if selects(selector, one))
        assert selected[INSTANCE] == "a"
        if template := pods.pod_template(obj):
            assert template["metadata"]["labels"] == selected


def test_only_public_paths_are_routed():
    """The golden `everything` shows that Ingresses and HTTPRoutes have the same paths."""
    (rule,) = rendered("everything").one("HTTPRoute", "-inference")["spec"]["rules"]
    routed = [f"{match['path']['value']}/" for match in rule["matches"]]
    public = {path for path in PUBLIC_PATHS if path.startswith("/v1/")} | ROLLOUT_PATHS
    closed = {"/", "/metrics", "/pause", "/tokenize", "/detokenize", "/update_weights", "/rollouts"}
    reached = {path for path in public | closed if f"{path}/".startswith(tuple(routed))}
    assert reached == public


PROMETHEUS = yaml.safe_load((goldens.IMAGES / "prometheus" / "prometheus.yml").read_text())
SCRAPED = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}


@GOLDENS
def test_each_monitor_finds_the_one_port_of_its_job(name):
    found = rendered(name)
    monitors = found.all("PodMonitor") + found.all("ServiceMonitor")
    assert len(monitors) in (0, len(SCRAPED))
    for monitor in monitors:
        (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        job = endpoint["relabelings"][0]["replacement"]
        # A Prometheus job without an address scrapes each vLLM of the container. In the chart a pod
        # has one vLLM.
        (static,) = SCRAPED[job].get("static_configs", [{"targets": [":8000"]}])
        port = int(static["targets"][0].rpartition(":")[2])
        selector, declared = monitor["spec"]["selector"], endpoint["port"]
        if monitor["kind"] == "ServiceMonitor":
            services = found.all("Service")
            (service,) = (s for s in services if selects(selector, s["metadata"]["labels"]))
            targets = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
            selector, declared = {"matchLabels": service["spec"]["selector"]}, targets[declared]
        (pod,) = (p for p in found.pods() if selects(selector, p["metadata"]["labels"]))
        assert pods.ports(pod)[declared] == port, job


@pytest.mark.parametrize("values", ["everything", "shared-claim", "jobs", "replicas"])
def test_names_of_long_releases_fit_and_differ(values):
    made = [charts.render(goldens.values(values), release="r" * 50 + end) for end in ("one", "two")]
    names = [{(o["kind"], o["metadata"]["name"]) for o in one.objects} for one in made]
    assert not names[0] & names[1]
    assert not [problem for obj in made[0].objects for problem in schemas.validate(obj, NEWEST)]
