"""What stays allocated after a backward pass: dense and mixture of experts, with and without recompute and our fix.

    python -m bench.moe_leak [--device cuda|cpu] [--layers 8] [--experts 32] [--tokens 4096] [--hidden 512] [--out FILE]

Models: Tandem's dense and mixture of experts, and the latter with Megatron's own MoE layers (`SequentialMLP`, both
dispatchers that need no other package). What is above what was allocated before the forward pass: after forward;
after backward with all gradients and outputs dropped and Python's collector off; after `gc.collect()`; and after the
dispatchers' attributes that hold a graph were cut from it, one at a time: `held by` says what each one held, and
`leaves` what the leaves of their graphs and those leaves' gradients have. A layer input is [tokens, hidden].
On the GPU bytes are `torch.cuda.memory_allocated`, on the CPU those of storages that are alive.
"""

import argparse
import copy
import gc
import json
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.live_bytes import counted
from bench.report import report
from tandem.families.registry import arch_from_config
from tandem.model import device, parallel, recompute_fix
from tandem.model.build import build_policy
from tandem.model.mcore import ColumnParallelLinear, MLPSubmodules, MoELayer, MoESubmodules, RowParallelLinear
from tandem.model.policy import Policy, RowTensors
from tandem.spool.schema import LoraShape

MODELS = ("dense", "experts", "experts, Megatron's allgather", "experts, Megatron's alltoall")
LORA = LoraShape(rank=8)
VOCABULARY = 1024


def make(model: str, *, layers: int, experts: int, hidden: int, recompute_layers: int, fix: bool) -> Policy:
    """A random model of `MODELS`; `recompute_layers` 0 is no recompute."""
    config: dict[str, Any] = {
        "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": 8,
        "head_dim": max(16, hidden // 8), "num_key_value_heads": 2, "intermediate_size": 2 * hidden,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2**20,
    }  # fmt: skip
    if model != "dense":
        config |= {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": min(8, experts // 2)}
        config |= {"moe_intermediate_size": hidden // 2, "norm_topk_prob": True}
    policy = build_policy(arch_from_config(config), LORA, recompute="full" if recompute_layers else "none")
    policy.config.recompute_num_layers = recompute_layers or None
    if "Megatron" in model:
        for number, layer in enumerate(policy.gpt.decoder.layers):
            layer.mlp = megatrons(policy, number, model.split()[-1])
    generator = torch.Generator(device.device()).manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    for layer in policy.gpt.decoder.layers:
        layer.mlp._forward_hooks.clear()  # the fix, as `build_policy` installs it
    if fix:
        recompute_fix.install(policy.gpt)
    return policy


def megatrons(policy: Policy, number: int, dispatcher: str) -> MoELayer:
    """The MoE layer as Megatron alone builds it, frozen."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    config = copy.copy(policy.gpt.config)
    config.moe_token_dispatcher_type = dispatcher
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(experts=partial(SequentialMLP, submodules=linears))
    layer = MoELayer(config, submodules, layer_number=number + 1, pg_collection=get_default_pg_collection())
    return layer.to(device.device()).requires_grad_(False)


def measure(
    model: str, *, recompute_layers: int, fix: bool, layers: int, experts: int, tokens: int, hidden: int
) -> dict[str, Any]:
    """One row, in layer inputs; `bytes` is `after backward` again."""
    policy = make(model, layers=layers, experts=experts, hidden=hidden, recompute_layers=recompute_layers, fix=fix)
    where = device.device()
    slots = torch.arange(tokens, device=where)
    row = RowTensors(
        slots * 7 % VOCABULARY, slots, torch.full_like(slots, tokens), slots[:-1:16].clone(), slots[1::16].clone()
    )
    unit = tokens * hidden * next(policy.gpt.parameters()).element_size()

    def backward() -> int:
        """A whole pass, nothing of it kept; the bytes between its halves."""
        outputs = policy(row)
        middle = live()
        outputs.logprobs.sum().backward()
        for parameter in policy.parameters():
            parameter.grad = None
        return middle

    gc.collect()
    gc.disable()
    try:
        with counted(where) as live:
            backward()  # workspaces and compiled kernels are there now
            with torch.no_grad():
                policy(row)  # whatever the last pass left in attributes is replaced by tensors without a graph
            gc.collect()
            floor = live()
            middle = backward()
            after = live()
            gc.collect()
            collected = live()
            leaves = sum(bytes_of(leaf) for leaf in leaves_held(policy))
            held: dict[str, int] = {}
            for layer in policy.gpt.decoder.layers if model != "dense" else ():
                for holder, name in recompute_fix.held_graphs(layer.mlp):
                    before = live()
                    setattr(holder, name, getattr(holder, name).detach())
                    held[name] = held.get(name, 0) + before - live()
            left = live()
    finally:
        gc.enable()
    return {
        "model": model,
        "recompute": f"{recompute_layers} layers" if recompute_layers else "none",
        "fix": "on" if fix else "off",
        "after forward": round((middle - floor) / unit, 2),
        "after backward": round((after - floor) / unit, 2),
        "bytes": after - floor,
        "after gc": round((collected - floor) / unit, 2),
        "leaves": round(leaves / unit, 2),
        "held by": ", ".join(f"{name} {size / unit:.2f}" for name, size in held.items()) or "-",
        "after the cut": round((left - floor) / unit, 2),
    }


def leaves_held(policy: Policy) -> list[torch.Tensor]:
    """The leaves, other than parameters, of the graphs that dispatchers hold."""
    known = {id(parameter) for parameter in policy.parameters()}
    found: dict[int, torch.Tensor] = {}
    for layer in policy.gpt.decoder.layers:
        graphs = recompute_fix.held_graphs(layer.mlp) if hasattr(layer.mlp, "token_dispatcher") else []
        nodes, seen = [getattr(holder, name).grad_fn for holder, name in graphs], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) not in known:
                found[id(variable)] = variable
            nodes += [following for following, _ in node.next_functions]
    return list(found.values())


def bytes_of(leaf: torch.Tensor) -> int:
    gradient = 0 if leaf.grad is None else leaf.grad.untyped_storage().nbytes()
    return leaf.untyped_storage().nbytes() + gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path, help="the rows as JSON, here instead of bench/results/moe-leak.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device.activate(options.device)
    parallel.init_parallel()
    sizes = {name: getattr(options, name) for name in ("layers", "experts", "tokens", "hidden")}
    rows = [
        measure(model, recompute_layers=recompute_layers, fix=fix, **sizes)
        for model in MODELS
        for recompute_layers in (0, 1, 2)
        for fix in ((False, True) if model != "dense" and recompute_layers else (False,))
    ]
    parallel.destroy()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2) + "\n")
        return
    one = options.tokens * options.hidden * device.default_dtype().itemsize
    title = (
        f"Allocated, in layer inputs of {one} bytes, on {options.device}: {sizes['layers']} layers, "
        f"{sizes['experts']} experts, {sizes['tokens']} tokens, hidden {sizes['hidden']}; "
        f"torch {torch.__version__}, megatron-core {metadata.version('megatron-core')}"
    )
    report("moe-leak" if options.device == "cuda" else "moe-leak-cpu", title, rows)


if __name__ == "__main__":
    main()
