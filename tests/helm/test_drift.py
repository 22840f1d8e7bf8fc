"""Docker Compose and the Helm chart start the same programs with the same settings."""

import re
from typing import Any

import pytest
from pydantic import TypeAdapter

from compose_stack import CPU, MAIN, ROOT, SHARED, everything, require_compose
from helm import goldens
from helm.charts import defaults, leaves
from helm.goldens import NAMES, rendered
from helm.pods import ROLES, container_of, environment, pod_of, quantity, volume
from helm.test_docs import documented
from tandem.config import Settings
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise.supervisord import programs_of, stop_seconds

pytestmark = pytest.mark.usefixtures("compose")
BOTH_DEVICES = pytest.mark.parametrize(
    ("name", "files"), [("defaults", (MAIN,)), ("cpu", (MAIN, CPU))]
)
FIELDS = {f"TANDEM_{name.upper()}": field for name, field in Settings.model_fields.items()}
"""Environment variable → the field of its setting."""
ONLY_COMPOSE = {"TANDEM_TRAINER_DEVICES", "TANDEM_INFERENCE_DEVICES"}
"""Variables that only Compose sets, because Kubernetes itself chooses the devices."""
ONLY_CHART = {"NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG"} | {f"v{n}" for n in (174, 235, 287)}
"""Variables that only the chart sets. The controller's image sets NVIDIA_VISIBLE_DEVICES too, but a
cluster may override an image's variables. The other variables are those of users in the goldens."""
OF_A_POD = {
    # Under Compose, `tandem up` gives each inference server its name.
    "TANDEM_REPLICA",
    # Under Compose, docker-compose.hosts.yml sets these.
    *("TANDEM_EXECUTOR", "TANDEM_TRAINER_HOSTS", "TANDEM_START_SECONDS", "TANDEM_ORPHAN_SECONDS"),
    # Under Compose there are no pods of jobs that this setting could keep.
    "TANDEM_LINGER_SECONDS",
    # The chart sets these for the pod of a runner without ranks. Under Compose the runner is in the
    # trainer's image. This image has the role, and one thread per core of the container.
    *("TANDEM_JOB_TEMPLATE", "TANDEM_PARALLEL_JOBS", "TANDEM_ROLE", "OMP_NUM_THREADS"),
}
# The images set the directories and the hosts. Services and NetworkPolicies name the ports. Secrets
# are files. The images have none of Slurm's programs. The other settings have no effect in a pod,
# or are settings of hosts without Kubernetes.
WITHOUT_VALUE = ONLY_COMPOSE | {
    f"TANDEM_{name}"
    for name in (
        *("ROOT", "LOG_DIR", "METRICS_HOST", "CONTROLLER_HOST", "INFERENCE_HOST"),
        *("METRICS_PORT", "CONTROLLER_PORT", "INFERENCE_PORT", "API_KEY", "ADMIN_TOKEN"),
        *("SLURM_ARGS", "DOCKER", "HOST_INDEX", "HOST_ADDRESS"),
    )
}
"""Settings without a value of their own in the chart. Only `extraEnv` can set them."""


@pytest.fixture(scope="module")
def compose() -> None:
    require_compose()


def variables(name: str) -> dict[str, dict[str, str]]:
    """Role → variables of the role's program in a golden. The role's preflight check has the same
    variables, but no GPU."""
    pods, found = rendered(name).pods(), {}
    for role in (role for role in ROLES if role != "trainer" or name != "no-trainer"):
        found[role] = environment(container_of(pods, role))
        (preflight,) = (c for c in inits(name, role) if ["--role", role] == c["args"][2:4])
        void = {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert void | environment(preflight) == void | found[role]
    return found


def inits(name: str, role: str) -> list[dict[str, Any]]:
    """The init containers of a role's pod, without those that users have added."""
    own = pod_of(rendered(name).pods(), role)["spec"]["initContainers"]
    return [container for container in own if "args" in container]


def services(*files: str) -> dict[str, Any]:
    """The services in these Compose files, with the variables' defaults."""
    mode = {"TANDEM_GPU_MODE": "shared"} if SHARED in files else {}
    return everything(*files, TANDEM_TAG="", **mode)["services"]


def chart_variables() -> dict[str, set[str]]:
    """Role → the variables that the chart can set. They are the variables in all goldens, because
    every value of the chart is set in a golden."""
    found = [variables(name) for name in NAMES]
    return {role: {key for one in found for key in one.get(role, ())} for role in ROLES}


@pytest.mark.slow
def test_compose_and_chart_set_the_same_variables():
    chart = chart_variables()
    for role in ROLES:
        some = [services(*files) for files in ((MAIN,), (MAIN, CPU), (MAIN, SHARED))]
        compose = {name for one in some for name in one[role]["environment"]}
        assert compose - ONLY_COMPOSE - ONLY_CHART == chart[role] - ONLY_CHART - OF_A_POD
    names = {name for by_role in chart.values() for name in by_role if name.startswith("TANDEM_")}
    assert set(FIELDS) - names == WITHOUT_VALUE
    assert names - {"TANDEM_ROLE"} <= set(FIELDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_reaches_its_roles_and_no_other(name):
    """The controller also gets the topology, because it refuses what the trainer can't compute."""
    found, given = variables(name), leaves(goldens.values(name))
    comments = {v.name: v.comment for v in documented() if v.path[-2:-1] == ("settings",)}
    assert len(comments) > 15
    for path, comment in comments.items():
        variable = re.match(r"TANDEM_\w+", comment)[0]
        roles = {path.partition(".")[0]} & set(ROLES) or set(ROLES)
        if variable.endswith(("_PARALLEL", "_TOPOLOGY")):
            roles.add("controller")
        default = leaves(defaults())[path]
        for role, env in found.items():
            assert (variable in env) == (role in roles and given.get(path, default) is not None)
            if variable in env and path in given:
                kind = TypeAdapter(FIELDS[variable].rebuild_annotation())
                assert kind.validate_strings(env[variable]) == given[path], path


@BOTH_DEVICES
def test_both_have_the_same_defaults(name, files):
    own = {
        "TANDEM_LOG_FORMAT": "json",
        "TANDEM_DEVICE": "cuda",
        "TANDEM_BASE_MODEL": goldens.values(name).get("baseModel"),
    }
    for role, chart in variables(name).items():
        service, pods = services(*files)[role], rendered(name).pods()
        compose = {key: text for key, text in service["environment"].items() if text}
        skipped = ONLY_CHART if name == "defaults" or role == "controller" else set()
        for variable in (set(chart) | set(compose)) - skipped:
            ours, theirs = chart.get(variable), compose.get(variable)
            if variable.endswith(("_FILE", "_PATH")):
                assert ours.rpartition("/")[2] == theirs.rpartition("/")[2]
            elif variable.endswith("_URL"):
                end = "http://127.0.0.1:8000" if role == "inference" else ":8000"
                assert ours.endswith(end), variable
                assert theirs.endswith(end), variable
            else:
                default = str(FIELDS[variable].default) if variable in FIELDS else "None"
                assert (ours or default) in {theirs or default, own.get(variable)}, variable
        secrets = volume(pod_of(pods, role), container_of(pods, role), "/etc/tandem/secrets")
        sources = [source["secret"]["items"] for source in secrets["projected"]["sources"]]
        paths = {item["path"] for items in sources for item in items}
        assert paths == {secret["source"] for secret in service["secrets"]}


def mounted(service: dict[str, Any]) -> dict[str, str]:
    """Mount path → the volume or the host path that a service mounts there."""
    return {mount["target"]: mount["source"] for mount in service.get("volumes", [])}


@BOTH_DEVICES
def test_only_its_own_container_can_write_the_code_that_a_container_loads(name, files):
    """torch, Triton, vLLM and Tandem load compiled kernels as code. Some of the kernels' files are
    pickles."""
    image, pods = (ROOT / "Dockerfile").read_text(), rendered(name).pods()
    set_there = r"(?:CACHE_DIR|CACHE_ROOT|CONFIG_ROOT|WORKSPACE_BASE|TMPDIR)=(\S+)"
    assert all(path.startswith("/private-cache") for path in re.findall(set_there, image))
    found = services(*files)
    caches = {role: mounted(found[role])["/private-cache"] for role in ROLES[1:]}
    for role in caches:
        private = volume(pod_of(pods, role), container_of(pods, role), "/private-cache")
        assert "emptyDir" in private
    for one, service in found.items():
        mine = {caches[one]} if one in caches else set()
        assert set(mounted(service).values()) & set(caches.values()) == mine


@BOTH_DEVICES
def test_images_commands_mounts_memory_users_ports_and_grace_periods(name, files):
    compose, pods = services(*files), rendered(name).pods()
    for role in ROLES:
        service, pod, container = compose[role], pod_of(pods, role), container_of(pods, role)
        assert container["image"] == service["image"]
        assert not {"command", "args", "workingDir"} & set(container), "the image's entrypoint"
        assert not any(service.get(key) for key in ("command", "entrypoint", "working_dir"))
        preflight = inits(name, role)[-1]
        assert preflight["image"] == compose["preflight"]["image"]
        assert preflight["args"][:2] == compose["preflight"]["command"]
        tiny = [(c["image"], c["args"]) for c in inits(name, role) if "tiny-model" in c["name"]]
        expected = [compose["tiny-model"]] if "tiny-model" in compose else []
        assert tiny == [(s["image"], s["entrypoint"]) for s in expected]

        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        sizes = (re.match(r"(.*):mode=1777,size=(\w+)", entry) for entry in service["tmpfs"])
        temporary = {match[1]: match[2] for match in sizes}
        more = {"/etc/tandem/secrets", *temporary} | {"/dev/shm"} & mounts
        assert mounts == set(mounted(service)) - {"/models"} | more
        assert ("/dev/shm" in mounts) == ("shm_size" in service)
        for path, least in temporary.items():
            size = quantity(volume(pod, container, path)["emptyDir"]["sizeLimit"])
            assert size >= quantity(least.replace("m", "Mi").replace("g", "Gi")), path
        if name == "defaults" and "shm_size" in service:
            shm = volume(pod, container, "/dev/shm")["emptyDir"]["sizeLimit"]
            assert quantity(shm) == int(service["shm_size"])
        if name == "defaults" and role == "controller":
            assert quantity(container["resources"]["limits"]["memory"]) == int(service["mem_limit"])
        user = pod["spec"]["securityContext"]
        assert f"{user['runAsUser']}:{user['runAsGroup']}" == service["user"]
        published = {port["target"] for port in service.get("ports", [])}
        assert published == {p["containerPort"] for p in container["ports"] if p["name"] == "http"}
        minutes, seconds = re.match(r"(?:(\d+)m)?(\d+)s", service["stop_grace_period"]).groups()
        programs = programs_of(Settings(device="cpu", inference_replicas=8), role)
        longest = GRACE_SECONDS if role == "controller" else stop_seconds(programs) + 9
        assert 60 * int(minutes or 0) + int(seconds) > longest
        hook = container.get("lifecycle", {}).get("preStop")
        pause = int(hook["exec"]["command"][-1]) if hook else 0
        assert pod["spec"]["terminationGracePeriodSeconds"] > pause + longest - 9
