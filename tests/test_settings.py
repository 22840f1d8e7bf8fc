"""Settings: the names of an earlier project's settings are understood, secrets come from files, and
every variable is documented."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import InvalidInput

DOCUMENT = (Path(__file__).parent.parent / "docs" / "settings.md").read_text()


def test_settings_and_their_documentation_have_the_same_names():
    rows = " ".join(line.split("|")[1] for line in DOCUMENT.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(TANDEM_\w+)`", rows)) == {
        f"TANDEM_{f.upper()}" for f in Settings.model_fields
    } | {"TANDEM_URL", "TANDEM_TEACHER_URL", "TANDEM_TEACHER_API_KEY"}  # variables of clients


@pytest.mark.parametrize(
    ("docker", "exit_after_job"),
    [
        ("RL_DOCKER", "MEGATRON_EXIT_AFTER_JOB"),
        ("TANDEM_DOCKER", "TANDEM_EXIT_AFTER_JOB"),
    ],
)
@pytest.mark.parametrize(
    ("values", "launch"),
    [
        ((None, None, None), "fork"),
        (("1", None, None), "torchrun"),
        (("0", None, None), "fork"),
        ((None, "1", None), "fork"),
        ((None, "0", None), "resident"),
        (("1", "1", None), "torchrun"),
        (("1", "0", None), "resident"),
        (("1", None, "fork"), "fork"),
        (("1", "1", "fork"), "fork"),
        ((None, "0", "resident"), "resident"),
        ((None, "1", "torchrun"), "torchrun"),
    ],
)
def test_the_ancestors_names_choose_a_launch(monkeypatch, docker, exit_after_job, values, launch):
    for variable, value in zip((docker, exit_after_job, "TANDEM_LAUNCH"), values, strict=True):
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert Settings().launch == launch


def test_devices_are_a_comma_separated_list(monkeypatch):
    monkeypatch.setenv("TANDEM_TRAINER_DEVICES", "GPU-aa, 1,")
    assert Settings().trainer_devices == ["GPU-aa", "1"]


SHARED = {"TANDEM_GPU_MODE": "shared"}
HOSTS = {
    "TANDEM_EXECUTOR": "hosts",
    "TANDEM_TRAINER_HOSTS": "2",
    "TANDEM_TRAINER_RANKS": "2",
}
MERGED = {"TANDEM_WEIGHTS": "merged"}


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        (
            {"TANDEM_TRAINER_DEVICES": "0,1", "TANDEM_INFERENCE_DEVICES": "1"},
            "TANDEM_INFERENCE_DEVICES both name 1",
        ),
        (
            SHARED | {"TANDEM_TRAINER_DEVICES": "0", "TANDEM_INFERENCE_DEVICES": "1"},
            "must name the same GPUs",
        ),
        (SHARED | {"TANDEM_TRAINER_DEVICES": "0"}, "must name the same GPUs"),
        (SHARED | {"TANDEM_DEVICE": "cpu"}, "no GPU to share"),
        ({"TANDEM_TRAINER_RANKS": "3", "TANDEM_TENSOR_PARALLEL": "2"}, "TANDEM_TENSOR_PARALLEL"),
        (
            {"TANDEM_TOPOLOGY": "auto", "TANDEM_EXPERT_PARALLEL": "1"},
            "but TANDEM_EXPERT_PARALLEL is set too",
        ),
        ({"TANDEM_TRANSPORT": "volume"}, "TANDEM_TRANSPORT=volume is for merged weights"),
        (MERGED | SHARED | {"TANDEM_TRANSPORT": "nccl"}, "vLLM sleeps while a job trains"),
        (
            MERGED | {"TANDEM_TRANSPORT": "volume", "TANDEM_BASE_PRECISION": "fp8"},
            "fp8 quantises; use merge",
        ),
        (MERGED | {"TANDEM_SWAP_REQUESTS": "recompute"}, "should be 'keep' or 'wait'"),
        (MERGED | {"TANDEM_TRANSPORT": "ipc"}, "should be 'auto', 'merge', 'nccl' or 'volume'"),
        (SHARED | {"TANDEM_INFERENCE_REPLICAS": "2"}, "GPUs of its own for each vLLM"),
        ({"TANDEM_TRAINER_HOSTS": "2", "TANDEM_TRAINER_RANKS": "2"}, "=local: has one host"),
        (HOSTS | {"TANDEM_TRAINER_RANKS": "3"}, "HOSTS=2 does not divide TANDEM_TRAINER_RANKS=3"),
        (HOSTS | {"TANDEM_TRAINER_RANKS": "1"}, "HOSTS=2 does not divide TANDEM_TRAINER_RANKS=1"),
        (HOSTS | {"TANDEM_LAUNCH": "torchrun"}, "forks; unset TANDEM_LAUNCH=torchrun"),
        (HOSTS | SHARED, "can't share GPUs"),
        (
            HOSTS | {"TANDEM_EXECUTOR": "slurm", "TANDEM_TRAINER_DEVICES": "0"},
            "Slurm chooses the GPUs; unset TANDEM_TRAINER_DEVICES",
        ),
        (HOSTS | {"TANDEM_TOPOLOGY": "auto"}, "needs given sizes"),
        ({"TANDEM_PARALLEL_JOBS": "2"}, "=local: runs one job at a time; unset TANDEM_PARALLEL_"),
        (HOSTS | {"TANDEM_PARALLEL_JOBS": "2"}, "=hosts: runs one job at a time"),
        ({"TANDEM_LINGER_SECONDS": "9"}, "=local: has no pods that could stay; unset TANDEM_LIN"),
        (
            HOSTS | {"TANDEM_EXECUTOR": "slurm", "TANDEM_LINGER_SECONDS": "9"},
            "=slurm: has no pods that could stay",
        ),
        (HOSTS | {"TANDEM_ORPHAN_SECONDS": "5"}, "ORPHAN_SECONDS=5 is below the heartbeat"),
        ({"TANDEM_REPLICA": "Pod_1"}, "TANDEM_REPLICA|pattern"),
        ({"TANDEM_KEEP_EVERY": "5"}, "TANDEM_KEEP_CHECKPOINTS"),
        (
            {"TANDEM_EXIT_AFTER_JOB": "0", "TANDEM_LAUNCH": "fork"},
            "_JOB=0 contradicts TANDEM_LAUNCH=fork",
        ),
        (
            {"TANDEM_EXIT_AFTER_JOB": "1", "TANDEM_LAUNCH": "resident"},
            "_JOB=1 contradicts TANDEM_LAUNCH=resident",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(monkeypatch, variables, match):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=match):
        Settings()


@pytest.mark.parametrize(("trainer", "inference"), [("", ""), ("0,1", "1,0")])
def test_shared_gpus_are_the_same_for_both(trainer, inference):
    Settings(gpu_mode="shared", trainer_devices=trainer, inference_devices=inference)


def test_secrets_come_from_files_and_stay_out_of_repr(monkeypatch, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    monkeypatch.setenv("TANDEM_API_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", "t0ken")
    settings = Settings()
    assert settings.secret("api_key") == "s3cret"
    assert settings.secret("admin_token") == "t0ken"
    assert "t0ken" not in repr(settings)
    assert "s3cret" not in repr(settings)


def test_a_secret_that_cannot_be_read_is_named_by_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN_FILE", str(tmp_path / "nothing"))
    with pytest.raises(
        InvalidInput, match=r"TANDEM_ADMIN_TOKEN_FILE: can't read .*nothing: No such file"
    ):
        Settings().secret("admin_token")


@pytest.mark.parametrize("content", [b"first\nsecond", b"t\xc3\xb6ken", b"\xff\x00"])
def test_a_secret_that_no_header_can_carry_is_refused_and_not_shown(tmp_path, content):
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(InvalidInput) as refused:
        Settings(admin_token_file=tmp_path / "token").secret("admin_token")
    assert refused.value.field == "TANDEM_ADMIN_TOKEN_FILE"
    assert "second" not in str(refused.value)
    # The file begins with a byte order mark.
    (tmp_path / "token").write_bytes(b"\xef\xbb\xbfkey-one\nkey-two")
    assert Settings(api_key_file=tmp_path / "token").api_keys == ["key-one", "key-two"]
    (tmp_path / "token").write_text("ann:key-1\nkey-2\nbob:key-3,ann:key:4\n: key-5\n")
    named = {"key-1": "ann", "key-2": "", "key-3": "bob", "key:4": "ann", ":": "", "key-5": ""}
    assert Settings(api_key_file=tmp_path / "token").named_keys == named
    assert Settings(api_key="ann:key").named_keys == {"ann:key": ""}
    (tmp_path / "token").write_text("ann:key\nbob:key\n")
    with pytest.raises(InvalidInput, match="ann and bob have the same key"):
        _ = Settings(api_key_file=tmp_path / "token").api_keys


@pytest.mark.parametrize(
    "url", ["vllm:8000", "127.0.0.1:8000", "http://vllm:port", "http://", "ftp://vllm:8000"]
)
def test_an_inference_url_that_is_none_is_refused(url):
    with pytest.raises(ValidationError, match="is not a URL such as"):
        Settings(inference_url=url)
    assert (
        Settings(inference_url="https://vllm/prefix").resolved_inference_url
        == "https://vllm/prefix"
    )


def test_a_vllm_that_could_verify_no_step_is_refused():
    """The longest probe has 64 tokens, and vLLM needs room for one more token. A prompt as long as
    vLLM's maximum is refused."""
    with pytest.raises(ValidationError, match="66"):
        Settings(max_model_len=65)
    assert Settings(max_model_len=66).max_model_len == 66


def test_a_model_under_the_root_is_taken_from_there(tmp_path):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert Settings(root=tmp_path, base_model="models/tiny").model_path() == str(
        tmp_path / "models" / "tiny"
    )
    for name in ("Qwen/Qwen3-8B", "a" * 300):  # a file's name can't have 300 characters
        assert Settings(root=tmp_path, base_model=name).model_path() == name


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")]
)
def test_vllms_address_is_that_at_which_it_listens(host, url):
    assert Settings(inference_host=host).resolved_inference_url == url


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tolerance_of_a_served_step_follows_the_dtype_up_to_the_setting(dtype):
    from tandem.inference.publisher.verify import ROUNDING, Tolerance

    free = Tolerance.of(Settings(device="cpu", dtype=dtype))
    assert free.allowed(0.0, 0.0) == ROUNDING[dtype]
    limited = Tolerance.of(Settings(device="cpu", dtype=dtype, verify_tolerance=0.3))
    assert (limited.allowed(0.0, 0.0), limited.allowed(0.0, 9.0)) == (ROUNDING[dtype], 0.3)
