"""What `docker compose config` makes of the files: GPUs per role, what is published, what reaches which container."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import tiny_model

from compose_stack import CPU, MAIN, NVLINK, ROOT, SERVICES, SHARED, Compose, docker
from tandem.config import Settings
from tandem.supervise.programs import PROGRAMS, stop_seconds

pytestmark = pytest.mark.docker
OURS = ("preflight", *SERVICES)
UPSTREAM = ("prometheus", "grafana")
A, B = "GPU-0a1b2c3d-0000-1111-2222-333344445555", "GPU-0a1b2c3d-0000-1111-2222-666677778888"
FOUR = [f"GPU-0000000{i}-0000-1111-2222-333344445555" for i in range(8)]
GUARD = "trainer-and-inference-must-not-have-the-same-gpu"


def seconds(duration: str) -> float:
    """Compose writes 1m15s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([\d.]+)([hms])", duration))


@cache
def everything() -> dict:
    return Compose(MAIN).config("*")


def environment(config: dict, service: str) -> dict[str, str]:
    return {name: value for name, value in config["services"][service]["environment"].items() if value is not None}


# ---------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("trainer", "inference", "variables"),
    [
        ("0", "1", {}),
        ("0,1", "2", {"TANDEM_TRAINER_RANKS": "2", "TANDEM_TENSOR_PARALLEL": "2"}),
        ("0,1,2,3", "4,5,6,7", {"TANDEM_TRAINER_RANKS": "4", "TANDEM_TENSOR_PARALLEL": "2",
                                "TANDEM_INFERENCE_TENSOR_PARALLEL": "4"}),
        (A, B, {}),
        (",".join(FOUR[:2]), FOUR[2], {"TANDEM_TRAINER_RANKS": "2"}),
        (",".join(FOUR[:4]), ",".join(FOUR[4:]), {"TANDEM_TRAINER_RANKS": "4",
                                                  "TANDEM_INFERENCE_TENSOR_PARALLEL": "4"}),
    ],
    ids=["1+1", "2+1", "4+4", "1+1 UUIDs", "2+1 UUIDs", "4+4 UUIDs"],
)  # fmt: skip
@pytest.mark.parametrize("mode", [{}, {"TANDEM_GPU_MODE": "shared"}], ids=["dedicated", "shared"])
def test_each_role_gets_its_gpus_and_no_other(trainer, inference, variables, mode):
    given = {"TANDEM_TRAINER_DEVICES": trainer, "TANDEM_INFERENCE_DEVICES": inference, **variables, **mode}
    config = Compose(MAIN).config("*", **given)
    devices = {"trainer": trainer, "inference": inference}
    for name, service in config["services"].items():
        if name == GUARD:
            continue
        assert service.get("runtime") == ("nvidia" if name in devices else None), name
        assert "deploy" not in service, "GPUs are given by the runtime's variable alone"
        # preflight and controller have it from their image.
        expected = devices.get(name, "void")
        assert environment(config, name).get("NVIDIA_VISIBLE_DEVICES", "void") == expected, name
    assert not set(trainer.split(",")) & set(inference.split(","))
    for name in ("TANDEM_TRAINER_RANKS", "TANDEM_TENSOR_PARALLEL"):
        assert environment(config, "trainer").get(name) == variables.get(name)
    name = "TANDEM_INFERENCE_TENSOR_PARALLEL"
    assert environment(config, "inference").get(name) == variables.get(name)
    for name, value in given.items():
        assert environment(config, "preflight").get(name) == value, "preflight judges what the others get"


def test_the_default_is_one_gpu_each():
    config = everything()
    assert environment(config, "trainer")["NVIDIA_VISIBLE_DEVICES"] == "0"
    assert environment(config, "inference")["NVIDIA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("devices", ["0", "3", A, f"{A},{B}"])
@pytest.mark.parametrize("files", [(MAIN,), (MAIN, NVLINK)], ids=["main", "nvlink"])
def test_the_same_gpu_for_both_is_refused_by_every_command(devices, files):
    both = {"TANDEM_TRAINER_DEVICES": devices, "TANDEM_INFERENCE_DEVICES": devices}
    for command in (("config",), ("up", "--no-start")):
        done = Compose(*files).run(*command, check=False, **both)
        assert done.returncode != 0
        assert GUARD in done.stderr
    assert Compose(*files).config(TANDEM_GPU_MODE="shared", **both), "in shared mode preflight decides"


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


def test_the_file_for_shared_gpus_asks_for_its_mode():
    done = Compose(MAIN, SHARED).run("config", check=False)
    assert done.returncode != 0
    assert "set TANDEM_GPU_MODE=shared" in done.stderr


def test_the_guard_is_never_a_container():
    assert GUARD not in Compose(MAIN).config()["services"]
    assert everything()["services"][GUARD]["profiles"] == ["never"]


@pytest.mark.parametrize(
    ("trainer", "inference", "variables", "words"),
    [
        ("0,1", "1", {"TANDEM_TRAINER_RANKS": "2"}, "both name 1"),
        (f"{A},{B}", B, {"TANDEM_TRAINER_RANKS": "2"}, f"both name {B}"),
        ("0", B, {}, "some are named by index, some by UUID"),
        (A, A[:12], {}, "may be one device"),
        ("0,1", "2", {}, "TANDEM_TRAINER_RANKS=1"),
        ("0", "1,2", {}, "TANDEM_INFERENCE_TENSOR_PARALLEL=1"),
        ("0", "1", {"TANDEM_GPU_MODE": "shared"}, "must name the same GPUs"),
        # Said outright, the mode takes the guard away that compares within compose.
        ("0", "0", {"TANDEM_GPU_MODE": "dedicated"}, "both name 0"),
    ],
)
def test_preflight_refuses_what_compose_cannot_compare(images, tmp_path, trainer, inference, variables, words):
    """As the image says it, with just the variables that compose would hand over."""
    given = {"TANDEM_TRAINER_DEVICES": trainer, "TANDEM_INFERENCE_DEVICES": inference, **variables}
    config = Compose(MAIN).config(**given)
    handed = [word for item in environment(config, "preflight").items() for word in ("-e", "=".join(item))]
    done = docker("run", "--rm", "--network", "none", "--tmpfs", "/run/secrets", *handed,
                  config["services"]["preflight"]["image"], "tandem", "preflight", check=False)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


def test_preflight_refuses_a_model_that_its_user_cannot_read(images, tmp_path):
    """What one user downloaded, another may not read; safetensors' own writer makes files for their user alone."""
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
    """One network, one /dev/shm, one NCCL_HOSTID, all GPUs visible; the processes are pinned instead."""
    given = {"TANDEM_TRAINER_DEVICES": "0,2", "TANDEM_INFERENCE_DEVICES": "1,3"}
    config = Compose(MAIN, NVLINK).config(**given)
    host = set()
    for role in ("trainer", "inference"):
        service = config["services"][role]
        assert service["runtime"] == "nvidia"
        assert service["network_mode"] == "service:pod"
        assert service["ipc"] == "service:pod"
        assert not service.get("networks")
        assert not service.get("ports")
        assert "shm_size" not in service, "it is the pod's"
        variables = environment(config, role)
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert {name: variables[name] for name in given} == given
        host.add(variables["NCCL_HOSTID"])
        assert service["depends_on"]["preflight"]["condition"] == "service_completed_successfully"
        assert service["depends_on"]["pod"]["restart"], "its namespaces go with the pod"
    assert len(host) == 1
    pod = config["services"]["pod"]
    assert pod["ipc"] == "shareable"
    assert int(pod["shm_size"]) == int(Compose(MAIN).config()["services"]["trainer"]["shm_size"])
    assert [port["target"] for port in pod["ports"]] == [8000]
    assert {port["host_ip"] for port in pod["ports"]} == {"127.0.0.1"}
    assert set(pod["networks"]["internal"]["aliases"]) == {"trainer", "inference"}
    assert not pod.get("secrets")
    assert not pod.get("volumes")
    assert environment(config, "preflight")["TANDEM_TRAINER_DEVICES"] == "0,2"
    hardened(pod, "pod")


def test_without_a_gpu_nothing_asks_for_one():
    config = Compose(MAIN, CPU).config("example", "prometheus", "monitoring")
    for name, service in config["services"].items():
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


# ---------------------------------------------------------------- the way in, and what is held


def test_only_public_ports_are_published_and_on_loopback():
    published = {
        name: [(port["host_ip"], port["published"], port["target"]) for port in service.get("ports", [])]
        for name, service in everything()["services"].items()
    }
    assert {name: ports for name, ports in published.items() if ports} == {
        "controller": [("127.0.0.1", "8080", 8080)],
        "inference": [("127.0.0.1", "8000", 8000)],
        "prometheus": [("127.0.0.1", "9090", 9090)],
        "grafana": [("127.0.0.1", "3000", 3000)],
    }
    opened = Compose(MAIN).config("*", TANDEM_BIND="0.0.0.0")
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
def test_every_service_is_hardened(files):
    services = Compose(*files).config("*")["services"]
    assert set(services) >= {*OURS, *UPSTREAM, "example"}
    for name, service in services.items():
        if name != GUARD:
            hardened(service, name)


def test_any_user_for_all_containers_at_once():
    config = Compose(MAIN, CPU).config("example", TANDEM_UID="54321")
    assert {service["user"] for service in config["services"].values()} == {"54321:0"}


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_compose_waits_longer_than_the_programs_may_take_to_stop(role):
    grace = seconds(everything()["services"][role]["stop_grace_period"])
    assert grace >= stop_seconds(PROGRAMS[role]) + 10


def test_what_waits_for_what():
    config = everything()
    for name in SERVICES:
        assert config["services"][name]["depends_on"] == {
            "preflight": {"condition": "service_completed_successfully", "required": True}
        }, "no role waits for another: any of them may be down while the others start"
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


# ---------------------------------------------------------------- secrets


SECRETS = {
    "preflight": {"api_key", "admin_token", "hf_token"},
    "controller": {"api_key", "hf_token"},
    "trainer": {"api_key", "hf_token"},
    "inference": {"api_key", "admin_token", "hf_token"},
    "example": {"api_key"},
    "prometheus": set(),
    "grafana": {"grafana_password"},
}


def test_secrets_are_files_and_only_where_needed(tmp_path):
    config = Compose(MAIN).config("*", TANDEM_SECRETS_DIR=str(tmp_path))
    for name, service in config["services"].items():
        if name == GUARD:
            continue
        assert {secret["source"] for secret in service.get("secrets", [])} == SECRETS[name], name
        for variable, value in environment(config, name).items():
            secret = re.search(r"KEY|TOKEN|PASSWORD|SECRET", variable)
            assert not secret or value.startswith("/run/secrets/"), f"{name}: {variable}"
    for name, secret in config["secrets"].items():
        assert secret["file"] == str(tmp_path / name)


def test_secrets_in_the_callers_environment_stay_there():
    given = {"TANDEM_API_KEY": "leak-1", "TANDEM_ADMIN_TOKEN": "leak-2", "HF_TOKEN": "leak-3"}
    assert "leak-" not in Compose(MAIN, CPU).run("config", **given).stdout


def test_secrets_are_made_once_and_closed_to_other_users(tmp_path):
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

# Settings that no variable of compose sets, and why.
NOT_PASSED = {
    "root": "the image's: /data",
    "device": "the image's: cuda, or cpu",
    "api_key": "a file",
    "admin_token": "a file",
    "controller_host": "the image's: 0.0.0.0",
    "controller_port": "fixed in the container; TANDEM_CONTROLLER_PORT is where it is published",
    "docker": "understood and without effect",
    "inference_host": "the image's: 0.0.0.0",
    "inference_port": "fixed in the container; TANDEM_INFERENCE_PORT is where it is published",
    "log_dir": "the image's: a tmpfs",
    "metrics_host": "the image's: 0.0.0.0",
    "metrics_port": "the image's: prometheus.yml names it",
}
EVERYWHERE = set(OURS)
BELONGS = {
    "base_model": EVERYWHERE,
    "gpu_mode": EVERYWHERE,
    "dtype": EVERYWHERE,
    "log_format": EVERYWHERE,
    "max_lora_rank": EVERYWHERE,
    "expert_lora": EVERYWHERE,
    "api_key_file": EVERYWHERE,
    "admin_token_file": {"preflight", "inference"},
    "max_request_bytes": {"controller"},
    "launch": {"trainer"},
    "exit_after_job": {"trainer"},
    "trainer_ranks": {"preflight", "trainer"},
    "tensor_parallel": {"preflight", "trainer"},
    "trainer_devices": {"preflight"},
    "recompute": {"trainer"},
    "heartbeat_seconds": {"trainer"},
    "lease_seconds": {"trainer"},
    "inference_url": {"controller", "trainer", "inference"},
    "inference_tensor_parallel": {"preflight", "inference"},
    "inference_devices": {"preflight"},
    "max_model_len": {"inference"},
    "max_loras": {"inference"},
    "gpu_memory_utilization": {"inference"},
    "enforce_eager": {"inference"},
    "vllm_args": {"inference"},
    "vllm_stall_seconds": {"inference"},
    "verify_tolerance": {"inference"},
    "keep_served": {"inference"},
}


def test_every_setting_is_passed_or_said_why_not():
    assert set(BELONGS) | set(NOT_PASSED) == set(Settings.model_fields)
    assert not set(BELONGS) & set(NOT_PASSED)


@pytest.mark.parametrize("field", sorted(BELONGS))
def test_a_setting_reaches_its_containers_and_no_other(field):
    variable, value = f"TANDEM_{field.upper()}", "17"
    fixed = {"api_key_file", "admin_token_file", "inference_url"}
    for files in ((MAIN,), (MAIN, CPU)):
        config = Compose(*files).config(**({} if field in fixed else {variable: value}))
        having = {name for name in OURS if variable in environment(config, name)}
        assert having == BELONGS[field]
        if field not in fixed:
            assert {environment(config, name)[variable] for name in having} == {value}


@pytest.mark.parametrize("field", sorted(NOT_PASSED))
def test_what_is_not_passed_reaches_no_container(field):
    variable = f"TANDEM_{field.upper()}"
    config = Compose(MAIN).config(**{variable: "17"})
    assert not [name for name in OURS if variable in environment(config, name)]


def variables_of(path: str) -> dict[str, set[str | None]]:
    """Each variable that a compose file reads -> its defaults; None where it is passed through and has none here."""
    text = re.sub(r"(?m)^\s*#.*$", "", Path(path).read_text())
    found: dict[str, set[str | None]] = {}
    for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?[^}]*\}", text):
        found.setdefault(name, set()).add(default)
    for name in re.findall(r"(?m)^\s+([A-Z][A-Z0-9_]+):\s*$", text):
        found.setdefault(name, set()).add(None)
    return found


def example() -> dict[str, tuple[str, bool]]:
    """.env.example: variable -> (value, whether it stands commented out)."""
    lines = re.findall(r"(?m)^(#?)([A-Z][A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text())
    return {name: (value, bool(comment)) for comment, name, value in lines}


# Compose's own; COMPOSE_PROJECT_NAME is used in the file too.
OF_COMPOSE = {"COMPOSE_FILE", "COMPOSE_PROFILES"}


def test_the_example_explains_every_variable_and_no_other():
    read = set().union(*map(variables_of, (MAIN, CPU, NVLINK, SHARED)))
    assert read == set(example()) - OF_COMPOSE


def test_the_examples_defaults_are_the_files():
    fields = Settings.model_fields
    for name, (value, commented) in example().items():
        if name in OF_COMPOSE or not commented:
            continue
        defaults = variables_of(MAIN).get(name, set()) - {None, ""} or {""}
        field = fields.get(name.removeprefix("TANDEM_").lower())
        if defaults == {""} and field is not None and field.default is not None:
            default = int(field.default) if isinstance(field.default, bool) else field.default
            number = isinstance(default, int | float)
            assert (float(value) == default) if number else (value == default), name
        else:
            assert defaults == {value}, name


def test_the_example_as_it_is_makes_the_stack():
    config = Compose(MAIN).config(**{name: value for name, (value, commented) in example().items() if not commented})
    assert set(config["services"]) == {*OURS, *UPSTREAM}
    assert environment(config, "controller")["TANDEM_BASE_MODEL"] == "/models/Qwen3-0.6B"
    text = (ROOT / ".env.example").read_text()
    everything_uncommented = dict(re.findall(r"(?m)^#?([A-Z][A-Z0-9_]+)=(.+)$", text))
    del everything_uncommented["COMPOSE_FILE"]
    assert set(Compose(MAIN).config(**everything_uncommented)["services"]) == set(config["services"])


def test_no_image_floats():
    for files in ((MAIN,), (MAIN, CPU), (MAIN, NVLINK)):
        for name, service in Compose(*files).config("*")["services"].items():
            if name != GUARD:
                _, _, tag = service["image"].partition(":")
                assert tag, name
                assert tag != "latest", name
    assert ":latest" not in (ROOT / "Dockerfile").read_text()
