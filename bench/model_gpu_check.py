"""Does the model compute on a GPU what it computes on the CPU, and how fast? Needs the trainer's
packages and one GPU.

    python bench/model_gpu_check.py            # parity: CPU fp32 against CUDA fp32 and bf16, both
                                               attention kernels
    python bench/model_gpu_check.py --speed    # and forward and backward of an 8 B model's shape
    python bench/model_gpu_check.py --experts  # the same of a mixture of experts; --speed: 8 layers
                                               of Qwen3-30B-A3B's

A process runs on one device for its whole life, so the CPU's side runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes, write_adapter_config
from tandem.families.arch import Arch
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.model import device, parallel
from tandem.model.build import build_policy
from tandem.model.device import memory
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.model.weights.base_weights import load_weights
from tandem.spool.schema import LoraShape

SMALL = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
QWEN3_30B_A3B_8L = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
SMALL_EXPERTS = SMALL | {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
LORA = LoraShape(rank=16, alpha=32.0)


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Random weights of `config`'s shape and a random adapter, as their files are in real life."""
    arch = arch_from_config(config)
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[1] ** -0.5

    (directory / "config.json").write_text(json.dumps(config))
    weights = {
        name: random(shape) for rule in weight_rules(arch) for name, shape in rule.sources.items()
    }
    save_file(weights, directory / "model.safetensors")
    save_file(
        {n: random(s) for n, s in adapter_shapes(arch, LORA).items()}, directory / WEIGHTS_FILE
    )
    write_adapter_config(directory, LORA, "random")


def random_row(length: int, used: int, vocabulary: int) -> RowTensors:
    """Trees of random shape, every token below a root trained, then padding; on the CPU."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.arange(length)
    positions, end, parent = torch.zeros_like(slots), slots + 1, torch.full_like(slots, -1)

    def grow(start: int, stop: int, depth: int, above: int) -> None:
        while start < stop:
            size = int(
                torch.randint((stop - start + 2) // 3, stop - start + 1, (), generator=generator)
            )
            segment = size if depth == 3 else (size + 3) // 4
            inner = slice(start, start + segment)
            base = 0 if above < 0 else int(positions[above]) + 1
            positions[inner], end[inner] = base + torch.arange(segment), start + size
            parent[inner] = torch.cat([torch.tensor([above]), slots[start : start + segment - 1]])
            grow(start + segment, start + size, depth + 1, start + segment - 1)
            start += size

    grow(0, used, 0, -1)
    target = (parent >= 0).nonzero().squeeze(1)
    tokens = torch.randint(0, vocabulary, (length,), generator=generator)
    return RowTensors(tokens, positions, end, parent[target], target)


def moved(row: RowTensors, where: torch.device) -> RowTensors:
    return RowTensors(
        **{name: tensor.to(where) for name, tensor in vars(row).items() if tensor is not None}
    )


def evaluate(policy: Policy, row: RowTensors) -> dict[str, torch.Tensor]:
    """Log-probs, entropies and every LoRA gradient of one function of them, flat, on the CPU."""
    outputs = policy(row)
    weights = torch.linspace(-1, 1, len(outputs.logprobs), device=outputs.logprobs.device)
    ((outputs.logprobs * weights + 0.1 * outputs.entropy).mean()).backward()
    result = {
        "logprobs": outputs.logprobs.detach().cpu(),
        "entropy": outputs.entropy.detach().cpu(),
    }
    for name, parameter in policy.lora_parameters().items():
        assert parameter.grad is not None, f"{name} has no gradient"
        result[name], parameter.grad = parameter.grad.float().cpu(), None
    return result


def make(directory: Path, arch: Arch, **options: object) -> Policy:
    policy = build_policy(arch, LORA, **options)  # type: ignore[arg-type]
    load_weights(directory, arch, policy.base, policy.topology.sizes, policy.topology.place)
    policy.load_adapter(directory)
    return policy


def parity(directory: Path) -> bool:
    """Print one line per variant; whether all are within their bounds."""
    arch, row = read_arch(str(directory)), moved(random_row(1000, 950, 5000), device.device())
    expected = torch.load(directory / "cpu.pt")
    good = True
    # In bf16 some tokens go to other experts than in fp32.
    bf16 = (0.2, 0.6) if arch.moe else (0.05, 0.15)
    for dtype, (log_prob_bound, gradient_bound) in (
        (torch.float32, (2e-3, 2e-3)),
        (torch.bfloat16, bf16),
    ):
        for recompute in ("none", "full"):
            for kernel in ("sdpa", "flex"):
                policy = make(directory, arch, dtype=dtype, recompute=recompute)
                policy.attention_kernel = kernel
                actual = evaluate(policy, row)
                log_prob = (actual["logprobs"] - expected["logprobs"]).abs().mean().item()
                names = list(policy.lora_parameters())
                worst = max(
                    ((actual[n] - expected[n]).norm() / expected[n].norm()).item() for n in names
                )
                fine = log_prob <= log_prob_bound and worst <= gradient_bound
                good &= fine
                print(
                    f"{'ok ' if fine else 'BAD'} {dtype!s:15} recompute={recompute:4} {kernel}:"
                    f" log-probs differ by {log_prob:.1e} on average, the worst gradient by"
                    f" {worst:.1e} of its norm",
                    flush=True,
                )
    return good


def speed(config: dict[str, Any], slots: int = 8192) -> None:
    """Seconds and peak bytes of one row of `slots` on a model of that shape with random bf16
    weights."""
    arch = arch_from_config(config)
    row = moved(random_row(slots, slots, arch.vocab_size), device.device())
    for recompute in ("none", "full"):
        policy = build_policy(arch, LORA, dtype=torch.bfloat16, recompute=recompute)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.normal_(0.0, 0.02)
        for attempt in range(4):
            torch.cuda.reset_peak_memory_stats()
            device.synchronize()
            start = time.perf_counter()
            outputs = policy(row)
            device.synchronize()
            forward = time.perf_counter() - start
            outputs.logprobs.mean().backward()
            device.synchronize()
            seconds = time.perf_counter() - start
            print(
                f"recompute={recompute} {'first' if attempt == 0 else 'again'}: {slots} slots,"
                f" {len(row.item_token)} items, forward {forward:.2f} s, with backward"
                f" {seconds:.2f} s, {slots / seconds:.0f} slots/s, peak"
                f" {memory.stats()['allocated_peak'] / 2**30:.1f} GiB",
                flush=True,
            )
        del policy, outputs
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--cpu-side", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cpu_side:
        device.activate("cpu")
        parallel.init_parallel()
        policy = make(arguments.cpu_side, read_arch(str(arguments.cpu_side)), dtype=torch.float32)
        torch.save(evaluate(policy, random_row(1000, 950, 5000)), arguments.cpu_side / "cpu.pt")
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, SMALL_EXPERTS if arguments.experts else SMALL)
        subprocess.run(
            [sys.executable, "-m", "bench.model_gpu_check", "--cpu-side", name], check=True
        )
        device.activate("cuda")
        parallel.init_parallel()
        good = parity(directory)
    if arguments.speed:
        speed(QWEN3_30B_A3B_8L if arguments.experts else QWEN3_8B)
    parallel.destroy()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
