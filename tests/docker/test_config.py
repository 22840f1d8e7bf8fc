"""The output of `docker compose config` for this repository's compose files. The tests check GPUs
per role, published ports, hardening, secrets and variables.

`tests/helm/test_drift.py` compares each role's variables with the chart.
"""

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import tiny_model

from compose_stack import (
    CPU,
    HOSTS,
    MAIN,
    NVLINK,
    ROOT,
    SERVICES,
    SHARED,
    Compose,
    docker,
    everything,
)
from tandem.config import Settings

pytestmark = pytest.mark.docker
OURS = ("preflight", *SERVICES)
UPSTREAM = ("prometheus", "grafana")
A, B = "GPU-0a1b2c3d-0000-1111-2222-333344445555", "GPU-0a1b2c3d-0000-1111-2222-666677778888"
GUARD = "trainer-and-inference-must-not-have-the-same-gpu"
MAIN_AND_CPU = pytest.mark.parametrize("files", [(MAIN,), (MAIN, CPU)], ids=["main", "cpu"])


def environment(config: dict, service: str) -> dict[str, str]:
    return {
        name: value
        for name, value in config["services"][service]["environment"].items()
        if value is not None
    }


def started(config: dict) -> dict[str, dict]:
    """The services that can be started: all services except the guard."""
    return {name: service for name, service in config["services"].items() if name != GUARD}


@pytest.mark.parametrize(
    ("trainer", "inference", "ranks"),
    [
        ("0", "1", {}),
        (
            "0,1,2,3",
            "4,5,6,7",
            {"TRAINER_RANKS": "4", "TENSOR_PARALLEL": "2", "INFERENCE_TENSOR_PARALLEL": "4"},
        ),
        (f"{A},{A[:-1]}0", B, {"TRAINER_RANKS": "2"}),
    ],
)
@pytest.mark.parametrize("mode", [{}, {"TANDEM_GPU_MODE": "shared"}], ids=["dedicated", "shared"])
def test_each_role_gets_its_gpus_and_no_other(trainer, inference, ranks, mode):
    variables = {f"TANDEM_{name}": value for name, value in ranks.items()}
    given = {
        "TANDEM_TRAINER_DEVICES": trainer,
        "TANDEM_INFERENCE_DEVICES": inference,
        **variables,
        **mode,
    }
    config = Compose(MAIN).config("*", **given)
    devices = {"trainer": trainer, "inference": inference}
    for name, service in started(config).items():
        assert service.get("runtime") == ("nvidia" if name in devices else None), name
        assert "deploy" not in service, "only the runtime's variable assigns GPUs"
        # The images of preflight and controller set NVIDIA_VISIBLE_DEVICES.
        expected = devices.get(name, "void")
        assert environment(config, name).get("NVIDIA_VISIBLE_DEVICES", "void") == expected, name
    for role, name in (
        ("trainer", "TANDEM_TRAINER_RANKS"),
        ("trainer", "TANDEM_TENSOR_PARALLEL"),
        ("inference", "TANDEM_INFERENCE_TENSOR_PARALLEL"),
    ):
        assert environment(config, role).get(name) == variables.get(name)
    assert environment(config, "preflight").items() >= given.items()


def test_the_default_is_one_gpu_each_and_the_guard_is_never_a_container():
    config = everything(MAIN)
    assert environment(config, "trainer")["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert environment(config, "inference")["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert config["services"][GUARD]["profiles"] == ["never"]
    assert GUARD not in Compose(MAIN).config()["services"]


@pytest.mark.parametrize("devices", ["0", f"{A},{B}"])
@pytest.mark.parametrize("files", [(MAIN,), (MAIN, NVLINK)], ids=["main", "nvlink"])
def test_compose_refuses_the_same_gpu_for_both(devices, files):
    both = {"TANDEM_TRAINER_DEVICES": devices, "TANDEM_INFERENCE_DEVICES": devices}
    for command in (("config",), ("up", "--no-start")):
        done = Compose(*files).run(*command, check=False, **both)
        assert done.returncode != 0
        assert GUARD in done.stderr
    assert Compose(*files).config(TANDEM_GPU_MODE="shared", **both), "preflight checks shared mode"


@pytest.mark.parametrize("given", [{}, {"TANDEM_TRAINER_DEVICES": f"{A},{B}"}])
def test_shared_gives_both_the_trainers_gpus_and_the_trainer_no_way_to_vllm(given):
    config = Compose(MAIN, SHARED).config(TANDEM_GPU_MODE="shared", **given)
    devices = given.get("TANDEM_TRAINER_DEVICES", "0")
    for role in ("trainer", "inference"):
        assert environment(config, role)["NVIDIA_VISIBLE_DEVICES"] == devices
        assert {secret["source"] for secret in config["services"][role]["secrets"]} == SECRETS[role]
    trainer = environment(config, "trainer")
    assert not {"TANDEM_ADMIN_TOKEN_FILE", "TANDEM_INFERENCE_URL"} & trainer.keys()
    assert {environment(config, name)["TANDEM_GPU_MODE"] for name in OURS} == {"shared"}
    preflight = environment(config, "preflight")
    assert preflight["TANDEM_TRAINER_DEVICES"] == preflight["TANDEM_INFERENCE_DEVICES"] == devices
    done = Compose(MAIN, SHARED).run("config", check=False)
    assert done.returncode != 0
    assert "set TANDEM_GPU_MODE=shared" in done.stderr


def preflight(*options: str, config: dict, **variables: str):
    """Runs `tandem preflight` in its image, without a network."""
    words = [word for item in variables.items() for word in ("-e", "=".join(item))]
    image = config["services"]["preflight"]["image"]
    return docker(
        "run",
        "--rm",
        "--network",
        "none",
        *options,
        *words,
        image,
        "tandem",
        "preflight",
        check=False,
    )


@pytest.mark.parametrize(
    ("trainer", "inference", "variables", "words"),
    [
        (f"{A},{B}", B, {"TANDEM_TRAINER_RANKS": "2"}, f"both name {B}"),
        ("0", B, {}, "some are named by index, some by UUID"),
        # If TANDEM_GPU_MODE has a value, the compose file's own guard is disabled.
        ("0", "0", {"TANDEM_GPU_MODE": "dedicated"}, "both name 0"),
    ],
)
def test_preflight_refuses_what_compose_cannot_compare(
    images, trainer, inference, variables, words
):
    """Preflight gets the variables that compose passes to it."""
    given = {"TANDEM_TRAINER_DEVICES": trainer, "TANDEM_INFERENCE_DEVICES": inference, **variables}
    config = Compose(MAIN).config(**given)
    done = preflight("--tmpfs", "/run/secrets", config=config, **environment(config, "preflight"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


def test_preflight_refuses_a_model_that_its_user_cannot_read(images, tmp_path):
    """safetensors' own writer makes files that only their owner can read."""
    model = tiny_model.write_tiny_qwen3(tmp_path / "model")
    given = {
        "TANDEM_DEVICE": "cpu",
        "TANDEM_BASE_MODEL": "/models/it",
        "TANDEM_API_KEY": "k" * 32,
        "TANDEM_ADMIN_TOKEN": "t" * 32,
    }
    options = ("-v", f"{model}:/models/it:ro", "--user", "54321:0", "--tmpfs", "/data")
    for mode, status in ((0o644, 0), (0o600, 1)):
        (model / "model.safetensors").chmod(mode)
        done = preflight(*options, config=everything(MAIN), **given)
        assert done.returncode == status, done.stdout
        assert ("uid 54321 can't read model.safetensors" in done.stdout) == bool(status)


def test_nvlink_has_the_four_things_that_nccl_needs():
    """NCCL needs one network, one /dev/shm and one NCCL_HOSTID for both containers, and all GPUs
    visible in each container."""
    given = {"TANDEM_TRAINER_DEVICES": "0,2", "TANDEM_INFERENCE_DEVICES": "1,3"}
    config = Compose(MAIN, NVLINK).config(**given)
    host_ids = set()
    for role in ("trainer", "inference"):
        service = config["services"][role]
        assert service["runtime"] == "nvidia"
        assert service["network_mode"] == "service:pod"
        assert service["ipc"] == "service:pod"
        assert not service.get("networks")
        assert not service.get("ports")
        assert "shm_size" not in service, "the pod has it"
        variables = environment(config, role)
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert {name: variables[name] for name in given} == given
        host_ids.add(variables["NCCL_HOSTID"])
        assert service["depends_on"]["preflight"]["condition"] == "service_completed_successfully"
        assert service["depends_on"]["pod"]["restart"], "its namespaces end with the pod"
    assert len(host_ids) == 1
    pod = config["services"]["pod"]
    assert pod["ipc"] == "shareable"
    assert int(pod["shm_size"]) == int(everything(MAIN)["services"]["trainer"]["shm_size"])
    assert [port["target"] for port in pod["ports"]] == [8000]
    assert {port["host_ip"] for port in pod["ports"]} == {"127.0.0.1"}
    assert set(pod["networks"]["internal"]["aliases"]) == {"trainer", "inference"}
    assert not pod.get("secrets")
    assert not pod.get("volumes")
    assert environment(config, "preflight")["TANDEM_TRAINER_DEVICES"] == "0,2"
    hardened(pod, "pod")


def test_the_cpu_stack_requests_no_gpu():
    config = everything(MAIN, CPU)
    for name, service in started(config).items():
        assert service.get("runtime") in (None, "runc"), name
        assert environment(config, name).get("NVIDIA_VISIBLE_DEVICES", "void") == "void", name
        assert not {"gpus", "deploy"} & set(service), name
    for name in OURS:
        assert environment(config, name)["TANDEM_DEVICE"] == "cpu", name
        assert environment(config, name)["TANDEM_BASE_MODEL"] == "models/tiny", name
    for name in ("trainer", "inference"):
        assert config["services"][name]["image"].endswith("-cpu")
        assert config["services"][name]["build"]["args"]["DEVICE"] == "cpu"


@MAIN_AND_CPU
def test_only_public_ports_are_published_on_loopback_and_the_internal_network_has_no_way_out(files):
    config = everything(*files)
    published = {
        name: [(port["host_ip"], port["published"], port["target"]) for port in service["ports"]]
        for name, service in config["services"].items()
        if "ports" in service
    }
    assert published == {
        "controller": [("127.0.0.1", "8080", 8080)],
        "inference": [("127.0.0.1", "8000", 8000)],
        "prometheus": [("127.0.0.1", "9090", 9090)],
        "grafana": [("127.0.0.1", "3000", 3000)],
    }
    opened = Compose(*files).config("*", TANDEM_BIND="0.0.0.0")
    assert {
        name: port["host_ip"]
        for name, s in opened["services"].items()
        for port in s.get("ports", [])
    } == {name: "127.0.0.1" if name == "prometheus" else "0.0.0.0" for name in published}, (
        "Prometheus asks for no login"
    )
    opened = Compose(*files).config("*", PROMETHEUS_BIND="0.0.0.0")
    assert opened["services"]["prometheus"]["ports"][0]["host_ip"] == "0.0.0.0"
    assert config["networks"]["internal"]["internal"]
    for name in (*SERVICES, *UPSTREAM):
        assert "internal" in config["services"][name]["networks"], name
    assert list(config["services"]["example"]["networks"]) == ["internal"]


def hardened(service: dict, name: str) -> None:
    assert service["read_only"], name
    assert service["cap_drop"] == ["ALL"], name
    assert not service.get("cap_add"), name
    assert not service.get("privileged"), name
    assert "no-new-privileges:true" in service["security_opt"], name
    assert service["pids_limit"] > 0, name
    assert service["init"], name
    user, _, group = service["user"].partition(":")
    assert user not in ("", "0", "root"), name
    assert group in ("0", "65534"), name
    assert service["logging"] == {
        "driver": "json-file",
        "options": {"max-size": "50m", "max-file": "5"},
    }, name
    assert not service.get("pid"), name
    assert service.get("network_mode") != "host", name
    for volume in service.get("volumes", []):
        assert "docker.sock" not in volume["source"], name
        assert volume["type"] == "volume" or volume["read_only"], (
            f"{name} can write to the host's {volume['source']}"
        )


@pytest.mark.parametrize(
    "files", [(MAIN,), (MAIN, CPU), (MAIN, NVLINK)], ids=["main", "cpu", "nvlink"]
)
def test_every_service_is_hardened_and_its_image_has_a_version(files):
    services = started(everything(*files))
    assert set(services) >= {*OURS, *UPSTREAM, "example"}
    for name, service in services.items():
        hardened(service, name)
        assert service["image"].partition(":")[2] not in ("", "latest"), name
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert ":latest" not in dockerfile
    # a `# syntax=` line names a program that BuildKit would fetch by its tag
    assert "# syntax=" not in dockerfile
    config = Compose(*files).config("example", TANDEM_UID="54321")
    assert {service["user"] for service in config["services"].values()} == {"54321:0"}


def test_roles_wait_for_preflight_and_not_for_each_other():
    services = everything(MAIN)["services"]
    after = {"preflight": {"condition": "service_completed_successfully", "required": True}}
    for name in SERVICES:
        assert (services[name]["depends_on"], services[name]["restart"]) == (
            after,
            "unless-stopped",
        )
    assert services["preflight"]["restart"] == "no"


def test_memory_can_be_limited():
    given = {
        "TANDEM_CONTROLLER_MEMORY": "1g",
        "TANDEM_TRAINER_MEMORY": "2g",
        "TANDEM_INFERENCE_MEMORY": "3g",
        "TANDEM_TRAINER_SHM": "4g",
        "TANDEM_INFERENCE_SHM": "5g",
    }
    for files in ((MAIN,), (MAIN, CPU)):
        services = Compose(*files).config(**given)["services"]
        limits = [int(services[name]["mem_limit"]) >> 30 for name in SERVICES]
        assert limits == [1, 2, 3]
        assert [int(services[name]["shm_size"]) >> 30 for name in ("trainer", "inference")] == [
            4,
            5,
        ]


SECRETS = {
    "preflight": {"api_key", "admin_token", "hf_token"},
    "tiny-model": {"api_key", "admin_token", "hf_token"},
    "controller": {"api_key", "hf_token"},
    "trainer": {"api_key", "hf_token"},
    "inference": {"api_key", "admin_token", "hf_token"},
    "example": {"api_key"},
    "prometheus": set(),
    "grafana": {"grafana_password"},
}


@MAIN_AND_CPU
def test_each_service_gets_its_secrets_as_files(files, tmp_path):
    leaks = {"TANDEM_API_KEY": "leak-1", "TANDEM_ADMIN_TOKEN": "leak-2", "HF_TOKEN": "leak-3"}
    config = Compose(*files).config("*", TANDEM_SECRETS_DIR=str(tmp_path), **leaks)
    assert "leak-" not in str(config), "those of the caller's environment do not reach containers"
    for name, service in started(config).items():
        assert {secret["source"] for secret in service.get("secrets", [])} == SECRETS[name], name
        for variable, value in environment(config, name).items():
            secret = re.search(r"KEY|TOKEN|PASSWORD|SECRET", variable)
            assert not secret or value.startswith("/run/secrets/"), f"{name}: {variable}"
    for name, secret in config["secrets"].items():
        assert secret["file"] == str(tmp_path / name)


def test_secrets_are_created_once_in_a_private_directory(tmp_path):
    create = shutil.copy(ROOT / "secrets" / "create", tmp_path)
    subprocess.run([create], check=True)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert all(
        re.fullmatch("[0-9a-f]{64}", first[name])
        for name in ("api_key", "admin_token", "grafana_password")
    )
    assert len(set(first.values())) == len(first)
    (tmp_path / "hf_token").write_text("mine")
    subprocess.run([create], check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        **first,
        "hf_token": "mine",
    }
    ignored = subprocess.run(
        ["git", "check-ignore", "secrets/api_key", "secrets/hf_token", ".env"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(ignored.stdout.split()) == 3


def test_each_of_several_hosts_has_an_agent_with_its_gpus_and_the_runner_has_none():
    several = {
        "TANDEM_TRAINER_HOSTS": "2",
        "TANDEM_HOST_INDEX": "1",
        "TANDEM_SHARED_DIR": "/mnt/tandem",
        "TANDEM_TRAINER_DEVICES": "2,3",
    }
    config = Compose(MAIN, HOSTS).config(**several)
    agent, runner = (environment(config, name) for name in ("agent", "trainer"))
    assert (agent["NVIDIA_VISIBLE_DEVICES"], runner["NVIDIA_VISIBLE_DEVICES"]) == ("2,3", "void")
    for found in (agent, runner, environment(config, "preflight")):
        assert (found["TANDEM_EXECUTOR"], found["TANDEM_TRAINER_HOSTS"]) == ("hosts", "2")
    assert agent["TANDEM_HOST_INDEX"] == "1"
    service = config["services"]["agent"]
    assert service["command"] == ["tandem", "rank-agent", "--follow"]
    assert service["network_mode"] == "host"
    assert not service.keys() & {"networks", "ports", "depends_on"}
    assert [secret["source"] for secret in service["secrets"]] == ["hf_token"]
    for option in ("read_only", "cap_drop", "security_opt", "user"):
        assert service[option] == config["services"]["trainer"][option]
    assert config["volumes"]["data"]["driver_opts"]["device"] == "/mnt/tandem"


NOT_PASSED = {
    f"TANDEM_{name}"
    for name in (
        # The images set these variables; docker-compose.cpu.yml sets the device, too.
        "ROOT",
        "LOG_DIR",
        "DEVICE",
        "CONTROLLER_HOST",
        "INFERENCE_HOST",
        "METRICS_HOST",
        # `tandem up` names each inference server itself, if a container has several of them.
        "REPLICA",
        # These ports are fixed in the containers. TANDEM_CONTROLLER_PORT and TANDEM_INFERENCE_PORT
        # are the published ports.
        "CONTROLLER_PORT",
        "INFERENCE_PORT",
        "METRICS_PORT",
        # Compose passes secrets as files.
        "API_KEY",
        "ADMIN_TOKEN",
        "API_KEY_FILE",
        "ADMIN_TOKEN_FILE",
        # Only the Helm chart has a template of Kubernetes Jobs.
        "JOB_TEMPLATE",
        # These settings belong to executors that compose does not offer.
        "PARALLEL_JOBS",
        "LINGER_SECONDS",
        # docker-compose.hosts.yml passes these settings.
        "EXECUTOR",
        "TRAINER_HOSTS",
        "HOST_INDEX",
        "HOST_ADDRESS",
        "START_SECONDS",
        "ORPHAN_SECONDS",
        # The images contain no Slurm programs.
        "SLURM_ARGS",
        # These settings are fixed by the compose files, or have no effect under compose.
        "INFERENCE_URL",
        "DOCKER",
    )
}
"""Settings whose values the compose files do not take from variables of the same name."""


@MAIN_AND_CPU
def test_settings_reach_the_containers_that_have_their_variables(files):
    fields = {f"TANDEM_{field.upper()}" for field in Settings.model_fields}
    given = {name: str(1000 + n) for n, name in enumerate(sorted(fields))}
    config = Compose(*files).config(**given)
    passed = set()
    for service in OURS:
        found = {
            name: value
            for name, value in environment(config, service).items()
            if name.startswith("TANDEM_")
        }
        assert set(found) <= fields
        assert {
            name: value for name, value in found.items() if value != given[name]
        }.keys() <= NOT_PASSED
        passed |= {name for name, value in found.items() if value == given[name]}
    assert passed == fields - NOT_PASSED
    # Preflight checks the settings on which several roles must agree. It also checks the GPUs of
    # the trainer and of the inference servers.
    several = {
        name for name in passed if sum(name in environment(config, role) for role in SERVICES) > 1
    }
    of_devices = {
        f"TANDEM_{name}"
        for name in (
            "TRAINER_DEVICES",
            "INFERENCE_DEVICES",
            "INFERENCE_REPLICAS",
            "INFERENCE_TENSOR_PARALLEL",
        )
    }
    assert set(environment(config, "preflight")) & passed == several | of_devices


def variables_of(path: str) -> dict[str, set[str | None]]:
    """For each variable that a compose file reads, the variable's defaults; None for a variable
    that the file only passes on."""
    text = re.sub(r"(?m)^\s*#.*$", "", Path(path).read_text())
    defaults: dict[str, set[str | None]] = defaultdict(set)
    for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?[^}]*\}", text):
        defaults[name].add(default)
    for name in re.findall(r"(?m)^\s+([A-Z][A-Z0-9_]+):\s*$", text):
        defaults[name].add(None)
    return defaults


def example() -> dict[str, tuple[str, bool]]:
    """For each variable in .env.example, the value, and whether the variable's line is commented
    out."""
    lines = re.findall(r"(?m)^(#?)([A-Z][A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text())
    return {name: (value, bool(comment)) for comment, name, value in lines}


# Compose's own variables. The compose file itself uses COMPOSE_PROJECT_NAME.
OF_COMPOSE = {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def test_the_example_lists_every_variable_and_no_other():
    read = set().union(*map(variables_of, (MAIN, CPU, NVLINK, SHARED, HOSTS)))
    assert read == set(example()) - OF_COMPOSE


def test_the_examples_defaults_are_those_of_the_files():
    fields = Settings.model_fields
    for name, (value, commented) in example().items():
        if name in OF_COMPOSE or not commented:
            continue
        defaults = variables_of(MAIN).get(name, set()) - {None, ""} or {""}
        field = fields.get(name.removeprefix("TANDEM_").lower())
        if defaults == {""} and field is not None and field.default is not None:
            number = isinstance(field.default, int | float)
            assert (float(value) if number else value) == field.default, name
        else:
            assert defaults == {value}, name


def test_the_example_configures_the_stack():
    config = Compose(MAIN).config(
        **{name: value for name, (value, commented) in example().items() if not commented}
    )
    assert set(config["services"]) == {*OURS, *UPSTREAM}
    assert environment(config, "controller")["TANDEM_BASE_MODEL"] == "/models/Qwen3-0.6B"
    text = (ROOT / ".env.example").read_text()
    everything_uncommented = dict(re.findall(r"(?m)^#?([A-Z][A-Z0-9_]+)=(.+)$", text))
    del everything_uncommented["COMPOSE_FILE"]
    assert set(Compose(MAIN).config(**everything_uncommented)["services"]) == set(
        config["services"]
    )
