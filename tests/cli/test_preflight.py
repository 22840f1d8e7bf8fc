"""`tandem preflight` refuses what compose can't see."""

import json
import os

import pytest
import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write_tiny_qwen3(tmp_path_factory.mktemp("model"), hidden_size=64, layers=2)


@pytest.fixture
def preflight(tmp_path, model, command, monkeypatch):
    """Runs the command; returns its exit status, and what failed: name -> what was found."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)

    def run(**variables: str) -> tuple[int, dict[str, str]]:
        defaults = {
            "TANDEM_ROOT": str(tmp_path), "TANDEM_BASE_MODEL": str(model), "TANDEM_API_KEY": "k" * 32,
            "TANDEM_ADMIN_TOKEN": "t" * 32, "TANDEM_TRAINER_DEVICES": "0", "TANDEM_INFERENCE_DEVICES": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        for name, value in (defaults | variables).items():
            monkeypatch.setenv(name, value)
        status, out, _ = command("preflight", "--json")
        return status, {check["name"]: check["found"] for check in json.loads(out) if check["status"] == "fail"}

    return run


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TANDEM_TRAINER_DEVICES": "0,1", "TANDEM_TRAINER_RANKS": "2", "TANDEM_INFERENCE_DEVICES": "2"},
        {"TANDEM_TRAINER_DEVICES": "GPU-aa", "TANDEM_INFERENCE_DEVICES": "GPU-ab"},
        {"TANDEM_DEVICE": "cpu", "TANDEM_TRAINER_DEVICES": "", "TANDEM_INFERENCE_DEVICES": ""},
        {"TANDEM_GPU_MODE": "shared", "TANDEM_TRAINER_DEVICES": "GPU-ab", "TANDEM_INFERENCE_DEVICES": "GPU-ab"},
        {"TANDEM_MAX_MODEL_LEN": ""},  # compose's way to say "not set"
    ],
)
def test_what_can_start(preflight, tmp_path, variables):
    assert preflight(**variables) == (0, {})
    assert (tmp_path / "spool.json").is_file()


@pytest.mark.parametrize(
    ("variables", "name", "found"),
    [
        ({"TANDEM_INFERENCE_DEVICES": "0"}, "settings", "both name 0"),
        ({"TANDEM_TRAINER_DEVICES": "0,1", "TANDEM_TRAINER_RANKS": "2"}, "settings", "both name 1"),
        ({"TANDEM_INFERENCE_DEVICES": "GPU-ab"}, "GPUs", "by index, some by UUID"),
        ({"TANDEM_TRAINER_DEVICES": "GPU-ab", "TANDEM_INFERENCE_DEVICES": "GPU-abcd"}, "GPUs", "may be one device"),
        ({"TANDEM_TRAINER_DEVICES": "0,2"}, "GPUs", "TANDEM_TRAINER_RANKS=1"),
        ({"TANDEM_TRAINER_DEVICES": "0,0", "TANDEM_TRAINER_RANKS": "2"}, "GPUs", "names one twice"),
        ({"TANDEM_INFERENCE_DEVICES": "1,2"}, "GPUs", "TANDEM_INFERENCE_TENSOR_PARALLEL=1"),
        ({"TANDEM_GPU_MODE": "shared"}, "settings", "must name the same GPUs"),
        ({"TANDEM_GPU_MODE": "shared", "TANDEM_DEVICE": "cpu"}, "settings", "no GPU to share"),
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
