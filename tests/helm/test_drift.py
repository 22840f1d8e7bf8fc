"""Compose and chart start the same programs with the same settings."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from typing import Any

import pytest

from helm import compose_file, documented, matrix
from helm.charts import Rendered, merged
from helm.matrix import at
from helm.pods import quantity
from helm.renders import ROLES, VALUES, case, container_of, environment, of, pod_of, preflight_of, volume
from tandem.config import Settings
from tandem.controller.__main__ import GRACE_SECONDS
from tandem.supervise.programs import PROGRAMS, stop_seconds

GPU, CPU, SHARED = (("docker-compose.yml", *more) for more in
                    ((), ("docker-compose.cpu.yml",), ("docker-compose.shared.yml",)))  # fmt: skip
Variables = dict[str, set[str]]
"""By role: the variables that it may get."""

OTHERWISE: dict[str, Any] = {
    "baseModel": "models/other",
    "device": "cpu",
    "gpuMode": {"gpuMode": "shared", "shared": {"via": "resource"}},
    "tinyModel": {"tinyModel": True, "baseModel": ""},
    "huggingface.endpoint": "https://hub.example.org",
    "huggingface.offline": True,
    "trainer.gpus": 3,
    "trainer.cpuRanks": {"device": "cpu", "trainer": {"cpuRanks": 3}},
    "inference.gpus": 3,
    **{f"{role}.extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}] for role in ("trainer", "inference")},
}
"""Values besides the settings that become variables: another value, or the values to set."""
SETS = {
    "baseModel": {"TANDEM_BASE_MODEL": "models/other"},
    "device": {"TANDEM_DEVICE": "cpu", "NVIDIA_VISIBLE_DEVICES": "void"},
    "gpuMode": {
        "TANDEM_GPU_MODE": "shared",
        "TANDEM_INFERENCE_URL": "http://127.0.0.1:8000",
        "TANDEM_ADMIN_TOKEN_FILE": "/etc/tandem/secrets/admin_token",
    },  # the trainer's
    "tinyModel": {"TANDEM_BASE_MODEL": "models/tiny"},
    "huggingface.endpoint": {"HF_ENDPOINT": "https://hub.example.org"},
    "huggingface.offline": {"HF_HUB_OFFLINE": "1"},
    "trainer.gpus": {"TANDEM_TRAINER_RANKS": "3"},
    "trainer.cpuRanks": {"TANDEM_DEVICE": "cpu", "TANDEM_TRAINER_RANKS": "3", "NVIDIA_VISIBLE_DEVICES": "void"},
    "inference.gpus": {"TANDEM_INFERENCE_TENSOR_PARALLEL": "3"},
}
"""What they set, of what a role then has."""

ONLY_COMPOSE = {
    "TANDEM_TRAINER_DEVICES": "Kubernetes chooses the devices",
    "TANDEM_INFERENCE_DEVICES": "Kubernetes chooses the devices",
}
ONLY_CHART = {"NVIDIA_VISIBLE_DEVICES": "the controller's image has it; clusters may replace what images say"}
NEITHER_MUST = {
    "TANDEM_ROOT": "the images have it",
    "TANDEM_LOG_DIR": "the images have it",
    "TANDEM_METRICS_HOST": "the images have it",
    "TANDEM_METRICS_PORT": "containers' ports are named by the Services and policies",
    "TANDEM_CONTROLLER_HOST": "the images have it",
    "TANDEM_CONTROLLER_PORT": "the Service's port is a value",
    "TANDEM_INFERENCE_HOST": "the images have it",
    "TANDEM_INFERENCE_PORT": "the Service's port is a value",
    "TANDEM_API_KEY": "a file, not a variable",
    "TANDEM_ADMIN_TOKEN": "a file, not a variable",
    "TANDEM_DOCKER": "changes nothing",
    **ONLY_COMPOSE,
}
"""Of tandem.config.Settings, and reachable by extraEnv alone."""


def settings() -> dict[str, tuple[Any, str]]:
    """Every value that is a program's setting: one that isn't the default, and the variable that the comment names."""
    found = {}
    for value in documented.values():
        if value.path[-2:-1] == ("settings",) or (value.path[:1] == ("settings",) and len(value.path) == 2):
            name = re.match(r"TANDEM_\w+", value.comment)
            assert name, f"the comment of {value.name} begins with the variable"
            schema = matrix.schema_of(value.name)
            choices = [choice for choice in schema.get("enum", []) if choice not in (None, value.default)]
            found[value.name] = (choices[-1] if choices else matrix.sample(schema), name[0])
    assert len(found) > 15
    return found


def both(rendered: Rendered, role: str) -> dict[str, str]:
    """The variables of a role's programs, which its preflight judges too."""
    variables, before = environment(container_of(rendered, role)), environment(preflight_of(rendered, role))
    before = {"NVIDIA_VISIBLE_DEVICES": "void"} | before
    assert before == {"NVIDIA_VISIBLE_DEVICES": "void"} | variables
    return variables


def change(path: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """By role: variables without a value's being set, and with it."""
    given = settings()[path][0] if path in settings() else OTHERWISE[path]
    values = given if isinstance(given, dict) else at(path, given)
    plain, changed = of(matrix.BASE), of(merged(matrix.BASE, values))
    return tuple({role: both(rendered, role) for role in ROLES} for rendered in (plain, changed))


@cache
def reachable() -> Variables:
    """What the chart may give to each role."""
    found: Variables = {role: set() for role in ROLES}
    for path in [*settings(), *OTHERWISE]:
        for variables in change(path):
            for role in ROLES:
                found[role] |= set(variables[role])
    return found


@cache
def passed() -> Variables:
    """What compose may give to each role."""
    return {
        role: {name for files in (GPU, CPU, SHARED) for name in compose_file.services(*files)[role]["environment"]}
        for role in ROLES
    }


def differences(compose: Variables, chart: Variables) -> list[str]:
    """What one of the two gives to a role and the other can't."""
    found = []
    for role in ROLES:
        missing, more = compose[role] - chart[role] - set(ONLY_COMPOSE), chart[role] - compose[role] - set(ONLY_CHART)
        found += [f"{role}: the chart has no value for {name}" for name in missing]
        found += [f"{role}: compose does not pass {name}" for name in more]
    return sorted(found)


def test_both_give_the_same_variables_to_each_role():
    assert differences(passed(), reachable()) == []
    assert "NVIDIA_VISIBLE_DEVICES" in passed()["trainer"] & reachable()["trainer"]


@pytest.mark.parametrize("role", ROLES)
def test_a_variable_that_one_of_the_two_lacks_is_found(role):
    for name in sorted(passed()[role] & reachable()[role] - set(ONLY_CHART)):
        for side in ("compose", "chart"):
            compose, chart = copy.deepcopy(passed()), copy.deepcopy(reachable())
            {"compose": compose, "chart": chart}[side][role].remove(name)
            assert [text for text in differences(compose, chart) if role in text and name in text], (side, name)


@pytest.mark.parametrize("path", settings())
def test_a_setting_arrives_in_its_roles_and_as_what_was_meant(path, monkeypatch):
    value, name = settings()[path]
    roles = {path.partition(".")[0]} & set(ROLES) or set(ROLES)
    before, after = change(path)
    for role in ROLES:
        expected = {**before[role], name: after[role].get(name)} if role in roles else before[role]
        assert after[role] == expected
    text = after[roles.pop()][name]
    monkeypatch.setenv(name, text)
    assert getattr(Settings(), name.removeprefix("TANDEM_").lower()) == value


@pytest.mark.parametrize("path", SETS)
def test_other_values_become_variables_too(path):
    before, after = change(path)
    changed = {name: text for role in ROLES for name, text in after[role].items() if before[role].get(name) != text}
    assert changed == SETS[path]


@pytest.mark.parametrize("path", settings())
def test_a_setting_that_is_null_has_the_program_s_default(path):
    default = next(v.default for v in documented.values() if v.name == path)
    _, name = settings()[path]
    for role in ROLES:
        given = both(of(matrix.BASE), role).get(name)
        assert given == default, "null is no variable"


def test_every_setting_of_the_programs_can_be_reached():
    known = {f"TANDEM_{name.upper()}" for name in Settings.model_fields}
    somewhere = set().union(*reachable().values())
    assert known - somewhere - set(NEITHER_MUST) == set()
    assert set(NEITHER_MUST) & somewhere == set(), "an exception that is none"
    assert set(NEITHER_MUST) <= known
    assert {name for name in somewhere if name.startswith("TANDEM_")} <= known


def test_the_settings_of_compose_are_settings():
    known = {f"TANDEM_{name.upper()}" for name in Settings.model_fields}
    for service in compose_file.services(*CPU).values():
        names = {name for name in service.get("environment", {}) if name.startswith("TANDEM_")}
        assert names - known <= {"TANDEM_URL"}


ELSEWHERE = ("_FILE", "_PATH", "_URL")
"""Names of variables with addresses and paths, which are compared by themselves."""


@pytest.mark.parametrize(("name", "files"), [("defaults", GPU), ("values-cpu.yaml", CPU)])
def test_both_have_the_same_defaults(name, files):
    programs = {f"TANDEM_{field.upper()}": info.default for field, info in Settings.model_fields.items()}
    own = {"TANDEM_LOG_FORMAT": "json", "TANDEM_DEVICE": "cuda", "TANDEM_BASE_MODEL": VALUES[name].get("baseModel")}
    for role in ROLES:
        chart = both(case(name), role)
        given = compose_file.services(*files)[role]["environment"]
        compose = {key: str(text) for key, text in given.items() if text not in (None, "")}
        if name == "defaults":
            # Which device it is, compose must be told.
            compose.pop("NVIDIA_VISIBLE_DEVICES", None)
        for variable in set(chart) | set(compose):
            if not variable.endswith(ELSEWHERE) and not (role == "controller" and variable in ONLY_CHART):
                wanted = {compose.get(variable, str(programs.get(variable))), own.get(variable)}
                assert chart.get(variable, str(programs.get(variable))) in wanted, f"{role}: {variable}"


def test_files_and_addresses():
    services = compose_file.services(*GPU)
    for role in ROLES:
        chart, compose = both(case("defaults"), role), services[role]["environment"]
        for name in (name for name in compose if name.endswith(("_FILE", "_PATH"))):
            assert chart[name].rpartition("/")[2] == compose[name].rpartition("/")[2]
        urls = [variables["TANDEM_INFERENCE_URL"] for variables in (chart, compose)]
        assert [url.rpartition(":")[2] for url in urls] == ["8000"] * 2
        secrets = volume(pod_of(case("defaults"), role), container_of(case("defaults"), role), "/etc/tandem/secrets")
        paths = {i["path"] for source in secrets["projected"]["sources"] for i in source["secret"]["items"]}
        assert paths == set(services[role]["secrets"])
    assert chart["TANDEM_INFERENCE_URL"] == compose["TANDEM_INFERENCE_URL"] == "http://127.0.0.1:8000"


@pytest.mark.parametrize(("name", "files"), [("defaults", GPU), ("values-cpu.yaml", CPU)])
def test_images_and_commands(name, files):
    services = compose_file.services(*files)
    rendered = case(name)
    for role in ROLES:
        container, service = container_of(rendered, role), services[role]
        assert container["image"] == service["image"]
        assert not {"command", "args", "workingDir"} & set(container), "the image's entrypoint"
        assert not {"command", "entrypoint", "working_dir"} & set(service)
        assert preflight_of(rendered, role)["image"] == services["preflight"]["image"]
        assert preflight_of(rendered, role)["args"][:2] == services["preflight"]["command"]
        tiny = [c for c in pod_of(rendered, role)["spec"]["initContainers"] if "tiny-model" in c["name"]]
        assert [c["args"] for c in tiny] == ([services["tiny-model"]["entrypoint"]] if "tiny-model" in services else [])
        assert [c["image"] for c in tiny] == ([services["tiny-model"]["image"]] if tiny else [])


@pytest.mark.parametrize(("name", "files"), [("defaults", GPU), ("values-cpu.yaml", CPU)])
def test_mounts_memory_ports_and_hardening(name, files):
    rendered, services = case(name), compose_file.services(*files)
    for role in ROLES:
        service, pod, container = services[role], pod_of(rendered, role), container_of(rendered, role)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        temporary = compose_file.tmpfs(service)
        volumes = {entry.split(":")[1] for entry in service["volumes"]} - {"/models"}
        shm = {"/dev/shm"} & mounts
        assert mounts == volumes | set(temporary) | shm | {"/etc/tandem/secrets"}
        assert bool(shm) == ("shm_size" in service)
        for path, least in temporary.items():
            assert quantity(volume(pod, container, path)["emptyDir"]["sizeLimit"]) >= least, path
        if shm and name == "defaults":
            size = quantity(volume(pod, container, "/dev/shm")["emptyDir"]["sizeLimit"])
            assert size == compose_file.size(service["shm_size"])
        if role == "controller" and name == "defaults":
            assert quantity(container["resources"]["limits"]["memory"]) == compose_file.size(service["mem_limit"])
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] == service["read_only"]
        assert context["capabilities"]["drop"] == service["cap_drop"]
        assert context["allowPrivilegeEscalation"] == ("no-new-privileges:true" not in service["security_opt"])
        user = pod["spec"]["securityContext"]
        assert f"{user['runAsUser']}:{user['runAsGroup']}" == service["user"]
        published = {int(port.rpartition(":")[2]) for port in service.get("ports", [])}
        assert published == {p["containerPort"] for p in container["ports"] if p["name"] == "http"}
        needs = GRACE_SECONDS if role == "controller" else stop_seconds(PROGRAMS[role])
        assert compose_file.seconds(service["stop_grace_period"]) > needs
        assert pod["spec"]["terminationGracePeriodSeconds"] > needs


def test_compose_is_read_as_it_is():
    """Were these files read wrongly, nothing would be compared."""
    services = compose_file.services(*CPU)
    assert services["trainer"]["environment"].items() >= {
        "TANDEM_LAUNCH": "fork", "TANDEM_DEVICE": "cpu", "NVIDIA_VISIBLE_DEVICES": "void", "TANDEM_DTYPE": None
    }.items()  # fmt: skip
    assert services["tiny-model"]["command"] == []
    assert services["trainer"]["image"] == "tandem-trainer:0.1.0-cpu"
    assert "${" not in json.dumps({role: services[role] for role in ROLES})
