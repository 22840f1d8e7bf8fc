"""`tandem doctor` and `tandem preflight` on healthy deployments and on broken ones."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import tiny_model

import fake_nvml
from api_server import KEY, tree
from fake_vllm import FakeVllm
from spool.spool_tools import run_spec, write_adapter
from spool.volume_tools import mounted
from tandem.cli.checks import CHECKS, Command, selected
from tandem.spool import Spool
from tiny import LATENT, SHAPE


@pytest.fixture
def doctor(tandem):
    """Runs the command; returns its exit status, and its checks by name."""

    def run() -> tuple[int, dict[str, dict[str, str]]]:
        status, out, _ = tandem("doctor", "--json")
        return status, {check["name"]: check for check in json.loads(out)}

    return run


def test_a_healthy_deployment(doctor, tandem, root, monkeypatch):
    monkeypatch.setenv("TANDEM_ROOT", str(root))
    monkeypatch.setenv("TANDEM_BASE_MODEL", "models/tiny")
    monkeypatch.setenv("TANDEM_INFERENCE_URL", "http://127.0.0.1:9")
    before = tree(root)
    status, checks = doctor()
    assert status == 0, checks
    healthy = [
        "python",
        "settings",
        "TANDEM_API_KEY",
        "volume",
        "volume: locks",
        "device",
        "base model",
        "controller",
    ]
    assert {name: checks[name]["status"] for name in healthy} == dict.fromkeys(healthy, "ok")
    assert checks["vLLM"]["status"] == "warn"
    assert checks["weights"]["found"].startswith("adapter")
    assert tree(root) == before
    status, out, _ = tandem("doctor")
    assert (status, "qwen3" in out) == (0, True)


def test_everything_wrong_at_once(doctor, monkeypatch, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_BASE_MODEL", str(tmp_path / "nothing"))
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "file"))
    monkeypatch.setenv("TANDEM_API_KEY", "wrong")
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    status, checks = doctor()
    assert status == 1
    for name in ("volume", "base model", "controller", "device"):
        assert checks[name]["status"] == "fail", name
        assert checks[name]["remedy"], name


def test_settings_that_open_the_controller_or_cannot_be_read(doctor, monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "")
    monkeypatch.setenv("TANDEM_CONTROLLER_HOST", "0.0.0.0")
    assert doctor()[1]["TANDEM_API_KEY"]["status"] == "fail"
    monkeypatch.setenv("TANDEM_LAUNCH", "rocket")
    status, checks = doctor()
    assert (status, checks["settings"]["status"]) == (1, "fail")
    assert "TANDEM_LAUNCH" in checks["settings"]["found"]


def test_a_secret_is_open_only_where_its_directories_are_too(doctor, monkeypatch):
    """secrets/create makes 0644 files in a 0700 directory. A container's uid can read the secret
    files, and no other user of the machine can."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        directory = Path(name)
        key = directory / "api_key"
        key.write_text("a-long-enough-key")
        key.chmod(0o644)
        monkeypatch.delenv("TANDEM_API_KEY", raising=False)
        monkeypatch.setenv("TANDEM_API_KEY_FILE", str(key))
        found = []
        for mode in (0o700, 0o755):
            directory.chmod(mode)
            found.append(doctor()[1]["TANDEM_API_KEY"])
        assert [check["status"] for check in found] == ["ok", "warn"]
        assert f"chmod 600 {key}" in found[1]["remedy"]


@pytest.mark.parametrize(
    ("variables", "name", "found"),
    [
        ({"DEVICE": "cpu"}, "second copy", "in memory: vLLM runs on the CPU"),
        ({"SECOND_COPY": "host"}, "second copy", "in pinned host memory: TANDEM_SECOND_COPY=host"),
        ({"GPU_MODE": "shared"}, "second copy", "in pinned host memory: on shared GPUs"),
        (
            {"GPU_MODE": "shared", "SECOND_COPY": "device"},
            "second copy",
            "on the GPU: TANDEM_SECOND_COPY=device",
        ),
        ({}, "second copy", "on the GPU if half of the memory for the KV cache is left"),
        ({}, "transport", "merge: only adapters travel"),
        ({"TRANSPORT": "nccl"}, "transport", "nccl: whole weights"),
        ({"TRANSPORT": "volume"}, "transport", "volume: whole weights"),
    ],
)
def test_how_merged_weights_travel_and_where_their_second_copy_is(
    doctor, monkeypatch, variables, name, found
):
    for setting, value in ({"WEIGHTS": "merged", "DEVICE": "cuda"} | variables).items():
        monkeypatch.setenv(f"TANDEM_{setting}", value)
    assert doctor()[1][f"weights: {name}"]["found"].startswith(found)


@pytest.mark.parametrize(
    ("gpus", "found"), [(1, "1 GPU (TANDEM_TOPOLOGY=auto): "), (0, "TANDEM_TOPOLOGY=auto: the ")]
)
def test_an_automatic_topology_is_shown_where_the_gpus_are(
    doctor, model, nvml, monkeypatch, gpus, found
):
    nvml.set(*(fake_nvml.gpu(f"GPU-{n}") for n in range(gpus)))
    monkeypatch.setenv("TANDEM_BASE_MODEL", str(model))
    monkeypatch.setenv("TANDEM_TOPOLOGY", "auto")
    assert doctor()[1]["topology"]["found"].startswith(found)


def test_what_cannot_be_served_is_named(doctor, tmp_path, monkeypatch):
    spool = Spool.create(tmp_path)
    for number, weights in enumerate(("adapter", "merged", "merged")):
        spool.runs.create(run_spec(f"run-{number}", weights=weights), write_adapter)
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path))
    monkeypatch.setenv("TANDEM_VLLM_ARGS", "--api-server-count 4")
    checks = doctor()[1]
    assert checks["weights: runs"]["status"] == "warn"
    assert "run-1, run-2" in checks["weights: runs"]["found"]
    assert (
        not {"weights: second copy", "weights: transport", "weights: vLLM's arguments"}
        & checks.keys()
    )
    monkeypatch.setenv("TANDEM_WEIGHTS", "merged")
    status, checks = doctor()
    assert status == 1
    assert checks["weights: runs"]["status"] == "fail"
    assert "run-1, run-2" in checks["weights: runs"]["found"]
    assert checks["weights: vLLM's arguments"]["status"] == "fail"
    assert "--api-server-count" in checks["weights: vLLM's arguments"]["found"]


def test_secrets_that_are_set_and_wrong(doctor, preflight_settings, monkeypatch):
    """`tandem preflight` reports the same about secrets as `tandem doctor`."""
    monkeypatch.setenv("TANDEM_CONTROLLER_HOST", "0.0.0.0")
    for key, expected in (
        (KEY, ("fail", "is one of the API keys")),
        ("short", ("warn", "shorter")),
    ):
        monkeypatch.setenv("TANDEM_API_KEY", key)
        monkeypatch.setenv("TANDEM_ADMIN_TOKEN", key if key == KEY else "t" * 32)
        name = "TANDEM_ADMIN_TOKEN" if key == KEY else "TANDEM_API_KEY"
        for found in (doctor()[1][name], preflight_settings()[name]):
            assert (found["status"], expected[1] in found["found"]) == (expected[0], True), found


@pytest.fixture
def preflight_settings(command):
    """Runs `tandem preflight` with the settings as they are; returns the checks by name."""
    return lambda: {check["name"]: check for check in json.loads(command("preflight", "--json")[1])}


def test_what_answers_for_vllm(doctor, monkeypatch):
    vllm = FakeVllm()
    vllm.start()
    monkeypatch.setattr("fake_vllm.API_KEY", KEY)
    try:
        monkeypatch.setenv("TANDEM_INFERENCE_URL", f"{vllm.url}/v1")
        assert doctor()[1]["vLLM"]["found"] == f"{vllm.url}: serves base"
        vllm.dead = True
        checks = doctor()[1]
        assert (checks["vLLM"]["status"], "/health answers 503" in checks["vLLM"]["found"]) == (
            "fail",
            True,
        )
        vllm.dead = False
        monkeypatch.setattr(vllm, "_route", lambda *_: (200, {"data": [{"id": "gpt"}]}))
        checks = doctor()[1]
        assert checks["vLLM"]["status"] == "fail"
        assert "serves ['gpt'], without the model 'base'" in checks["vLLM"]["found"]
    finally:
        vllm.stop()
    assert doctor()[1]["vLLM"]["status"] == "warn"


def test_no_question_is_asked_in_two_places(command, monkeypatch):
    assert len({check.name for check in CHECKS}) == len({check.answer for check in CHECKS})
    assert len({check.asks for check in CHECKS}) == len(CHECKS)
    monkeypatch.setenv("COLUMNS", "2000")
    for words in (["doctor"], ["preflight"], ["smoke", "reach"]):
        _, text, _ = command(*words, "--help")
        asked = [check.name for check in CHECKS if check.asks in text]
        assert asked == [check.name for check in selected(Command[words[-1].upper()])]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write_tiny_qwen3(tmp_path_factory.mktemp("model"), hidden_size=64, layers=2)


@pytest.fixture
def preflight(tmp_path, model, command, monkeypatch):
    """Runs `tandem preflight`. Returns the command's exit status, and the failed checks: name ->
    message."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)

    def run(**variables: str) -> tuple[int, dict[str, str]]:
        defaults = {
            "ROOT": str(tmp_path),
            "BASE_MODEL": str(model),
            "API_KEY": "k" * 32,
            "ADMIN_TOKEN": "t" * 32,
        }
        defaults |= {"TRAINER_DEVICES": "0", "INFERENCE_DEVICES": "1"}
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        for name, value in (
            {f"TANDEM_{name}": value for name, value in defaults.items()} | variables
        ).items():
            monkeypatch.setenv(name, value)
        status, out, _ = command("preflight", "--json")
        return status, {
            check["name"]: check["found"] for check in json.loads(out) if check["status"] == "fail"
        }

    return run


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {
            "TANDEM_TRAINER_DEVICES": "0,1",
            "TANDEM_TRAINER_RANKS": "2",
            "TANDEM_INFERENCE_DEVICES": "2",
        },
        {"TANDEM_TRAINER_DEVICES": "GPU-aa", "TANDEM_INFERENCE_DEVICES": "GPU-ab"},
        {"TANDEM_DEVICE": "cpu", "TANDEM_TRAINER_DEVICES": "", "TANDEM_INFERENCE_DEVICES": ""},
        {
            "TANDEM_GPU_MODE": "shared",
            "TANDEM_TRAINER_DEVICES": "GPU-ab",
            "TANDEM_INFERENCE_DEVICES": "GPU-ab",
        },
        {"TANDEM_MAX_MODEL_LEN": ""},  # compose passes an empty text for a variable that is not set
    ],
)
def test_what_can_start(preflight, tmp_path, variables):
    assert preflight(**variables) == (0, {})
    assert (tmp_path / "spool.json").is_file()


@pytest.mark.parametrize(
    ("variables", "name", "found"),
    [
        ({"TANDEM_INFERENCE_DEVICES": "0"}, "settings", "both name 0"),
        ({"TANDEM_INFERENCE_DEVICES": "GPU-ab"}, "GPUs", "by index, some by UUID"),
        (
            {"TANDEM_TRAINER_DEVICES": "GPU-ab", "TANDEM_INFERENCE_DEVICES": "GPU-abcd"},
            "GPUs",
            "may be one device",
        ),
        ({"TANDEM_TRAINER_DEVICES": "0,2"}, "GPUs", "TANDEM_TRAINER_RANKS=1"),
        ({"TANDEM_TRAINER_DEVICES": "0,0", "TANDEM_TRAINER_RANKS": "2"}, "GPUs", "names one twice"),
        ({"TANDEM_INFERENCE_DEVICES": "1,2"}, "GPUs", "TANDEM_INFERENCE_TENSOR_PARALLEL=1"),
        ({"TANDEM_INFERENCE_DEVICES": ""}, "GPUs", "inference []"),
        ({"TANDEM_API_KEY": ""}, "TANDEM_API_KEY", "empty"),
        ({"TANDEM_ADMIN_TOKEN": "k" * 32}, "TANDEM_ADMIN_TOKEN", "one of the API keys"),
        ({"TANDEM_BASE_MODEL": ""}, "base model", "not set"),
        ({"TANDEM_BASE_MODEL": "models/none"}, "base model", "models/none"),
    ],
)
def test_what_is_refused_with_its_name(preflight, variables, name, found):
    status, failed = preflight(**variables)
    assert status == 1
    assert found in failed[name]


@pytest.mark.parametrize(
    ("family", "variables", "name", "found"),
    [
        ("glm4_moe_lite", {}, "vLLM", "18 here; vLLM serves glm4_moe_lite on the CPU where it is"),
        ("qwen3_5_text", {}, "vLLM", "set TANDEM_DTYPE=bfloat16"),
        ("qwen3_5_text", {"TANDEM_WEIGHTS": "merged"}, "merged weights", "fp32 weights"),
        ("qwen3_5_text", {"TANDEM_DTYPE": "bfloat16"}, None, None),
    ],
)
def test_a_base_model_that_vllm_does_not_serve_here_is_refused(
    preflight, tmp_path, family, variables, name, found
):
    (tmp_path / "other").mkdir()
    of_family = LATENT if family == "glm4_moe_lite" else {}
    config = {**SHAPE, **of_family, "model_type": family}
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    (tmp_path / "other/model.safetensors").touch()
    on_the_cpu = {"DEVICE": "cpu", "TRAINER_DEVICES": "", "INFERENCE_DEVICES": ""}
    on_the_cpu["BASE_MODEL"] = str(tmp_path / "other")
    given = {f"TANDEM_{name}": value for name, value in on_the_cpu.items()}
    status, failed = preflight(**given, **variables)
    assert status == (0 if name is None else 1), failed
    if name is not None:
        assert found in failed[f"base model: {name}"]


@pytest.mark.parametrize("has_spool", [True, False])
def test_a_full_volume_that_has_a_spool_starts(preflight, command, tmp_path, has_spool):
    """On a full volume the programs wait for space, and users free space through the controller's
    routes for deletion. On a volume without a spool the controller has nothing to delete."""
    volume = tmp_path / "volume"
    with mounted(volume, "-t", "tmpfs", "-o", "size=512k", "tmpfs"):
        if has_spool:
            Spool.create(volume)
        with suppress(OSError), (volume / "filling").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        status, failed = preflight(TANDEM_ROOT=str(volume))
        assert (status, bool(failed)) == ((0, False) if has_spool else (1, True))
        checks = {check["name"]: check for check in json.loads(command("preflight", "--json")[1])}
        assert {name: checks[name]["status"] for name in ("volume", "disk")} == (
            {"volume": "warn" if has_spool else "fail", "disk": "warn"}
        )
        assert "ENOSPC" in checks["volume"]["found"]
        checks = {
            check["name"]: check["status"] for check in json.loads(command("doctor", "--json")[1])
        }
        assert (checks["volume"], checks["disk"]) == ("fail", "fail")


def test_preflight_of_an_unknown_role_is_wrong_usage(command):
    status, _, err = command("preflight", "--role", "infernce")
    assert (status, "--role" in err) == (2, True)


def test_what_is_damaged_is_named(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_ROOT", str(tmp_path / "spool"))
    spool = Spool.create(tmp_path / "spool")
    assert doctor()[1]["spool"]["found"] == "nothing is damaged"
    (spool.root / "runs/empty").mkdir()
    (spool.paths.live / "junk").touch()
    checks = doctor()[1]
    assert checks["damaged run"]["status"] == "warn"
    assert "runs/empty" in checks["damaged run"]["found"]
    assert checks["damaged name"]["found"] == str(spool.root / "jobs/live/junk")


@pytest.mark.parametrize(("devices", "status"), [("1", "fail"), ("", "ok")])
def test_named_devices_without_a_gpu_are_no_reason_to_take_the_cpu(
    doctor, model, nvml, monkeypatch, devices: str, status: str
) -> None:
    nvml.set()
    monkeypatch.setenv("TANDEM_DEVICE", "auto")
    monkeypatch.setenv("TANDEM_TRAINER_DEVICES", devices)
    _, checks = doctor()
    assert checks["device"]["status"] == status
    assert ("names GPUs, but there is none" in checks["device"]["found"]) == bool(devices)
