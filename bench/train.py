"""Measures the training speed on one GPU: tokens/s and peak memory of Tandem and of transformers
with PEFT, on the same rows.

    python -m bench.train [--model qwen3-8b] [--rows 8192 16384 4x1024 tree] [--ways auto full none
    auto-fp8 peft]
                          [--trainable lora] [--limit 40] [--steps 5] [--ranks 1]

Weights and tokens are random. With `--trainable lora` a LoRA of rank 16 is on all linear layers.
With `--targets attention` the LoRA is only on q, k, v and o. Every token except each sequence's
first is trained. A row is one sequence (`8192`), several sequences (`4x1024`), or `tree`. `tree` is
a group of 16 completions of 512 tokens after one prompt of 2048 tokens; Tandem computes the prompt
once. `--limit`: the GPU memory in GiB that each of the `--ways` may use.

Model TFLOP/s count the forward pass and the gradients of activations, because the base is frozen.
Model TFLOP/s count 4 FLOPs per weight and token, plus 3.5 times the FLOPs of causal attention's
forward pass. With `--trainable full` model TFLOP/s count 6 FLOPs per weight and token. Recomputed
activations are not counted. A step consists of the forward pass, the backward pass and Adam. With
`--ranks 2`, two data-parallel ranks each compute a row in a step. Each of the `--ways` runs in its
own processes.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.report import report
from bench.restart import SHAPES
from tandem.families.adapter import all_targets
from tandem.families.arch import Arch
from tandem.families.registry import arch_from_config
from tandem.spool.schema import LoraShape

QWEN3_8B = {"model_type": "qwen3"} | SHAPES["qwen3-8b"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": SHAPES["qwen3-30b-a3b-8l"] | {"num_hidden_layers": 48},
    "qwen3-0.6b": (
        QWEN3_8B
        | {
            "num_hidden_layers": 28,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        }
    ),
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rope_theta": 1e7,
    },
    "llama-1b": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def shape_of(row: str) -> tuple[list[int], int]:
    """The lengths of a row's sequences, and the number of tokens that the row would have if its
    sequences shared no prompt."""
    if row == "tree":
        return [2048 + 16 * 512], 16 * (2048 + 512)
    count, _, length = row.rpartition("x")
    lengths = [int(length)] * int(count or 1)
    return lengths, sum(lengths)


def model_flops(arch: Arch, lengths: list[int], trainable: str) -> float:
    """The FLOPs of one forward and backward pass, counted as the module's docstring says."""
    hidden, tokens = arch.hidden_size, sum(lengths)
    mlp = 3 * hidden * arch.ffn_hidden_size
    if arch.moe:
        mlp = (
            3 * hidden * arch.moe.ffn_hidden_size * arch.moe.experts_per_token
            + hidden * arch.moe.num_experts
        )
    delta_nets = sum(arch.gdn.layers) if arch.gdn else 0
    with_attention = arch.num_layers - delta_nets
    queries = (3 if arch.output_gate else 2) * arch.query_size  # the weights of q, o and gates
    weights = (
        with_attention * hidden * (queries + 2 * arch.kv_size)
        + arch.num_layers * mlp
        + hidden * arch.vocab_size
    )
    if arch.gdn:  # FLOPs of the delta rule itself are left out
        features = sum(arch.gdn.sections) + 2 * arch.gdn.value_size + 2 * arch.gdn.value_heads
        weights += delta_nets * hidden * features
    attention = sum(2 * length**2 * arch.query_size for length in lengths) * with_attention
    return (6.0 if trainable == "full" else 4.0) * weights * tokens + 3.5 * attention


def tandem_step(
    config: dict[str, Any], row: str, way: str, targets: tuple[str, ...] | None
) -> Callable[[], None]:
    """Builds Tandem's training step. `targets`: the modules with LoRA; None trains all weights."""
    from tandem.model import device, graphs, parallel, recompute
    from tandem.model.build import build_policy
    from tandem.model.rows import RowTensors
    from tandem.model.weights.base_memory import BaseWeights
    from tandem.spool.schema import OptimizerSettings
    from tandem.training.optimizer import AdapterOptimizer
    from tandem.training.sharded_adam import ShardedAdam

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    device.activate("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    parallel.init_parallel()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.mm(*torch.ones(2, 16, 16, dtype=torch.bfloat16, device="cuda"))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG")  # as `ModelLoader` does
    arch = arch_from_config(config)
    base = BaseWeights(arch, torch.bfloat16, parallel.current().sizes)
    policy = build_policy(
        arch,
        LoraShape(rank=16, alpha=32.0, targets=targets) if targets else None,
        dtype=torch.bfloat16,
        recompute="full" if way.startswith("full") else "none",
        base=lambda: base.parameters,
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(0.0, 0.02)
    lengths, _ = shape_of(row)
    slots = torch.arange(sum(lengths))
    if row == "tree":
        begin = torch.where(slots < 2048, 0, (slots - 2048) // 512 * 512 + 2048)
        positions = torch.where(slots < 2048, slots, slots - begin + 2048)
        end = torch.where(slots < 2048, len(slots), begin + 512)
        first = slots == 0
        source = torch.where(slots == begin, 2047, slots - 1)
    else:
        begin = torch.repeat_interleave(
            torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths)
        )
        positions, end, first = slots - begin, begin + lengths[0], slots == begin
        source = slots - 1
    tensors = RowTensors(
        torch.randint(0, config["vocab_size"], (len(slots),)).cuda(),
        positions.cuda(),
        end,
        source[~first].cuda(),
        slots[~first].cuda(),
    )
    if way.endswith("fp8"):
        policy.quantise_base()
    settings = OptimizerSettings(learning_rate=1e-5)
    optimizer = (
        AdapterOptimizer(policy, settings) if targets else ShardedAdam(policy, base, settings)
    )
    if way.startswith("auto"):
        levels = recompute.fit(policy, tensors)
        print("levels", [sum(level == k for level in levels) for k in (0, 1, 2)], file=sys.stderr)

    repeated: list[bool] = []

    def step() -> None:
        optimizer.zero_grad()
        with policy.adapter_fixed():
            policy(tensors).logprobs.mean().backward()
            # `Training` also captures CUDA graphs after the first row of a job with many rows.
            if not repeated:
                repeated.append(True)
                graphs.repeat(policy, tensors, 100)
                print("graphs", policy.layer_graphs is not None, file=sys.stderr)
        optimizer.reduce_gradients()
        optimizer.step(optimizer.gradient_norm(), settings.learning_rate)

    return step


def peft_step(
    config: dict[str, Any], row: str, way: str, targets: tuple[str, ...]
) -> Callable[[], None]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **options),
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
        )
    model.config.use_cache = False
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=list(targets), lora_dropout=0.0)
    model = get_peft_model(model, lora)
    model.train()
    if way == "peft-checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    lengths, _ = shape_of(row)
    tokens = torch.randint(0, config["vocab_size"], (len(lengths), lengths[0]), device="cuda")

    adam = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True
    )

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)

    return step


def one(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one of the `--ways` on one row in this process."""
    config, row, way = MODELS[arguments.model], arguments.rows[0], arguments.ways[0]
    if arguments.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(arguments.limit * 2**30 / total)
    arch = arch_from_config(config)
    targets = ATTENTION if arguments.targets == "attention" else all_targets(arch)
    if way.startswith("peft"):
        step = peft_step(config, row, way, targets)
    else:
        step = tandem_step(config, row, way, None if arguments.trainable == "full" else targets)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    seconds = []
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median, (lengths, effective) = sorted(seconds)[len(seconds) // 2], shape_of(row)
    if arguments.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        print(
            profile.key_averages().table(
                sort_by="cuda_time_total", row_limit=30, max_name_column_width=70
            ),
            file=sys.stderr,
        )
        calls = cProfile.Profile()
        calls.runcall(step)
        pstats.Stats(calls, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    return {
        "model": arguments.model,
        "trainable": arguments.trainable,
        "targets": arguments.targets,
        "row": row,
        "way": way,
        "limit GiB": arguments.limit,
        "ranks": arguments.ranks,
        "tokens/s": arguments.ranks * sum(lengths) / median,
        "effective tokens/s": arguments.ranks * effective / median,
        "seconds": median,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "reserved GiB": torch.cuda.memory_reserved() / 2**30,  # with CUDA graphs
        "TFLOP/s per GPU": (model_flops(arch, lengths, arguments.trainable) / median / 1e12),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--targets", choices=["all", "attention"], default="all")
    parser.add_argument("--trainable", choices=["lora", "full"], default="lora")
    parser.add_argument("--rows", nargs="+", default=["8192"])
    parser.add_argument(
        "--ways", nargs="+", default=["full", "auto", "none", "peft-checkpoint", "peft"]
    )
    parser.add_argument("--limit", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print the kernels of one more step, and the calls of another",
    )
    parser.add_argument("--name", default="train", help="of the file under bench/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        row = one(arguments)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row), flush=True)
        os._exit(0)  # os._exit skips the destruction of process groups
    rows = []
    for row in arguments.rows:
        for way in arguments.ways:
            if row == "tree" and way.startswith("peft"):
                continue
            command = [sys.executable]
            if arguments.ranks > 1:
                command += [
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(arguments.ranks),
                ]
            command += ["-m", "bench.train", "--child", "--rows", row, "--ways", way]
            for name in ("model", "trainable", "targets", "limit", "steps", "ranks"):
                command += [f"--{name}", str(getattr(arguments, name))]
            command += ["--profile"] if arguments.profile else []
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            sys.stderr.write(
                done.stderr[-200:]
                if done.returncode == 0 and not arguments.profile
                else done.stderr[-24000:]
            )
            if done.returncode == 0:
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    report(
        arguments.name,
        f"Training speed on {torch.cuda.get_device_name()}, torch {torch.__version__}",
        rows,
    )


if __name__ == "__main__":
    main()
