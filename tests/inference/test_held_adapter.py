"""A worker compares an adapter's tensors in the worker's memory with the tensors in the adapter's
file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from policies import write_random_adapter
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.server.worker import held_adapter
from tandem.spool.schema import LoraShape
from tiny import write_random_model

pytestmark = pytest.mark.sample(1, of="vLLM and whole stacks")

RIGHT = (
    "everywhere",
    "as large as vLLM allows",
    "attention",
    "one of a fused layer",
    "gate_proj",
    "down_proj",
    "after all",
)
WRONG = {
    "scale halved": "q_proj.lora_B has other values",
    "scale doubled": "q_proj.lora_B has other values",
    "layer missing": "layers.1.self_attn.q_proj.lora_A has other values",
    "module missing": "up_proj.lora_A has other values",
    "one value": ": model.layers.1.self_attn.v_proj.lora_B has other values (14 of 14",
    "one more rank": "q_proj.lora_A has other values",
    "ignored prefix": "(0 of 14 modules taken)",
    "overwritten": ": model.layers.0.self_attn.q_proj.lora_B has other values (14 of 14",
    "overwritten beyond the rank": ": model.layers.0.self_attn.q_proj.lora_A has other values (14",
}


@pytest.mark.slow
def test_a_worker_refuses_every_adapter_but_the_one_in_the_file(tmp_path: Path) -> None:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "inference.held_adapters", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=500,
    )
    lines = done.stdout.splitlines()
    found = dict(json.loads(line) for line in lines if line.startswith('["'))
    assert found.keys() == {*RIGHT, *WRONG}
    assert not {name: found[name] for name in RIGHT if found[name]}
    for name, words in WRONG.items():
        assert "vLLM does not hold the adapter of " in found[name], name
        assert words in found[name], name


EVERYWHERE = LoraShape(rank=4, alpha=10.0)
MOST = 8  # vLLM's largest rank.
# Sizes of the tiny mixture of experts. The intermediate size of each expert is 24.
INPUTS, OUTPUTS, EXPERTS = 32, 48, 8


def layer(kind: str, rank: int, sizes: list[int], inputs: int, **values: Any) -> Any:
    """A layer as vLLM builds it on one of two workers. vLLM's own functions cut the adapters.

    An import of vLLM takes 5 s. The functions import vLLM themselves. So a worker of pytest that
    only collects this file does not wait for the import.
    """
    from vllm.lora import layers

    made = object.__new__(getattr(layers, f"{kind}ParallelLinearWithLoRA"))
    torch.nn.Module.__init__(made)
    made.tp_size, made.tp_rank, made.n_slices = 2, rank, len(sizes)
    made.output_slices, made.input_size = tuple(sizes), inputs
    made.output_ids = (rank,) * len(sizes)
    made.lora_a_stacked = tuple(torch.zeros(2, 1, MOST, inputs) for _ in sizes)
    made.lora_b_stacked = tuple(torch.zeros(2, 1, size, MOST) for size in sizes)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def mixture_layer(rank: int) -> Any:
    """vLLM's LoRA layer of experts, without the inner layer that knows the sizes."""
    from vllm.lora.layers import FusedMoEWithLoRA

    kind = type("Experts", (FusedMoEWithLoRA,), {"intermediate_size_per_partition": 12})
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.tp_size, made.tp_rank, made.fully_sharded, made._w13_slices = 2, rank, False, 2
    made.enable_moe_shared_loras = False
    made.adapter_enabled = torch.zeros(3, dtype=torch.int)
    made.w13_lora_a_stacked = tuple(torch.zeros(2, EXPERTS, MOST, INPUTS) for _ in range(2))
    made.w13_lora_b_stacked = tuple(torch.zeros(2, EXPERTS, 12, MOST) for _ in range(2))
    made.w2_lora_a_stacked = (torch.zeros(2, EXPERTS, MOST, 12),)
    made.w2_lora_b_stacked = (torch.zeros(2, EXPERTS, INPUTS, MOST),)
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_workers_compares_its_part(rank: int, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", family="qwen3_moe", num_hidden_layers=1)
    adapter = write_random_adapter(tmp_path / "adapter", model, EVERYWHERE)
    attention, mixture = "model.layers.0.self_attn", "model.layers.0.mlp.experts"
    qkv = layer("MergedQKV", rank, [32, 16, 16], INPUTS)
    output = layer("Row", rank, [INPUTS], 32)
    experts = mixture_layer(rank)
    names = [
        f"{mixture}.{expert}.{projection}"
        for expert in range(EXPERTS)
        for projection in ("gate_proj", "down_proj", "up_proj")
    ]
    manager = SimpleNamespace(
        lora_index_to_id=[None, 7],
        model=SimpleNamespace(),
        modules={f"{attention}.qkv_proj": qkv, f"{attention}.o_proj": output, mixture: experts},
        packed_modules={
            f"{attention}.qkv_proj": [f"{attention}.{x}_proj" for x in "qkv"],
            mixture: names,
        },
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    worker = SimpleNamespace(model_runner=runner)
    request = SimpleNamespace(lora_path=str(adapter), lora_int_id=7)

    tensors = {
        name.removeprefix("base_model.model."): tensor * (2.5 if "lora_B" in name else 1.0)
        for name, tensor in load_file(adapter / WEIGHTS_FILE).items()
    }
    pairs = {
        name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in [f"{attention}.{x}_proj" for x in "qkvo"] + names
    }
    fused = [pairs[f"{attention}.{x}_proj"] for x in "qkv"]
    qkv.set_lora(1, [a for a, _ in fused], [b for _, b in fused])
    output.set_lora(1, *pairs[f"{attention}.o_proj"])
    stacked = [
        [torch.stack([pairs[name][matrix] for name in names[kind::3]]) for kind in range(3)]
        for matrix in range(2)
    ]
    experts.set_lora(1, *stacked)
    assert held_adapter.check(worker, request) == 4 + 3 * EXPERTS

    for buffer, words in (
        (qkv.lora_b_stacked[2][1, 0], "v_proj.lora_B has other values"),
        (output.lora_a_stacked[0][1, 0], "o_proj.lora_A has other values"),
        (experts.w13_lora_b_stacked[1][1, 5], r"experts.\*.up_proj.lora_B has other values"),
        (experts.w2_lora_a_stacked[0][1, 5], r"experts.\*.down_proj.lora_A has other values"),
    ):
        buffer[3, 2] += 1.0
        with pytest.raises(ValueError, match=words):
            held_adapter.check(worker, request)
        buffer[3, 2] -= 1.0


def test_a_layer_that_is_not_in_the_file_must_be_empty() -> None:
    gate_up = layer("MergedColumn", 0, [24, 24], INPUTS)
    parts = ["mlp.gate_proj", "mlp.up_proj"]
    modules = {"mlp.gate_proj": (torch.ones(4, INPUTS), torch.ones(48, 4))}
    gate_up.set_lora(0, [torch.ones(4, INPUTS), None], [torch.ones(48, 4), None])
    held = held_adapter._linear(gate_up, 0, parts, modules, 1.0)
    assert not [each.wrong() for each in held if each.wrong()]
    # This value stands for a value that the previous adapter has left in the slot.
    gate_up.lora_b_stacked[1][0, 0, 0, 0] = 1.0
    held = held_adapter._linear(gate_up, 0, parts, modules, 1.0)
    assert [each.wrong() for each in held if each.wrong()] == [
        "mlp.up_proj.lora_B is not in the file"
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("only", ["", "in_proj_qkv"])
def test_three_slices_of_a_delta_nets_layer_are_of_one_module(rank: int, only: str) -> None:
    whole, parts = [16, 16, 32, 32], ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"]
    fused = layer("MergedColumn", rank, [size // 2 for size in whole], INPUTS, output_sizes=whole)
    generator = torch.Generator().manual_seed(rank)
    modules = {
        part: tuple(torch.randn(s, generator=generator) for s in ((4, INPUTS), (rows, 4)))
        for part, rows in zip(parts, (64, 32), strict=True)
        if part.endswith(only)
    }
    pairs = [modules.get(part, (None, None)) for part in parts]
    fused.set_lora(1, [a for a, _ in pairs], [b for _, b in pairs])

    def wrong() -> list[str]:
        held = held_adapter._linear(fused, 1, parts, modules, 1.0)
        return [each.wrong() for each in held if each.wrong()]

    assert wrong() == []
    value = fused.lora_b_stacked[2][1, 0, 5, 1].item()
    fused.lora_b_stacked[2][1, 0, 5, 1] += 1.0
    assert wrong() == ["linear_attn.in_proj_qkv.lora_B has other values"]
    fused.lora_b_stacked[2][1, 0, 5, 1] = value
    fused.lora_a_stacked[3][1, 0, 2, 2] += 1.0
    says = "is not in the file" if only else "has other values"
    assert wrong() == [f"linear_attn.in_proj_z.lora_A {says}"]
