"""A GPU computes the same as the CPU, with both attention kernels, and with and without full
recomputation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model import cpu_reference
from model.cpu_reference import evaluate, lora_of
from policies import make_policy, write_random_adapter
from ranks import run_program
from tandem.families.registry import arch_from_config, weight_rules
from tandem.model import device, parallel

pytestmark = pytest.mark.gpu

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 5000,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
WIDE_HEADS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 200,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
SHAPES = {
    "qwen3": SHAPE,
    "qwen3_moe": SHAPE | EXPERTS,
    "gemma4_text": SHAPE | WIDE_HEADS,
}
FP32 = (2e-3, 2e-3)
# In bf16 the router sends some tokens to other experts than in fp32.
BF16 = {"qwen3": (0.05, 0.15), "qwen3_moe": (0.2, 0.6), "gemma4_text": (0.05, 0.15)}
"""The largest mean difference of log-probs, and the largest difference of a gradient relative to
the gradient's norm, by family."""


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Writes a model whose weights are as large as initialised weights. With larger weights, bf16
    would change the log-probs by several nats."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        name: shape
        for rule in weight_rules(arch_from_config(config))
        for name, shape in rule.sources.items()
    }
    noise = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights = {
        name: 1 + 0.1 * value if value.ndim == 1 else value * value.shape[1] ** -0.5
        for name, value in noise.items()
    }
    if "global_head_dim" in config:
        # Gemma 4 does not divide attention's logits by the root of the head's size; trained norms
        # are small instead. With norms of 1, bf16 would change the log-probs by 0.3 nats.
        for name in weights:
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weights[name] *= 0.25
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors")


@pytest.fixture(scope="module", params=list(BF16))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with an adapter. The file `cpu.pt` in this directory has the CPU's
    results."""
    directory = tmp_path_factory.mktemp(request.param)
    write_model(directory, SHAPES[request.param] | {"model_type": request.param})
    write_random_adapter(directory / "adapter", directory, lora_of(directory))
    run_program(cpu_reference.__file__, str(directory), seconds=200)
    return directory


@pytest.fixture(scope="module")
def on_gpu(model: Path) -> Iterator[None]:
    device.activate("cuda")
    parallel.init_parallel()
    yield
    parallel.destroy()


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_and_gradients_are_those_of_the_cpu(model, on_gpu, dtype, recompute, kernel):
    policy = make_policy(model, lora_of(model), model / "adapter", dtype=dtype, recompute=recompute)
    policy.attention_kernel = kernel
    actual, expected = evaluate(policy), torch.load(model / "cpu.pt")
    family = policy.arch.model_type
    by_log_prob, by_gradient = FP32 if dtype is torch.float32 else BF16[family]
    assert actual.keys() == expected.keys()
    difference = (actual["logprobs"] - expected["logprobs"]).abs().mean().item()
    relative = {
        name: ((actual[name] - value).norm() / value.norm()).item()
        for name, value in expected.items()
        if name not in ("logprobs", "entropy")
    }
    worst = max(relative, key=relative.__getitem__)
    print(f"{family} {dtype}: {difference:.1e}; {worst} {relative[worst]:.1e}")
    assert difference <= by_log_prob
    assert relative[worst] <= by_gradient, worst
