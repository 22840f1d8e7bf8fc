"""vLLM's command line and environment for each kind of deployment."""

import json
import re
import shlex
from itertools import pairwise, takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import tiny_model

from fake_nvml import FakeNvml, gpu
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.inference.server import middleware
from tandem.inference.server.command import (
    GRAPH_SIZES,
    ServerCommand,
    server_command,
    serving_device,
)
from tandem.system.api_keys import name_of
from tandem.vllm_client.names import KEYS_VARIABLE
from tiny import LATENT, SHAPE, write_random_model


def command(environ: dict[str, str] | None = None, **values: object) -> ServerCommand:
    given: dict[str, Any] = {"base_model": "org/model", "device": "cpu", **values}
    settings = Settings(**given)
    return server_command(settings, environ=environ or {})


def option(argv: list[str], name: str) -> str:
    """The last value of an option. This is the value that vLLM uses."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


def test_cpu() -> None:
    made = command({"PATH": "/bin"})
    assert made.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    expected = {
        "--model": "org/model",
        "--served-model-name": "base",
        "--dtype": "float32",
        "--logprobs-mode": "processed_logprobs",
        "--scheduling-policy": "priority",
        "--middleware": "tandem.inference.server.middleware.guard.AdminGuard",
    }
    assert {name: option(made.argv, name) for name in expected} == expected
    assert "--gpu-memory-utilization" not in made.argv
    assert "--lora-target-modules" in made.argv
    assert "lm_head" not in made.argv
    expected = {
        "PATH": "/bin",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
        "GOMP_SPINCOUNT": "1000",
        "TORCH_COMPILE_DISABLE": "1",
    }
    assert made.env.items() >= expected.items()
    assert "HF_HUB_OFFLINE" not in made.env


@pytest.mark.parametrize("weights", ["adapter", "merged"])
@pytest.mark.parametrize("experts", [0, 4])
def test_the_model_decides_about_middlewares_and_the_kernels_of_experts(
    weights: str, experts: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "experts": experts}
    model = tiny_model.write_tiny_qwen3(tmp_path / "tiny", **sizes)
    argv = command(weights=weights, device="cuda", base_model=str(model)).argv
    inner = ["merged_server.MergedServer"] if weights == "merged" else []
    # vLLM wraps each middleware around the earlier ones.
    expected = [*inner, "rollout.RolloutDoor", "fine_tuned.FineTunedNames", "guard.AdminGuard"]
    given = [value for name, value in pairwise(argv) if name == "--middleware"]
    assert given == [f"tandem.inference.server.middleware.{name}" for name in expected]
    # With this backend merged experts stay in the order of their files.
    assert (("--moe-backend", "triton") in pairwise(argv)) == (weights == "merged" and experts > 0)
    assert "--moe-backend" not in command(weights=weights, device="cpu", base_model=str(model)).argv


def test_the_docstring_lists_every_middleware_in_the_order_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("first-key\nsecond-key\n")
    model = tiny_model.write_tiny_qwen3(tmp_path / "tiny", hidden_size=64, layers=1, heads=2)
    argv = command(
        weights="merged", replica="a", api_key_file=tmp_path / "key", base_model=str(model)
    ).argv
    given = [value for name, value in pairwise(argv) if name == "--middleware"]
    # vLLM wraps each middleware around the earlier ones.
    listed = re.findall(r"^\d\. `(\w+)\.py`", middleware.__doc__ or "", re.MULTILINE)
    assert [value.split(".")[-2] for value in reversed(given)] == listed
    for value in given:
        assert callable(resolve_name(value))


@pytest.mark.parametrize(
    ("version", "given"), [("0.26.0", False), ("0.29.1", False), ("0.30.0", True), ("0.32.0", True)]
)
def test_tokens_in_and_out_are_switched_on_where_vllm_knows_the_option(
    version: str, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.inference.server.command.installed_version", lambda _: version)
    assert ("--enable-scale-out" in command().argv) == given


@pytest.mark.parametrize("installed", [True, False])
def test_delta_nets(installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5 is served without the vision tower. On the CPU, Qwen3.5 is served only in bfloat16.
    The module of vLLM for Qwen3.5 imports torchvision."""
    monkeypatch.setattr(
        "tandem.inference.server.family_arguments.find_spec", lambda _: True if installed else None
    )
    text = {"model_type": "qwen3_5_text", **SHAPE}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text})
    )
    model = {"base_model": str(tmp_path)}
    if not installed:
        with pytest.raises(InvalidInput, match="needs torchvision"):
            command(device="cuda", **model)
        return
    assert "--language-model-only" in command(device="cuda", **model).argv
    with pytest.raises(InvalidInput, match="bfloat16 only"):
        command(**model)
    on_the_cpu = command(dtype="bfloat16", **model).argv
    assert option(on_the_cpu, "--dtype") == "bfloat16"
    assert "--no-enable-prefix-caching" in on_the_cpu
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert "--language-model-only" not in command(device="cuda", **model).argv


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("qwen3_vl", ["--language-model-only"]),
        ("gemma4", ["--language-model-only"]),
        ("ministral3", ["--hf-overrides"]),
        ("mistral3", ["--language-model-only", "--hf-overrides"]),
    ],
)
def test_what_a_family_needs(family: str, flags: list[str], tmp_path: Path) -> None:
    """A model with vision is served without the vision tower. For the scaling of queries by
    position, vLLM reads only its own config key `llama_4_scaling`."""
    argv = command(base_model=str(write_random_model(tmp_path, family=family))).argv
    assert [flag for flag in ("--language-model-only", "--hf-overrides") if flag in argv] == flags
    if "--hf-overrides" in flags:
        given = json.loads(option(argv, "--hf-overrides"))
        of_text = given["text_config"] if family == "mistral3" else given
        growth = {"beta": 0.3, "original_max_position_embeddings": 9}
        assert of_text == {"llama_4_scaling": growth}


def test_latent_attention_on_the_cpu(tmp_path: Path) -> None:
    """On the CPU Tandem switches off vLLM's kernel for RoPE, and refuses models whose latents are
    not 576 wide."""
    config = {**SHAPE, **LATENT, "model_type": "glm4_moe_lite"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"base_model": str(tmp_path)}
    with pytest.raises(InvalidInput, match=r"is 18 here; .* where it is 576"):
        command(**model)
    assert "--compilation-config" not in command(device="cuda", **model).argv
    with pytest.raises(InvalidInput, match="glm4_moe_lite, which has fp32 weights") as caught:
        command(device="cuda", weights="merged", **model)
    assert caught.value.field == "TANDEM_WEIGHTS"
    config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    without = json.loads(option(command(**model).argv, "--compilation-config"))
    assert without == {"custom_ops": ["-rotary_embedding"]}


@pytest.mark.parametrize(("key", "names"), [("one", False), ("ann:one", True)])
def test_vllm_writes_an_access_log_where_keys_have_names(
    key: str, names: bool, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"{key}\n")
    argv = command(api_key_file=tmp_path / "keys").argv
    assert ("--disable-uvicorn-access-log" not in argv) is names
    assert ("--disable-access-log-for-endpoints" in argv) is names


def test_cuda() -> None:
    made = command(device="cuda", inference_tensor_parallel=2, max_model_len=4096)
    expected = {
        "--dtype": "bfloat16",
        "--gpu-memory-utilization": "0.85",
        "--tensor-parallel-size": "2",
        "--max-model-len": "4096",
    }
    assert {name: option(made.argv, name) for name in expected} == expected
    assert "--enforce-eager" not in made.argv
    assert not [name for name in made.env if name.startswith(("VLLM_CPU", "OMP", "GOMP"))]
    assert "--enable-sleep-mode" in command(device="cuda", gpu_mode="shared").argv
    experts = command(device="cuda", expert_lora=True).argv
    targets = experts[experts.index("--lora-target-modules") :]
    assert (
        "experts"
        in targets[: next(at for at, word in enumerate(targets[1:], 1) if word.startswith("--"))]
    )
    for rank, accepted in ((1, 8), (8, 8), (9, 16), (64, 64), (300, 320), (512, 512)):
        assert option(command(max_lora_rank=rank).argv, "--max-lora-rank") == str(accepted)


def test_a_model_on_the_spool_is_served_offline_and_secrets_are_only_in_the_environment(
    tmp_path: Path,
) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "key").write_text("the-api-key\n")
    secrets = {"api_key_file": tmp_path / "key", "admin_token": "the-admin-token"}
    made = command(root=tmp_path, base_model="models/tiny", **secrets)
    assert option(made.argv, "--model") == str(tmp_path / "models/tiny")
    assert made.env.items() >= {"HF_HUB_OFFLINE": "1", "VLLM_API_KEY": "the-api-key"}.items()
    assert not [
        argument
        for argument in made.argv
        if "the-api-key" in argument or "the-admin-token" in argument
    ]


def test_vllm_gets_every_key_and_none_is_on_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ann:first-key\nsecond-key\nbob:third-key\n")
    made = command(api_key_file=tmp_path / "key")
    assert option(made.argv, "--middleware").endswith("server.middleware.api_keys.ApiKeys")
    assert made.env["VLLM_API_KEY"] == "first-key"
    known = json.loads(made.env[KEYS_VARIABLE])
    for key, name in (("first-key", "ann"), ("second-key", ""), ("third-key", "bob")):
        assert name_of(f"Bearer {key}", known) == name
    for wrong in ("", "first-key", "Basic first-key", "Bearer ann:first-key", "Bearer ann"):
        assert name_of(wrong, known) is None
    assert not [word for word in [*made.argv, *made.env] if "-key" in word and word[0] != "-"]
    assert "second-key" not in str(made.env.values())
    for one in ("only-key", "ann:only-key"):
        (tmp_path / "key").write_text(one)
        alone = command(api_key_file=tmp_path / "key")
        assert (KEYS_VARIABLE in alone.env) == (":" in one)


def test_the_operator_overrides_arguments_and_environment() -> None:
    extra = [
        "--max-num-seqs",
        "7",
        "--api-server-count",
        "2",
        "-q",
        "fp8",
        "--scheduling-policy",
        "fcfs",
    ]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "9", "OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "active"}
    made = command(environ, vllm_args=shlex.join(extra))
    assert made.argv[-8:] == extra
    assert made.env.items() >= environ.items()
    assert "GOMP_SPINCOUNT" not in made.env, (
        "Tandem's own way to wait is dropped with OMP_WAIT_POLICY"
    )


def test_vllm_captures_graphs_of_few_sizes_unless_the_operator_decides() -> None:
    made = command(device="cuda").argv
    first = made.index("--cudagraph-capture-sizes") + 1
    sizes = [*map(int, takewhile(str.isdecimal, made[first:]))]
    assert sizes == sorted(set(sizes)) == list(GRAPH_SIZES)
    assert max((b - a - 1) / (a + 1) for a, b in pairwise(sizes) if a >= 64) <= 0.25
    for others in (
        {"device": "cpu"},
        {"enforce_eager": True},
        {"vllm_args": "--max_num_seqs=64"},
        {"vllm_args": "--speculative-config '{}'"},
        {"vllm_args": "-cc.cudagraph_mode=NONE"},
        {"vllm_args": "--compilation-config.mode 3"},
    ):
        assert "--cudagraph-capture-sizes" not in command(**({"device": "cuda"} | others)).argv
    own = command(device="cuda", vllm_args="--cudagraph-capture-sizes 1 2").argv
    assert own[-3:] == ["--cudagraph-capture-sizes", "1", "2"]
    assert own.count("--cudagraph-capture-sizes") == 1
    assert "--cudagraph-capture-sizes" in command(device="cuda", vllm_args="--seed 1").argv


def test_on_one_gpu_the_engine_is_a_fork_of_the_api_process() -> None:
    variable = "VLLM_WORKER_MULTIPROC_METHOD"
    assert command(device="cuda").env[variable] == "fork"
    assert command({variable: "spawn"}, device="cuda").env[variable] == "spawn"
    for others in ({"device": "cpu"}, {"device": "cuda", "inference_tensor_parallel": 2}):
        assert variable not in command(**others).env


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_lora_rank": 513}, "TANDEM_MAX_LORA_RANK"),
        ({"vllm_args": "--x 'open"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--api-key x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--api-key=x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--api_key x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--api-k=x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--hf-token hf_x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--seed 1 --hf_token=hf_x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--hf-t hf_x"}, "TANDEM_VLLM_ARGS"),
        (
            {"vllm_args": "--model-loader-extra-config.aws_secret_access_key hf_x"},
            "TANDEM_VLLM_ARGS",
        ),
        ({"vllm_args": "--ssl-keyfile-password hf_x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--hf-token 'hf_x"}, "TANDEM_VLLM_ARGS"),
        ({"vllm_args": "--host 0.0.0.0"}, "TANDEM_VLLM_ARGS"),
        ({"base_model": None}, "TANDEM_BASE_MODEL"),
        ({"expert_lora": True, "device": "cpu"}, "TANDEM_EXPERT_LORA"),
        (
            {"weights": "merged", "vllm_args": "--seed 1 --enable-expert-parallel"},
            "TANDEM_VLLM_ARGS",
        ),
        ({"weights": "merged", "vllm_args": "-q fp8"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "-qfp8"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "--quant fp8"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "--api_server_count=2"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "--data-parallel-size 2"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "-pp 2"}, "TANDEM_VLLM_ARGS"),
        ({"weights": "merged", "vllm_args": "--pipeline_parallel_size=2"}, "TANDEM_VLLM_ARGS"),
    ],
)
def test_settings_that_cannot_work_are_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        command(**values)
    assert caught.value.field == field
    assert "hf_x" not in str(caught.value)


@pytest.mark.parametrize(("host", "interface"), [("127.0.0.1", "lo"), ("0.0.0.0", None)])
def test_nccl_of_one_host_listens_on_loopback_only(host: str, interface: str | None) -> None:
    made = command(inference_host=host, api_key="k")
    assert made.env.get("NCCL_SOCKET_IFNAME") == interface
    assert command({"NCCL_SOCKET_IFNAME": "eth7"}).env["NCCL_SOCKET_IFNAME"] == "eth7"


def test_no_value_of_the_operators_arguments_is_logged() -> None:
    """People put passwords into URLs and JSON, and vLLM has options that take URLs and JSON."""
    extra = "--tokenizer t --max-num-batched-tokens 9 --otlp-traces-endpoint=https://u:hf_x@host"
    made = command(
        vllm_args=extra + " --dbo-decode-token-threshold 3 --model-loader-extra-config"
        ' \'{"password": "hf_x"}\''
    )
    assert sum("hf_x" in argument for argument in made.argv) == 2
    assert "hf_x" not in " ".join(made.shown)
    assert "--otlp-traces-endpoint" in made.shown


def test_vllm_cpu_is_refused_where_the_trainer_would_use_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would train on CUDA, and vLLM would serve the same model in float32 on the
    CPU."""
    monkeypatch.setattr(
        "tandem.inference.server.command.installed_version", lambda name: name == "vllm-cpu"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = FakeNvml(tmp_path)
    driver.install(monkeypatch)
    assert serving_device(Settings(device="auto")) == "cpu"
    driver.set(gpu("GPU-0"))
    assert serving_device(Settings(device="cpu")) == "cpu"
    with pytest.raises(
        InvalidInput, match=r"install tandem-rl\[gpu\] .*, or set TANDEM_DEVICE=cpu"
    ) as refused:
        serving_device(Settings(device="auto"))
    assert refused.value.field == "TANDEM_DEVICE"
