from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.inference.server.args import server_command


def settings(**values: object) -> Settings:
    return Settings(**{"base_model": "org/model", "device": "cpu", **values})  # type: ignore[arg-type]


def option(argv: list[str], name: str) -> str:
    """The last value of an option, which is the one that counts."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


def test_cpu() -> None:
    command = server_command(settings(), environ={"PATH": "/bin"})
    assert command.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert option(command.argv, "--model") == "org/model"
    assert option(command.argv, "--served-model-name") == "base"
    assert option(command.argv, "--dtype") == "float32"
    assert option(command.argv, "--logprobs-mode") == "processed_logprobs"
    assert option(command.argv, "--middleware") == "tandem.inference.server.guard.AdminGuard"
    assert "--gpu-memory-utilization" not in command.argv
    assert "--lora-target-modules" in command.argv
    assert "lm_head" not in command.argv
    assert command.env["PATH"] == "/bin"
    assert command.env["VLLM_SERVER_DEV_MODE"] == command.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert command.env["VLLM_NO_USAGE_STATS"] == "1"
    assert "HF_HUB_OFFLINE" not in command.env


def test_only_who_shares_its_gpus_can_sleep() -> None:
    shared = server_command(settings(device="cuda", gpu_mode="shared"), environ={}).argv
    assert [word for word in shared if word not in server_command(settings(device="cuda"), environ={}).argv] == [
        "--enable-sleep-mode"
    ]


def test_cuda() -> None:
    command = server_command(settings(device="cuda", inference_tensor_parallel=2, max_model_len=4096), environ={})
    assert option(command.argv, "--dtype") == "bfloat16"
    assert option(command.argv, "--gpu-memory-utilization") == "0.85"
    assert option(command.argv, "--tensor-parallel-size") == "2"
    assert option(command.argv, "--max-model-len") == "4096"
    assert "--enforce-eager" not in command.argv
    assert not [name for name in command.env if name.startswith(("VLLM_CPU", "OMP"))]


def test_secrets_are_in_the_environment_only(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("the-api-key\n")
    command = server_command(settings(api_key_file=tmp_path / "key", admin_token="the-admin-token"), environ={})
    assert command.env["VLLM_API_KEY"] == "the-api-key"
    assert not [argument for argument in command.argv if "the-api-key" in argument or "the-admin-token" in argument]
    for extra in ("--api-key x", "--api-key=x", "--api_key x"):
        with pytest.raises(InvalidInput, match="vllm_args"):
            server_command(settings(vllm_args=extra), environ={})


def test_model_in_the_spool_is_served_offline(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    command = server_command(settings(root=tmp_path, base_model="models/tiny"), environ={})
    assert option(command.argv, "--model") == str(tmp_path / "models/tiny")
    assert command.env["HF_HUB_OFFLINE"] == "1"


def test_the_operator_has_the_last_word() -> None:
    extra = ["--max-num-seqs", "7", "--dtype", "float16"]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "9", "OMP_NUM_THREADS": "3"}
    command = server_command(settings(vllm_args=shlex.join(extra)), environ=environ)
    assert command.argv[-4:] == extra
    assert command.env.items() >= environ.items()


def test_on_the_cpu_threads_wait_briefly_unless_the_operator_says_how_they_wait() -> None:
    assert server_command(settings(), environ={}).env["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in server_command(settings(), environ={"OMP_WAIT_POLICY": "active"}).env
    assert "GOMP_SPINCOUNT" not in server_command(settings(device="cuda"), environ={}).env


def test_experts_have_room_for_adapters_where_that_is_asked_for() -> None:
    plain = server_command(settings(device="cuda"), environ={}).argv
    experts = server_command(settings(device="cuda", expert_lora=True), environ={}).argv
    at = plain.index("--logprobs-mode")  # what follows the targets
    assert experts == [*plain[:at], "experts", *plain[at:]]


@pytest.mark.parametrize(("rank", "allowed"), [(1, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)])
def test_lora_rank_is_one_that_vllm_knows(rank: int, allowed: int) -> None:
    command = server_command(settings(max_lora_rank=rank), environ={})
    assert option(command.argv, "--max-lora-rank") == str(allowed)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_lora_rank": 513}, "max_lora_rank"),
        ({"vllm_args": "--x 'open"}, "vllm_args"),
        ({"base_model": None}, "base_model"),
        ({"expert_lora": True, "device": "cpu"}, "expert_lora"),
    ],
)
def test_settings_that_cannot_work_are_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        server_command(settings(**values), environ={})
    assert caught.value.field == field
