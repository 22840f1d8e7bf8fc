"""`docker compose config` of the files: GPUs per role, published ports, hardening, secrets and variables."""

import re
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import tiny_model

from compose_stack import CPU, MAIN, NVLINK, ROOT, SERVICES, SHARED, Compose, docker
from tandem.config import Settings

pytestmark = pytest.mark.docker
OURS = ("preflight", *SERVICES)
UPSTREAM = ("prometheus", "grafana")
A, B = "GPU-0a1b2c3d-0000-1111-2222-333344445555", "GPU-0a1b2c3d-0000-1111-2222-666677778888"
FOUR = [f"GPU-0000000{i}-0000-1111-2222-333344445555" for i in range(8)]
GUARD = "trainer-and-inference-must-not-have-the-same-gpu"


@cache
def everything(*files: str) -> dict:
    """The configuration of all profiles without variables; of the main file by default."""
    return Compose(*files or (MAIN,)).config("*")


def environment(config: dict, service: str) -> dict[str, str]:
    return {name: value for name, value in config["services"][service]["environment"].items() if value is not None}


@pytest.mark.parametrize(
    ("trainer", "inference", "ranks"),
    [
        ("0", "1", {}),
        ("0,1", "2", {"TRAINER_RANKS": "2", "TENSOR_PARALLEL": "2"}),
        ("0,1,2,3", "4,5,6,7", {"TRAINER_RANKS": "4", "TENSOR_PARALLEL": "2", "INFERENCE_TENSOR_PARALLEL": "4"}),
        (A, B, {}),
        (",".join(FOUR[:2]), FOUR[2], {"TRAINER_RANKS": "2"}),
        (",".join(FOUR[:4]), ",".join(FOUR[4:]), {"TRAINER_RANKS": "4", "INFERENCE_TENSOR_PARALLEL": "4"}),
    ],
    ids=["1+1", "2+1", "4+4", "1+1 UUIDs", "2+1 UUIDs", "4+4 UUIDs"],
)
@pytest.mark.parametrize("mode", [{}, {"TANDEM_GPU_MODE": "shared"}], ids=["dedicated", "shared"])
def test_each_role_gets_its_gpus_and_no_other(trainer, inference, ranks, mode):
    variables = {f"TANDEM_{name}": value for name, value in ranks.items()}
    given = {"TANDEM_TRAINER_DEVICES": trainer, "TANDEM_INFERENCE_DEVICES": inference, **variables, **mode}
    config = Compose(MAIN).config("*", **given)
    devices = {"trainer": trainer, "inference": inference}
    for name, service in config["services"].items():
        if name == GUARD:
            continue
        assert service.get("runtime") == ("nvidia" if name in devices else None), name
        assert "deploy" not in service, "only the runtime's variable assigns GPUs"
        # The images of preflight and controller set it.
        expected = devices.get(name, "void")
        assert environment(config, name).get("NVIDIA_VISIBLE_DEVICES", "void") == expected, name
    for role, name in (("trainer", "TANDEM_TRAINER_RANKS"), ("trainer", "TANDEM_TENSOR_PARALLEL"),
                       ("inference", "TANDEM_INFERENCE_TENSOR_PARALLEL")):  # fmt: skip
        assert environment(config, role).get(name) == variables.get(name)
    assert environment(config, "preflight").items() >= given.items()


def test_the_default_is_one_gpu_each():
    config = everything()
    assert environment(config, "trainer")["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert environment(config, "inference")["NVIDIA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("devices", ["0", "3", A, f"{A},{B}"])
@pytest.mark.parametrize("files", [(MAIN,), (MAIN, NVLINK)], ids=["main", "nvlink"])
def test_compose_refuses_the_same_gpu_for_both(devices, files):
    both = {"TANDEM_TRAINER_DEVICES": devices, "TANDEM_INFERENCE_DEVICES": devices}
    for command in (("config",), ("up", "--no-start")):
        done = Compose(*files).run(*command, check=False, **both)
        assert done.returncode != 0
        assert GUARD in done.stderr
    assert Compose(*files).config(TANDEM_GPU_MODE="shared", **both), "preflight checks shared mode"


@pytest.mark.parametrize("given", [{}, {"TANDEM_TRAINER_DEVICES": "2"}, {"TANDEM_TRAINER_DEVICES": f"{A},{B}"}])
def test_shared_gives_both_the_trainers_gpus_and_the_trainer_the_admin_token(given):
    config = Compose(MAIN, SHARED).config(TANDEM_GPU_MODE="shared", **given)
    devices = given.get("TANDEM_TRAINER_DEVICES", "0")
    for role in ("trainer", "inference"):
        assert environment(config, role)["NVIDIA_VISIBLE_DEVICES"] == devices
        assert environment(config, role)["TANDEM_ADMIN_TOKEN_FILE"] == "/run/secrets/admin_token"
        assert {secret["source"] for secret in config["services"][role]["secrets"]} == SECRETS["inference"]
    assert {environment(config, name)["TANDEM_GPU_MODE"] for name in OURS} == {"shared"}
    preflight = environment(config, "preflight")
    assert preflight["TANDEM_TRAINER_DEVICES"] == preflight["TANDEM_INFERENCE_DEVICES"] == devices


def test_the_file_for_shared_gpus_requires_its_mode():
    done = Compose(MAIN, SHARED).run("config", check=False)
    assert done.returncode != 0
    assert "set TANDEM_GPU_MODE=shared" in done.stderr


def test_the_guard_is_never_a_container():
    assert GUARD not in Compose(MAIN).config()["services"]
    assert everything()["services"][GUARD]["profiles"] == ["never"]


@pytest.mark.parametrize(
    ("trainer", "inference", "variables", "words"),
    [
        (f"{A},{B}", B, {"TANDEM_TRAINER_RANKS": "2"}, f"both name {B}"),
        ("0", B, {}, "some are named by index, some by UUID"),
        # Setting the mode disables compose's own guard.
        ("0", "0", {"TANDEM_GPU_MODE": "dedicated"}, "both name 0"),
    ],
)
def test_preflight_refuses_what_compose_cannot_compare(images, trainer, inference, variables, words):
    """Runs the image with the variables that compose passes."""
    given = {"TANDEM_TRAINER_DEVICES": trainer, "TANDEM_INFERENCE_DEVICES": inference, **variables}
    config = Compose(MAIN).config(**given)
    handed = [word for item in environment(config, "preflight").items() for word in ("-e", "=".join(item))]
    done = docker("run", "--rm", "--network", "none", "--tmpfs", "/run/secrets", *handed,
                  config["services"]["preflight"]["image"], "tandem", "preflight", check=False)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


def test_preflight_refuses_a_model_that_its_user_cannot_read(images, tmp_path):
    """safetensors' own writer makes files that only their owner can read."""
    model = tiny_model.write_tiny_qwen3(tmp_path / "model")
    given = {"TANDEM_DEVICE": "cpu", "TANDEM_BASE_MODEL": "/models/it", "TANDEM_API_KEY": "k" * 32,
             "TANDEM_ADMIN_TOKEN": "t" * 32}  # fmt: skip
    variables = [word for item in given.items() for word in ("-e", "=".join(item))]
    image = Compose(MAIN).config()["services"]["preflight"]["image"]
    for mode, status in ((0o644, 0), (0o600, 1)):
        (model / "model.safetensors").chmod(mode)
        done = docker("run", "--rm", "--network", "none", "-v", f"{model}:/models/it:ro", "--user", "54321:0",
                      "--tmpfs", "/data", *variables, image, "tandem", "preflight", check=False)  # fmt: skip
        assert done.returncode == status, done.stdout
        assert ("uid 54321 can't read model.safetensors" in done.stdout) == bool(status)


def test_nvlink_has_the_four_things_that_nccl_needs():
    """One network, one /dev/shm, one NCCL_HOSTID, and all GPUs visible in both containers."""
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
    assert int(pod["shm_size"]) == int(everything()["services"]["trainer"]["shm_size"])
    assert [port["target"] for port in pod["ports"]] == [8000]
    assert {port["host_ip"] for port in pod["ports"]} == {"127.0.0.1"}
    assert set(pod["networks"]["internal"]["aliases"]) == {"trainer", "inference"}
    assert not pod.get("secrets")
    assert not pod.get("volumes")
    assert environment(config, "preflight")["TANDEM_TRAINER_DEVICES"] == "0,2"
    hardened(pod, "pod")


def test_the_cpu_stack_requests_no_gpu():
    config = everything(MAIN, CPU)
    for name, service in config["services"].items():
        if name == GUARD:
            continue
        assert service.get("runtime") in (None, "runc"), name
        assert environment(config, name).get("NVIDIA_VISIBLE_DEVICES", "void") == "void", name
        assert not service.get("gpus"), name
        assert "deploy" not in service, name
    for name in OURS:
        assert environment(config, name)["TANDEM_DEVICE"] == "cpu", name
        assert environment(config, name)["TANDEM_BASE_MODEL"] == "models/tiny", name
    for name in ("trainer", "inference"):
        assert config["services"][name]["image"].endswith("-cpu")
        assert config["services"][name]["build"]["args"]["DEVICE"] == "cpu"


@pytest.mark.parametrize("files", [(MAIN,), (MAIN, CPU)], ids=["main", "cpu"])
def test_only_public_ports_are_published_and_on_loopback(files):
    published = {
        name: [(port["host_ip"], port["published"], port["target"]) for port in service.get("ports", [])]
        for name, service in everything(*files)["services"].items()
    }
    assert {name: ports for name, ports in published.items() if ports} == {
        "controller": [("127.0.0.1", "8080", 8080)],
        "inference": [("127.0.0.1", "8000", 8000)],
        "prometheus": [("127.0.0.1", "9090", 9090)],
        "grafana": [("127.0.0.1", "3000", 3000)],
    }
    opened = Compose(*files).config("*", TANDEM_BIND="0.0.0.0")
    assert {port["host_ip"] for s in opened["services"].values() for port in s.get("ports", [])} == {"0.0.0.0"}


def test_the_internal_network_has_no_way_out():
    config = everything()
    assert config["networks"]["internal"]["internal"]
    for name in (*SERVICES, "prometheus", "grafana"):
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
    assert service["logging"] == {"driver": "json-file", "options": {"max-size": "50m", "max-file": "5"}}, name
    assert not service.get("pid"), name
    assert service.get("network_mode") != "host", name
    for volume in service.get("volumes", []):
        assert "docker.sock" not in volume["source"], name
        assert volume["type"] == "volume" or volume["read_only"], f"{name} can write to the host's {volume['source']}"


@pytest.mark.parametrize("files", [(MAIN,), (MAIN, CPU), (MAIN, NVLINK)], ids=["main", "cpu", "nvlink"])
def test_every_service_is_hardened_and_its_image_has_a_version(files):
    services = everything(*files)["services"]
    assert set(services) >= {*OURS, *UPSTREAM, "example"}
    for name, service in services.items():
        if name != GUARD:
            hardened(service, name)
            assert service["image"].partition(":")[2] not in ("", "latest"), name
    assert ":latest" not in (ROOT / "Dockerfile").read_text()


def test_any_user_for_all_containers_at_once():
    config = Compose(MAIN, CPU).config("example", TANDEM_UID="54321")
    assert {service["user"] for service in config["services"].values()} == {"54321:0"}


def test_roles_wait_for_preflight_and_not_for_each_other():
    config = everything()
    for name in SERVICES:
        assert config["services"][name]["depends_on"] == {
            "preflight": {"condition": "service_completed_successfully", "required": True}
        }
        assert config["services"][name]["restart"] == "unless-stopped"
    assert config["services"]["preflight"]["restart"] == "no"


def test_memory_can_be_limited():
    given = {"TANDEM_CONTROLLER_MEMORY": "1g", "TANDEM_TRAINER_MEMORY": "2g", "TANDEM_INFERENCE_MEMORY": "3g",
             "TANDEM_TRAINER_SHM": "4g", "TANDEM_INFERENCE_SHM": "5g"}  # fmt: skip
    for files in ((MAIN,), (MAIN, CPU)):
        services = Compose(*files).config(**given)["services"]
        limits = [int(services[name]["mem_limit"]) >> 30 for name in SERVICES]
        assert limits == [1, 2, 3]
        assert [int(services[name]["shm_size"]) >> 30 for name in ("trainer", "inference")] == [4, 5]


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


@pytest.mark.parametrize("files", [(MAIN,), (MAIN, CPU)], ids=["main", "cpu"])
def test_each_service_gets_its_secrets_as_files(files, tmp_path):
    config = Compose(*files).config("*", TANDEM_SECRETS_DIR=str(tmp_path))
    for name, service in config["services"].items():
        if name == GUARD:
            continue
        assert {secret["source"] for secret in service.get("secrets", [])} == SECRETS[name], name
        for variable, value in environment(config, name).items():
            secret = re.search(r"KEY|TOKEN|PASSWORD|SECRET", variable)
            assert not secret or value.startswith("/run/secrets/"), f"{name}: {variable}"
    for name, secret in config["secrets"].items():
        assert secret["file"] == str(tmp_path / name)


def test_secrets_in_the_callers_environment_do_not_reach_containers():
    given = {"TANDEM_API_KEY": "leak-1", "TANDEM_ADMIN_TOKEN": "leak-2", "HF_TOKEN": "leak-3"}
    assert "leak-" not in Compose(MAIN, CPU).run("config", **given).stdout


def test_secrets_are_created_once_in_a_private_directory(tmp_path):
    create = shutil.copy(ROOT / "secrets" / "create", tmp_path)
    subprocess.run([create], check=True)
    first = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert all(re.fullmatch("[0-9a-f]{64}", first[name]) for name in ("api_key", "admin_token", "grafana_password"))
    assert len(set(first.values())) == len(first)
    (tmp_path / "hf_token").write_text("mine")
    subprocess.run([create], check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {**first, "hf_token": "mine"}
    ignored = subprocess.run(["git", "check-ignore", "secrets/api_key", "secrets/hf_token", ".env"], cwd=ROOT,
                             capture_output=True, text=True, check=True)  # fmt: skip
    assert len(ignored.stdout.split()) == 3


# ---------------------------------------------------------------- variables

NOT_PASSED = (
    # Set by the images; docker-compose.cpu.yml sets the device too.
    "root", "log_dir", "device", "controller_host", "inference_host", "metrics_host",
    # Fixed in the containers. TANDEM_CONTROLLER_PORT and TANDEM_INFERENCE_PORT are the published ports.
    "controller_port", "inference_port", "metrics_port",
    # Files.
    "api_key", "admin_token",
    # Has no effect.
    "docker",
)  # fmt: skip
"""Settings that compose does not take from its variables."""
FIXED = {"api_key_file": set(OURS), "admin_token_file": {"preflight", "inference"}, "inference_url": set(SERVICES)}
"""Setting → the services to which compose passes a fixed value."""
PASSED = {field: set(services) for services, fields in (
    (OURS, "base_model gpu_mode dtype log_format max_lora_rank expert_lora weights transport"),
    # The controller refuses runs and jobs that the trainer's topology can't compute.
    (("preflight", "controller", "trainer"), "trainer_ranks tensor_parallel sequence_parallel pipeline_parallel"),
    (("preflight", "controller", "trainer"), "context_parallel expert_parallel expert_tensor_parallel topology"),
    (("preflight",), "trainer_devices inference_devices"),
    (("preflight", "inference"), "inference_tensor_parallel"),
    (("controller",), "max_request_bytes keep_checkpoints keep_every keep_days"),
    (("trainer",), "launch exit_after_job recompute base_precision heartbeat_seconds lease_seconds"),
    (("trainer",), "optimizer_state_every"),
    (("inference",), "max_model_len max_loras gpu_memory_utilization enforce_eager vllm_args vllm_stall_seconds"),
    (("inference",), "verify_tolerance keep_served second_copy swap_requests swap_seconds"),
) for field in fields.split()}  # fmt: skip
"""Setting → the services to which compose passes its variable."""


@pytest.mark.parametrize("files", [(MAIN,), (MAIN, CPU)], ids=["main", "cpu"])
def test_a_setting_reaches_its_containers_and_no_other(files):
    assert sorted([*PASSED, *FIXED, *NOT_PASSED]) == sorted(Settings.model_fields)
    given = {f"TANDEM_{field.upper()}": str(1000 + n) for n, field in enumerate(Settings.model_fields)}
    config = Compose(*files).config(**given)
    for field in Settings.model_fields:
        variable = f"TANDEM_{field.upper()}"
        values = {name: environment(config, name)[variable] for name in OURS if variable in environment(config, name)}
        if field in PASSED:
            assert values == dict.fromkeys(PASSED[field], given[variable]), field
        else:
            assert given[variable] not in values.values(), field
            assert set(values) == (set(OURS) if (field, files) == ("device", (MAIN, CPU)) else FIXED.get(field, set()))


def variables_of(path: str) -> dict[str, set[str | None]]:
    """Each variable that a compose file reads → its defaults; None for a variable that it passes on."""
    text = re.sub(r"(?m)^\s*#.*$", "", Path(path).read_text())
    defaults: dict[str, set[str | None]] = defaultdict(set)
    for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?[^}]*\}", text):
        defaults[name].add(default)
    for name in re.findall(r"(?m)^\s+([A-Z][A-Z0-9_]+):\s*$", text):
        defaults[name].add(None)
    return defaults


def example() -> dict[str, tuple[str, bool]]:
    """.env.example: variable → (value, whether it is commented out)."""
    lines = re.findall(r"(?m)^(#?)([A-Z][A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text())
    return {name: (value, bool(comment)) for comment, name, value in lines}


# Compose's own variables. The file itself uses COMPOSE_PROJECT_NAME.
OF_COMPOSE = {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def test_the_example_lists_every_variable_and_no_other():
    read = set().union(*map(variables_of, (MAIN, CPU, NVLINK, SHARED)))
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
    config = Compose(MAIN).config(**{name: value for name, (value, commented) in example().items() if not commented})
    assert set(config["services"]) == {*OURS, *UPSTREAM}
    assert environment(config, "controller")["TANDEM_BASE_MODEL"] == "/models/Qwen3-0.6B"
    text = (ROOT / ".env.example").read_text()
    everything_uncommented = dict(re.findall(r"(?m)^#?([A-Z][A-Z0-9_]+)=(.+)$", text))
    del everything_uncommented["COMPOSE_FILE"]
    assert set(Compose(MAIN).config(**everything_uncommented)["services"]) == set(config["services"])
