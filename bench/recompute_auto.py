"""Does `TANDEM_RECOMPUTE=auto` find the fastest levels that fit, and never run out of memory where
`full` fits?

    python -m bench.recompute_auto [--cases 30] [--seed 0] [--seconds 200]

Each case is a random shape (dense or a mixture of experts), row length, LoRA rank and targets, and
a random limit of memory: more than `full` needs, up to a little more than `none` needs. `auto` is
compared with every fixed number of layers that keep everything while the others keep the least.
"""

import argparse
import gc
import math
import random
import time
from contextlib import suppress

import torch

from bench.model_gpu_check import moved
from bench.report import report
from tandem.families.registry import arch_from_config
from tandem.model import device, parallel, recompute
from tandem.model.build import build_policy
from tandem.model.device import memory
from tandem.model.layer.sublayers import SaveLevel
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.spool.schema import LoraShape

SHAPES = [(2048, 16, 8, 128, 6144), (4096, 32, 8, 128, 12288), (3072, 24, 8, 128, 8192)]
"""Hidden size, heads, key heads, head size, MLP features."""
ROWS = [8192, 12288]  # with shorter rows the host, which launches the kernels, paces the few layers
TIMED_SECONDS = 0.1


def step(policy: Policy, row: RowTensors) -> None:
    policy(row).logprobs.mean().backward()
    for parameter in policy.lora_parameters().values():
        parameter.grad = None


def fits(policy: Policy, row: RowTensors, levels: list[SaveLevel]) -> bool:
    """Whether two steps run."""
    keep(policy, levels)
    try:
        step(policy, row)
        step(policy, row)
    except torch.OutOfMemoryError:
        return False
    finally:
        clear(policy)
    return True


def seconds(
    policy: Policy, row: RowTensors, candidates: dict[str, list[SaveLevel]]
) -> dict[str, float]:
    """Seconds of a step with each candidate's levels, the best of four turns; none of those that
    run out of memory. After the first turn only `auto` and those within 15 % of the fastest are
    timed."""
    times: dict[str, list[float]] = {
        name: [] for name, levels in candidates.items() if fits(policy, row, levels)
    }
    for turn in range(4):
        fastest = min((min(of) for of in times.values() if of), default=0.0)
        for name in list(times):
            if turn and name != "auto" and min(times[name]) > 1.15 * fastest:
                continue
            keep(policy, candidates[name])
            try:
                step(policy, row)  # what the allocator learns after the last candidate is not timed
                times[name].append(steps_seconds(policy, row))
            except torch.OutOfMemoryError:
                del times[name]
            clear(policy)
    return {name: min(of) for name, of in times.items()}


def steps_seconds(policy: Policy, row: RowTensors) -> float:
    """Mean seconds of a step, over at least TIMED_SECONDS: the host paces small models, and it
    varies."""
    device.synchronize()
    begin, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < TIMED_SECONDS:
        step(policy, row)
        device.synchronize()
        count += 1
    return elapsed / count


def clear(policy: Policy) -> None:
    """Free what a step left, also one that ran out of memory."""
    for parameter in policy.lora_parameters().values():
        parameter.grad = None
    gc.collect()
    memory.release_cached()


def limited(gib: float) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))


def keep(policy: Policy, levels: list[SaveLevel]) -> None:
    for layer, level in zip(policy.gpt.decoder.layers, levels, strict=True):
        layer.save_level = level


def mixed(everything: int, count: int) -> list[SaveLevel]:
    return [SaveLevel.ALL] * everything + [SaveLevel.INPUT] * (count - everything)


def chosen_levels(policy: Policy, row: RowTensors) -> tuple[list[SaveLevel], int]:
    """What a job's second step runs with, and how often it ran out of memory until then
    (`Training._gradients`). Raises OutOfMemoryError where a job ends so."""
    recompute.fit(policy, row)
    lowered = 0
    while True:
        try:
            step(policy, row)
            step(policy, row)  # finds other gaps in the allocator's memory than the first
            return [layer.save_level for layer in policy.gpt.decoder.layers], lowered
        except torch.OutOfMemoryError:
            if not recompute.lower(policy):
                raise
            lowered += 1
        clear(policy)


def case(draw: random.Random) -> dict[str, object]:
    hidden, heads, keys, size, ffn = draw.choice(SHAPES)
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": draw.choice([4, 6]),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "head_dim": size,
        "num_key_value_heads": keys,
        "intermediate_size": ffn,
        "vocab_size": draw.choice([32000, 151936]),
        "max_position_embeddings": 40960,
    }
    targets = draw.choice(
        [
            ("q_proj", "v_proj"),
            ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ]
    )
    if hidden == 2048 and draw.random() < 0.5:
        config |= {
            "model_type": "qwen3_moe",
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        }
    arch, length = arch_from_config(config), draw.choice(ROWS)
    gc.collect()
    # This empties caches too: else the model would lie in parts of the last case's memory.
    limited(1000)
    lora = LoraShape(rank=draw.choice([8, 16, 64]), targets=targets)
    policy = build_policy(arch, lora, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(0.0, 0.02)
    slots = torch.arange(length)
    row = moved(
        RowTensors(
            slots % arch.vocab_size, slots, torch.full_like(slots, length), slots[:-1], slots[1:]
        ),
        device.device(),
    )
    count, needs = len(policy.gpt.decoder.layers), {}
    limited(1000)
    for name, everything in (("full", 0), ("none", count)):
        keep(policy, mixed(everything, count))
        step(policy, row)
        memory.reset_peaks()
        step(policy, row)
        needs[name] = memory.stats()["allocated_peak"] / 2**30
    least = needs["full"] * 1.05 + 1  # the allocator's gaps
    limit = draw.uniform(least, max(least, needs["none"] * 1.2 + 2))
    limited(limit)
    while not fits(policy, row, mixed(0, count)):  # the allocator can't use every gap
        limited(limit := limit * 1.05)
    candidates = {f"{number} layers": mixed(number, count) for number in range(count + 1)}
    levels, lowered = list[SaveLevel](), 0
    with suppress(torch.OutOfMemoryError):
        levels, lowered = chosen_levels(policy, row)
    clear(policy)
    # Where `auto` chose the same, it is timed once.
    fixed = [name for name, of in candidates.items() if of == levels]
    times = seconds(
        policy, row, candidates if fixed or not levels else candidates | {"auto": levels}
    )
    best, best_name = min(
        ((of, name) for name, of in times.items() if name != "auto"), default=(float("nan"), "")
    )
    auto = times.get(fixed[0] if fixed else "auto", float("nan"))
    return {
        "model": config["model_type"],
        "hidden": hidden,
        "layers": count,
        "row": length,
        "rank": lora.rank,
        "targets": len(targets),
        "full GiB": needs["full"],
        "none GiB": needs["none"],
        "limit GiB": limit,
        "keep all": sum(level is SaveLevel.ALL for level in levels),
        "lowered": lowered,
        "out of memory": math.isnan(auto),
        "auto s": auto,
        "best fixed s": best,
        "best keeps all": best_name,
        "auto / best": auto / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no case begins after that"
    )
    arguments = parser.parse_args()
    device.activate("cuda")
    parallel.init_parallel()
    draw, rows, begin = random.Random(arguments.seed), list[dict[str, object]](), time.monotonic()
    while len(rows) < arguments.cases and time.monotonic() - begin < arguments.seconds:
        rows.append(case(draw))
        print(rows[-1], flush=True)
    parallel.destroy()
    report("recompute-auto", f"recompute=auto on {torch.cuda.get_device_name()}", rows)


if __name__ == "__main__":
    main()
