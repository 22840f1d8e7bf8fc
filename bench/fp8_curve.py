"""Does training end in the same place with a base in FP8? One GPU.

    python -m bench.fp8_curve [--steps 300] [--seeds 5]

A small model (Qwen3's architecture, 8 layers of 512) with random weights learns 64 random sequences
by LoRA, once with its base weights in bfloat16 and once in FP8, from the same adapter in the same
order. The spread over seeds is the noise that the difference is held against.
"""

import argparse
import statistics
from typing import Any

import torch

from bench.model_gpu_check import SMALL, moved
from bench.report import report
from tandem.families.registry import arch_from_config
from tandem.model import device, parallel
from tandem.model.build import build_policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import LoraShape, OptimizerSettings
from tandem.training.optimizer import AdapterOptimizer

LENGTH, ROWS = 128, 8


def row(seed: int, index: int) -> RowTensors:
    """Eight sequences of `LENGTH` tokens, which follow random rules that can be learned."""
    generator = torch.Generator().manual_seed(1000 * seed + index)
    tokens = torch.randint(0, SMALL["vocab_size"], (ROWS, LENGTH), generator=generator)
    slots = torch.arange(ROWS * LENGTH)
    begin = slots // LENGTH * LENGTH
    target = slots[slots > begin]
    return moved(
        RowTensors(tokens.flatten(), slots - begin, begin + LENGTH, target - 1, target),
        device.device(),
    )


def curve(seed: int, steps: int, *, fp8: bool) -> list[float]:
    """The loss of each step."""
    policy = build_policy(
        arch_from_config(SMALL | {"num_hidden_layers": 8}), LoraShape(rank=32, alpha=64.0)
    )
    generator = torch.Generator(device.device()).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.base().values():
            parameter.normal_(
                1.0 if parameter.dim() == 1 else 0.0,
                0.02 if parameter.dim() > 1 else 0.0,
                generator=generator,
            )
        for name, parameter in policy.lora_parameters().items():
            (
                parameter.normal_(0.0, 0.02, generator=generator)
                if "lora_A" in name
                else parameter.zero_()
            )
    if fp8:
        policy.quantise_base()
    optimizer, losses = AdapterOptimizer(policy, OptimizerSettings(learning_rate=3e-3)), []
    rows = [row(seed, index) for index in range(8)]
    for step in range(steps):
        optimizer.zero_grad()
        loss = -policy(rows[step % len(rows)]).logprobs.mean()
        loss.backward()
        optimizer.reduce_gradients()
        optimizer.step(optimizer.gradient_norm(), optimizer.settings.learning_rate)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    device.activate("cuda")
    parallel.init_parallel()
    rows: list[dict[str, Any]] = []
    for seed in range(arguments.seeds):
        for name, fp8 in (("bfloat16", False), ("fp8", True)):
            losses = curve(seed, arguments.steps, fp8=fp8)
            quarters = {
                f"loss at {q}/4": statistics.mean(
                    losses[q * arguments.steps // 4 - 8 : q * arguments.steps // 4]
                )
                for q in (1, 2, 3, 4)
            }
            rows.append({"base": name, "seed": seed, "first loss": losses[0], **quarters})
            print(rows[-1], flush=True)
    parallel.destroy()
    report(
        "fp8-curve",
        f"A small model's SFT with its base in bfloat16 and in FP8, {torch.cuda.get_device_name()}",
        rows,
    )


if __name__ == "__main__":
    main()
