"""Docker Compose and the Helm chart start the same programs with the same settings."""

import re
from decimal import Decimal
from typing import Any

import pytest
from lightkube.utils.quantity import parse_quantity

from compose_stack import CPU, MAIN, ROOT, SHARED, everything, require_compose
from helm.goldens import NAMES, rendered
from helm.pods import ROLES, Object, container_of, environment, mounted, pod_of
from tandem.config import Settings
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise.supervisord import programs_of, stop_seconds

BOTH_DEVICES = pytest.mark.parametrize(
    ("name", "files"), [("defaults", (MAIN,)), ("cpu", (MAIN, CPU))]
)
DEFAULTS = {f"TANDEM_{name.upper()}": str(f.default) for name, f in Settings.model_fields.items()}
"""Environment variable → the default of its setting."""
OF_COMPOSE = {"TANDEM_TRAINER_DEVICES", "TANDEM_INFERENCE_DEVICES"}
"""Variables that only Compose sets, because Kubernetes itself chooses the devices."""
OF_CLUSTERS = {"NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG"} | {f"v{n}" for n in (174, 235, 287)}
"""Variables that only the chart sets. The controller's image sets NVIDIA_VISIBLE_DEVICES too, but a
cluster may override an image's variables. The other variables are those of users in the goldens."""
OF_A_POD = {
    # Under Compose, `tandem up` gives each inference server its name.
    "TANDEM_REPLICA",
    # Under Compose, docker-compose.hosts.yml sets these four variables.
    *("TANDEM_EXECUTOR", "TANDEM_TRAINER_HOSTS", "TANDEM_START_SECONDS", "TANDEM_ORPHAN_SECONDS"),
    # This setting is about pods of jobs. Compose has no pods of jobs.
    "TANDEM_LINGER_SECONDS",
    # The chart sets these four variables for the pod of a runner without ranks. Under Compose the
    # runner is in the trainer's image. The trainer's image sets TANDEM_ROLE. A program in this
    # image has one thread per core of the container.
    *("TANDEM_JOB_TEMPLATE", "TANDEM_PARALLEL_JOBS", "TANDEM_ROLE", "OMP_NUM_THREADS"),
}
# The images set the directories and the hosts. The chart's Services and NetworkPolicies fix the
# ports. Secrets are files. The images have none of Slurm's programs. TANDEM_DOCKER is ART's setting
# for TANDEM_LAUNCH=torchrun. TANDEM_HOST_INDEX and TANDEM_HOST_ADDRESS are settings of hosts
# without Kubernetes.
WITHOUT_VALUE = OF_COMPOSE | {
    f"TANDEM_{name}"
    for name in (
        *("ROOT", "LOG_DIR", "METRICS_HOST", "CONTROLLER_HOST", "INFERENCE_HOST"),
        *("METRICS_PORT", "CONTROLLER_PORT", "INFERENCE_PORT", "API_KEY", "ADMIN_TOKEN"),
        *("SLURM_ARGS", "DOCKER", "HOST_INDEX", "HOST_ADDRESS"),
    )
}
"""Settings without a value of their own in the chart. Only `extraEnv` can set them."""


@pytest.fixture(scope="module", autouse=True)
def compose() -> None:
    require_compose()


def services(*files: str) -> dict[str, Any]:
    """The services in these Compose files, if each variable has its default."""
    mode = {"TANDEM_GPU_MODE": "shared"} if SHARED in files else {}
    return everything(*files, TANDEM_TAG="", **mode)["services"]


def found(name: str, role: str) -> tuple[Object, Object]:
    """The pod of a role in a golden, and the role's container."""
    return pod_of(rendered(name).pods(), role), container_of(rendered(name).pods(), role)


def variables(name: str, role: str) -> dict[str, str]:
    """The variables of a role's program in a golden."""
    return {} if (name, role) == ("no-trainer", "trainer") else environment(found(name, role)[1])


@pytest.mark.slow
def test_compose_and_chart_set_the_same_variables():
    """The goldens together contain every variable that the chart can set, because every value of
    the chart is set in a golden."""
    names = set()
    for role in ROLES:
        some = [services(*files) for files in ((MAIN,), (MAIN, CPU), (MAIN, SHARED))]
        compose = {name for one in some for name in one[role]["environment"]}
        chart = {variable for name in NAMES for variable in variables(name, role)}
        assert compose - OF_COMPOSE - OF_CLUSTERS == chart - OF_CLUSTERS - OF_A_POD
        names |= {variable for variable in chart if variable.startswith("TANDEM_")}
    assert DEFAULTS.keys() ^ (names - {"TANDEM_ROLE"}) == WITHOUT_VALUE


def comparable(environment: dict[str, str]) -> dict[str, str]:
    """The variables that have a value. If a value is a file's path, its directory is removed. If a
    value is the URL of another container, its host is replaced by `host`."""
    given = {variable: text for variable, text in environment.items() if text}
    for variable, text in given.items():
        if variable.endswith(("_FILE", "_PATH")):
            given[variable] = text.rpartition("/")[2]
        elif variable.endswith("_URL"):
            given[variable] = re.sub(r"//[a-z][^:]*", "//host", text)
    return given


@pytest.mark.parametrize("role", ROLES)
@BOTH_DEVICES
def test_both_have_the_same_defaults(name, files, role):
    chart = comparable(variables(name, role))
    compose = comparable(services(*files)[role]["environment"])
    own = {"TANDEM_LOG_FORMAT": "json"}
    if name == "defaults":
        own |= {"TANDEM_DEVICE": "cuda", "TANDEM_BASE_MODEL": "Qwen/Qwen3-8B"}
    skipped = OF_CLUSTERS if name == "defaults" or role == "controller" else set()
    different = (DEFAULTS | chart).items() ^ (DEFAULTS | compose | own).items()
    assert {variable for variable, _ in different} <= skipped


@BOTH_DEVICES
def test_only_its_own_container_can_write_the_code_that_a_container_loads(name, files):
    """torch, Triton, vLLM and Tandem load compiled kernels as code. Some of the kernels' files are
    pickles."""
    set_there = r"(?:CACHE_DIR|CACHE_ROOT|CONFIG_ROOT|WORKSPACE_BASE|TMPDIR)=(\S+)"
    paths = re.findall(set_there, (ROOT / "Dockerfile").read_text())
    assert all(path.startswith("/private-cache") for path in paths)
    mounts = [mount for one in services(*files).values() for mount in one.get("volumes", [])]
    private = {mount["source"] for mount in mounts if mount["target"] == "/private-cache"}
    assert len([mount for mount in mounts if mount["source"] in private]) == len(private) == 2
    for role in ("trainer", "inference"):
        assert "emptyDir" in mounted(*found(name, role))["/private-cache"]


@pytest.mark.parametrize("role", ROLES)
@BOTH_DEVICES
def test_images_commands_users_ports_and_grace_periods(name, files, role):
    compose, (pod, container) = services(*files), found(name, role)
    service, preflight, user = compose[role], compose["preflight"], pod["spec"]["securityContext"]
    assert container["image"] == service["image"]
    assert not {"command", "args", "workingDir"} & set(container), "the image's entrypoint"
    assert not any(service.get(key) for key in ("command", "entrypoint", "working_dir"))
    inits = [(init["image"], init["args"]) for init in pod["spec"]["initContainers"]]
    options = ["--role", role, "--devices-granted"]
    before = [compose["tiny-model"]] if "tiny-model" in compose else []
    tiny = [(one["image"], one["entrypoint"]) for one in before]
    assert inits == [*tiny, (preflight["image"], preflight["command"] + options)]
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


@pytest.mark.parametrize("role", ROLES)
@BOTH_DEVICES
def test_scratch_volumes_and_memory(name, files, role):
    service, (pod, container) = services(*files)[role], found(name, role)
    volumes = mounted(pod, container)

    def size(path: str) -> Decimal:
        return parse_quantity(volumes[path]["emptyDir"]["sizeLimit"])

    assert {m["target"] for m in service.get("volumes", [])} <= {*volumes, "/models"}
    for path, least in (entry.split(":mode=1777,size=") for entry in service["tmpfs"]):
        assert size(path) >= parse_quantity(least.replace("m", "Mi").replace("g", "Gi")), path
    if name == "defaults" and role == "controller":
        limit = parse_quantity(container["resources"]["limits"]["memory"])
        assert limit == int(service["mem_limit"])
    elif name == "defaults":
        assert size("/dev/shm") == int(service["shm_size"])
