"""Compose and chart start the same programs with the same settings."""

import re
from functools import cache
from typing import Any

import pytest

from compose_stack import CPU, MAIN, ROOT, SHARED, everything, require_compose
from helm import matrix
from helm.charts import Rendered, merged
from helm.matrix import ROLES, VALUES, at
from helm.pods import quantity
from helm.renders import case, container_of, environment, of, pod_of, preflight_of, volume
from tandem.config import Settings
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise.supervisord import programs_of, stop_seconds

pytestmark = pytest.mark.usefixtures("compose")
BOTH_DEVICES = pytest.mark.parametrize(
    ("name", "files"), [("defaults", (MAIN,)), ("values-cpu.yaml", (MAIN, CPU))]
)
FIELDS = {f"TANDEM_{name.upper()}": field for name, field in Settings.model_fields.items()}
"""Variable → the setting's field."""


@pytest.fixture(scope="module")
def compose() -> None:
    require_compose()


OTHER_VALUES: dict[str, tuple[Any, dict[str, str]]] = {
    "baseModel": ({"baseModel": "models/other"}, {"TANDEM_BASE_MODEL": "models/other"}),
    "device": ({"device": "cpu"}, {"TANDEM_DEVICE": "cpu", "NVIDIA_VISIBLE_DEVICES": "void"}),
    "gpuMode": (
        {"gpuMode": "shared", "shared": {"via": "resource"}},
        {"TANDEM_GPU_MODE": "shared"},
    ),
    "tinyModel": ({"tinyModel": True, "baseModel": ""}, {"TANDEM_BASE_MODEL": "models/tiny"}),
    "huggingface.endpoint": (
        at("huggingface.endpoint", "https://hub.example.org"),
        {"HF_ENDPOINT": "https://hub.example.org"},
    ),
    "huggingface.offline": (at("huggingface.offline", True), {"HF_HUB_OFFLINE": "1"}),
    "trainer.gpus": (at("trainer.gpus", 3), {"TANDEM_TRAINER_RANKS": "3"}),
    "trainer.cpuRanks": (
        {"device": "cpu", "trainer": {"cpuRanks": 3}},
        {
            "TANDEM_DEVICE": "cpu",
            "TANDEM_TRAINER_RANKS": "3",
            "NVIDIA_VISIBLE_DEVICES": "void",
        },
    ),
    "trainer.executor": (
        at("trainer.executor", "kubernetes"),
        {
            "TANDEM_EXECUTOR": "kubernetes",
            "TANDEM_TRAINER_HOSTS": "1",
            "TANDEM_JOB_TEMPLATE": "/etc/tandem/job/job.json",
            "TANDEM_PARALLEL_JOBS": "1",
            "TANDEM_ROLE": "trainer",
            "OMP_NUM_THREADS": "4",
            "NVIDIA_VISIBLE_DEVICES": "void",
        },
    ),
    "trainer.hosts": (
        {"trainer": {"executor": "kubernetes", "hosts": 2}},
        {
            "TANDEM_EXECUTOR": "kubernetes",
            "TANDEM_TRAINER_HOSTS": "2",
            "TANDEM_TRAINER_RANKS": "2",
            "TANDEM_JOB_TEMPLATE": "/etc/tandem/job/job.json",
            "TANDEM_PARALLEL_JOBS": "1",
            "TANDEM_ROLE": "trainer",
            "OMP_NUM_THREADS": "4",
            "NVIDIA_VISIBLE_DEVICES": "void",
        },
    ),
    "trainer.parallelJobs": (
        {"trainer": {"executor": "kubernetes", "parallelJobs": 3}},
        {
            "TANDEM_EXECUTOR": "kubernetes",
            "TANDEM_TRAINER_HOSTS": "1",
            "TANDEM_JOB_TEMPLATE": "/etc/tandem/job/job.json",
            "TANDEM_PARALLEL_JOBS": "3",
            "TANDEM_ROLE": "trainer",
            "OMP_NUM_THREADS": "4",
            "NVIDIA_VISIBLE_DEVICES": "void",
        },
    ),
    "inference.gpus": (at("inference.gpus", 3), {"TANDEM_INFERENCE_TENSOR_PARALLEL": "3"}),
    "inference.replicas": (
        at("inference.replicas", 2),
        {"TANDEM_INFERENCE_REPLICAS": "2", "TANDEM_REPLICA": "metadata.name"},
    ),
    **{
        f"{role}.extraEnv": (
            at(f"{role}.extraEnv", [{"name": "NCCL_DEBUG", "value": "INFO"}]),
            {"NCCL_DEBUG": "INFO"},
        )
        for role in ("trainer", "inference")
    },
}
"""Values other than settings that set variables: the values, and the variables that differ from the
defaults'."""

ONLY_COMPOSE = {"TANDEM_TRAINER_DEVICES", "TANDEM_INFERENCE_DEVICES"}
"""Kubernetes chooses the devices."""
ONLY_CHART = {"NVIDIA_VISIBLE_DEVICES"}
"""The controller's image sets it too, but clusters may override an image's variables."""
OF_A_POD = {
    # Under compose `tandem up` gives each inference server its name.
    "TANDEM_REPLICA",
    # Under compose docker-compose.hosts.yml sets them.
    "TANDEM_EXECUTOR",
    "TANDEM_TRAINER_HOSTS",
    "TANDEM_START_SECONDS",
    "TANDEM_ORPHAN_SECONDS",
    # Under compose there are no pods that could stay.
    "TANDEM_LINGER_SECONDS",
    # Of the runner alone. Under compose the runner is in the trainer's image, which sets the role.
    # Ranks then have one thread per core of the container.
    "TANDEM_JOB_TEMPLATE",
    "TANDEM_PARALLEL_JOBS",
    "TANDEM_ROLE",
    "OMP_NUM_THREADS",
}
WITHOUT_VALUE = ONLY_COMPOSE | {
    f"TANDEM_{name}"
    for name in (
        # Set by the images.
        "ROOT",
        "LOG_DIR",
        "METRICS_HOST",
        "CONTROLLER_HOST",
        "INFERENCE_HOST",
        # Services and policies name the containers' ports.
        "METRICS_PORT",
        "CONTROLLER_PORT",
        "INFERENCE_PORT",
        # Files, not variables.
        "API_KEY",
        "ADMIN_TOKEN",
        # The images contain no Slurm programs.
        "SLURM_ARGS",
        # Has no effect.
        "DOCKER",
        # These settings are for hosts without Kubernetes.
        "HOST_INDEX",
        "HOST_ADDRESS",
    )
}
"""Settings that only extraEnv can set."""


@cache
def settings() -> dict[str, tuple[Any, str]]:
    """Every chart value that is a program's setting → a value other than the default, and the
    variable that the value's comment names."""
    result = {}
    for value in matrix.documented():
        if value.path[-2:-1] == ("settings",):
            variable = re.match(r"TANDEM_\w+", value.comment)
            assert variable, f"the comment of {value.name} begins with the variable"
            schema = matrix.schema_of(value.name)
            choices = [
                choice for choice in schema.get("enum", []) if choice not in (None, value.default)
            ]
            result[value.name] = (choices[-1] if choices else matrix.sample(schema), variable[0])
    assert len(result) > 15
    return result


def variables(rendered: Rendered) -> dict[str, dict[str, str]]:
    """Role → variables of its program. The role's preflight has the same variables, but no GPU."""
    result = {}
    for role in ROLES:
        result[role] = environment(container_of(rendered, role))
        preflight = environment(preflight_of(rendered, role))
        void = {"NVIDIA_VISIBLE_DEVICES": "void"}
        assert void | preflight == void | result[role]
    return result


def with_value(path: str) -> dict[str, dict[str, str]]:
    """Role → variables, with another value at this path."""
    values = at(path, settings()[path][0]) if path in settings() else OTHER_VALUES[path][0]
    return variables(of(merged(without_value(path), values)))


def without_value(path: str) -> dict[str, Any]:
    """The values without which the chart refuses the value at this path."""
    return merged(matrix.BASE, matrix.NEEDS.get(path, {}))


@cache
def chart_variables() -> dict[str, set[str]]:
    """Role → the variables that the chart can set."""
    renders = [
        variables(of(matrix.BASE)),
        *(with_value(path) for path in [*settings(), *OTHER_VALUES]),
    ]
    return {role: {name for by_role in renders for name in by_role[role]} for role in ROLES}


def services(*files: str) -> dict[str, Any]:
    """Compose's services with their default variables."""
    mode = {"TANDEM_GPU_MODE": "shared"} if SHARED in files else {}
    return everything(*files, TANDEM_TAG="", **mode)["services"]


@pytest.mark.parametrize("role", ROLES)
def test_compose_and_chart_set_the_same_variables(role):
    files = ((MAIN,), (MAIN, CPU), (MAIN, SHARED))
    compose = {name for some in files for name in services(*some)[role]["environment"]}
    assert compose - ONLY_COMPOSE - ONLY_CHART == chart_variables()[role] - ONLY_CHART - OF_A_POD
    if role != "controller":
        assert compose & chart_variables()[role] >= ONLY_CHART


NEEDED = {
    "TANDEM_KEEP_EVERY": {"TANDEM_KEEP_CHECKPOINTS": "1"},
    "TANDEM_LINGER_SECONDS": {"TANDEM_EXECUTOR": "kubernetes"},
    "TANDEM_ORPHAN_SECONDS": {"TANDEM_HEARTBEAT_SECONDS": "0.1"},
    "TANDEM_SEQUENCE_PARALLEL": {"TANDEM_TRAINER_RANKS": "2", "TANDEM_TENSOR_PARALLEL": "2"},
    "TANDEM_TRANSPORT": {"TANDEM_WEIGHTS": "merged"},
}
"""The variables without which a variable is refused."""


@pytest.mark.parametrize("path", settings())
def test_a_setting_reaches_its_roles_and_no_other(path, monkeypatch):
    value, name = settings()[path]
    default = next(v.default for v in matrix.documented() if v.name == path)
    roles = {path.partition(".")[0]} & set(ROLES) or set(ROLES)
    # The controller refuses what the trainer's topology can't compute.
    if name.endswith(("_PARALLEL", "_TOPOLOGY")):
        roles.add("controller")
    before, after = variables(of(without_value(path))), with_value(path)
    for role in ROLES:
        assert before[role].get(name) == default, "null sets no variable"
        assert after[role] == (
            {**before[role], name: after[role].get(name)} if role in roles else before[role]
        )
    for other, text in NEEDED.get(name, {}).items():
        monkeypatch.setenv(other, text)
    monkeypatch.setenv(name, after[roles.pop()][name])
    assert getattr(Settings(), name.removeprefix("TANDEM_").lower()) == value


@pytest.mark.parametrize("path", OTHER_VALUES)
def test_other_values_set_variables(path):
    before, after = variables(of(matrix.BASE)), with_value(path)
    changed = {
        name: text
        for role in ROLES
        for name, text in after[role].items()
        if before[role].get(name) != text
    }
    assert changed == OTHER_VALUES[path][1]


def test_a_value_exists_for_every_setting_of_the_programs():
    names = {
        name for names in chart_variables().values() for name in names if name.startswith("TANDEM_")
    }
    assert set(FIELDS) - names == WITHOUT_VALUE
    assert names - {"TANDEM_ROLE"} <= set(FIELDS)


@BOTH_DEVICES
def test_both_have_the_same_defaults(name, files):
    own = {
        "TANDEM_LOG_FORMAT": "json",
        "TANDEM_DEVICE": "cuda",
        "TANDEM_BASE_MODEL": VALUES[name].get("baseModel"),
    }
    for role, chart in variables(case(name)).items():
        service = services(*files)[role]
        compose = {key: text for key, text in service["environment"].items() if text}
        skipped = ONLY_CHART if name == "defaults" or role == "controller" else set()
        for variable in (set(chart) | set(compose)) - skipped:
            ours, theirs = chart.get(variable), compose.get(variable)
            if variable.endswith(("_FILE", "_PATH")):
                assert ours.rpartition("/")[2] == theirs.rpartition("/")[2]
            elif variable.endswith("_URL"):
                for url in (ours, theirs):
                    assert (
                        url == "http://127.0.0.1:8000"
                        if role == "inference"
                        else url.endswith(":8000")
                    )
            else:
                default = str(FIELDS[variable].default) if variable in FIELDS else "None"
                assert (ours or default) in {theirs or default, own.get(variable)}, variable
        projected = volume(case(name), role, "/etc/tandem/secrets")["projected"]
        paths = {
            item["path"] for source in projected["sources"] for item in source["secret"]["items"]
        }
        assert paths == {secret["source"] for secret in service["secrets"]}


@BOTH_DEVICES
def test_images_and_commands(name, files):
    compose, rendered = services(*files), case(name)
    for role in ROLES:
        container, preflight = container_of(rendered, role), preflight_of(rendered, role)
        assert container["image"] == compose[role]["image"]
        assert not {"command", "args", "workingDir"} & set(container), "the image's entrypoint"
        assert not any(compose[role].get(key) for key in ("command", "entrypoint", "working_dir"))
        assert preflight["image"] == compose["preflight"]["image"]
        assert preflight["args"][:2] == compose["preflight"]["command"]
        tiny = [
            c for c in pod_of(rendered, role)["spec"]["initContainers"] if "tiny-model" in c["name"]
        ]
        expected = [compose["tiny-model"]] if "tiny-model" in compose else []
        assert [(c["image"], c["args"]) for c in tiny] == [
            (s["image"], s["entrypoint"]) for s in expected
        ]


def sources(service: dict[str, Any]) -> dict[str, str]:
    """Mount path → volume or host path."""
    return {mount["target"]: mount["source"] for mount in service.get("volumes", [])}


@BOTH_DEVICES
def test_only_its_own_container_can_write_the_code_that_a_container_loads(name, files):
    """Compiled kernels: torch, Triton, vLLM and Tandem load them, some as pickles."""
    image = (ROOT / "Dockerfile").read_text()
    assert set(
        re.findall(r"(?:CACHE_DIR|CACHE_ROOT|CONFIG_ROOT|WORKSPACE_BASE|TMPDIR)=(\S+)", image)
    ) == {
        f"/private-cache{rest}"
        for rest in ("", "/inductor", "/triton", "/vllm", "/config", "/numba", "/tmp")
    }
    caches = {
        role: sources(services(*files)[role])["/private-cache"] for role in ("trainer", "inference")
    }
    assert all("emptyDir" in volume(case(name), role, "/private-cache") for role in caches)
    for one, service in services(*files).items():
        assert set(sources(service).values()) & set(caches.values()) == (
            {caches[one]} if one in caches else set()
        )


@BOTH_DEVICES
def test_mounts_memory_users_ports_and_grace_periods(name, files):
    rendered = case(name)
    for role in ROLES:
        service, pod, container = (
            services(*files)[role],
            pod_of(rendered, role),
            container_of(rendered, role),
        )
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        temporary = dict(
            re.match(r"(.*):mode=1777,size=(\w+)", entry).groups() for entry in service["tmpfs"]
        )
        shm = {"/dev/shm"} if "shm_size" in service else set()
        assert mounts == set(sources(service)) - {"/models"} | set(temporary) | shm | {
            "/etc/tandem/secrets"
        }
        for path, least in temporary.items():
            size = quantity(volume(rendered, role, path)["emptyDir"]["sizeLimit"])
            assert size >= quantity(least.replace("m", "Mi").replace("g", "Gi")), path
        if name == "defaults" and shm:
            size = quantity(volume(rendered, role, "/dev/shm")["emptyDir"]["sizeLimit"])
            assert size == int(service["shm_size"])
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
