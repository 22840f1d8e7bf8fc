"""A mixture of experts with LoRA computes what transformers' model with merged weights computes."""

from __future__ import annotations

import peft
import pytest
import torch
import transformers
from torch.func import functional_call

from policies import all_logits, assert_close, gradients, linear_row, make_policy, write_random_adapter
from tandem.errors import InvalidInput
from tandem.families.adapter import WEIGHTS_FILE, adapter_shapes
from tandem.families.identity import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.model.build import build_policy
from tandem.model.experts import grouped_linear
from tandem.model.mcore import parallel_state
from tandem.model.weights.checkpoint_tensors import read_adapter
from tandem.spool.schema import LoraShape
from tiny import MOE, write_random_model

TOKENS = torch.randint(0, 260, (70,), generator=torch.Generator().manual_seed(5))
WEIGHTS = torch.linspace(-1.0, 2.0, 69)

SHAPES = [
    LoraShape(rank=4, alpha=10.0),
    LoraShape(rank=8, alpha=3.0, targets=("gate_proj", "up_proj", "down_proj")),
    LoraShape(rank=3, alpha=6.0, targets=("q_proj", "up_proj")),
    LoraShape(rank=1, alpha=2.0, targets=("down_proj", "o_proj")),
]


def base(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def merged(model, adapter: dict[str, torch.Tensor], lora: LoraShape) -> dict[str, torch.Tensor]:
    """The weights with `W + alpha / rank * B A` in place, as functions of the adapter's tensors."""
    weights = dict(model.named_parameters())
    for key in (key for key in adapter if "lora_A" in key):
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = lora.alpha / lora.rank * adapter[key.replace("lora_A", "lora_B")] @ adapter[key]
        if ".experts." not in path:
            weights[path + ".weight"] = weights[path + ".weight"] + delta
            continue
        # transformers stacks the experts: gate_up_proj [experts, gate then up, hidden], down_proj [experts, hidden, in]
        block, expert, projection = path.rsplit(".", 2)
        half = {"gate_proj": 0, "up_proj": 1, "down_proj": None}[projection]
        name = f"{block}.down_proj" if half is None else f"{block}.gate_up_proj"
        rows = slice(None) if half is None else slice(half * len(delta), (half + 1) * len(delta))
        where = torch.zeros_like(weights[name])
        where[int(expert), rows] = delta
        weights[name] = weights[name] + where
    return weights


@pytest.mark.parametrize("lora", SHAPES, ids=lambda lora: f"r{lora.rank}a{lora.alpha}x{len(lora.targets)}")
def test_logits_and_every_gradient(alone, tmp_path, lora):
    model = write_random_model(tmp_path / "model", family="qwen3_moe")
    directory = write_random_adapter(tmp_path / "adapter", model, lora)
    adapter = {
        key: value.clone().requires_grad_()
        for key, value in read_adapter(directory, read_arch(str(model)), lora, torch.device("cpu")).items()
    }
    reference = base(model).requires_grad_(False)
    logits = functional_call(reference, merged(reference, adapter, lora), (TOKENS[None],)).logits[0]
    logp = torch.log_softmax(logits[:-1], -1).gather(-1, TOKENS[1:, None]).squeeze(-1)
    (logp * WEIGHTS).mean().backward()

    ours = make_policy(model, lora, directory)
    with torch.no_grad():
        plain = reference(TOKENS[None]).logits[0]
        assert (logits - plain).abs().max() > 0.5
        assert (all_logits(ours, TOKENS) - logits).abs().max() <= 1e-4
        with ours.adapter_disabled():
            assert (all_logits(ours, TOKENS) - plain).abs().max() <= 1e-4
    (ours(linear_row(TOKENS.numpy())).logprobs * WEIGHTS).mean().backward()
    actual = {}
    for name, gradient in gradients(ours).items():
        actual |= ours.gather(name, gradient)
    assert_close(actual, {key: tensor.grad for key, tensor in adapter.items()}, 1e-4)
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_an_adapter_on_attention_is_pefts(alone, tmp_path):
    model = write_random_model(tmp_path / "model", family="qwen3_moe", norm_topk_prob=False)
    lora = LoraShape(rank=4, alpha=10.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    adapter = write_random_adapter(tmp_path / "adapter", model, lora)
    theirs = peft.PeftModel.from_pretrained(base(model), adapter)
    with torch.no_grad():
        expected, actual = theirs(TOKENS[None]).logits[0], all_logits(make_policy(model, lora, adapter), TOKENS)
    assert (actual - expected).abs().max() <= 1e-4


def test_the_identity_adapter_changes_nothing(alone, tmp_path):
    model = write_random_model(tmp_path / "model", family="qwen3_moe")
    lora, adapter = SHAPES[0], tmp_path / "adapter"
    adapter.mkdir()
    write_identity_adapter(adapter, read_arch(str(model)), lora, base_model=str(model), seed=7)
    policy = make_policy(model, lora, adapter)
    with torch.no_grad(), policy.adapter_disabled():
        plain = all_logits(policy, TOKENS)
    with torch.no_grad():
        assert torch.equal(all_logits(policy, TOKENS), plain)


def test_a_layers_experts_are_few_parameters_and_many_of_pefts_tensors(alone, tmp_path):
    from safetensors.torch import save_file

    model = write_random_model(tmp_path / "model", family="qwen3_moe")
    lora = SHAPES[0]
    adapter = write_random_adapter(tmp_path / "adapter", model, lora)
    policy = make_policy(model, lora, adapter)
    assert len(policy.lora_parameters()) == 2 * 2 * 7  # layers, A and B, targets
    stack = policy.lora_parameters()["base_model.model.model.layers.1.mlp.experts.*.down_proj.lora_B.weight"]
    assert stack.shape == (MOE["num_experts"], 32, lora.rank)
    whole = policy.adapter_tensors()
    shapes = adapter_shapes(policy.arch, lora)
    assert list(whole) == list(shapes)
    assert {key: tuple(tensor.shape) for key, tensor in whole.items()} == shapes
    assert "base_model.model.model.layers.0.mlp.experts.7.gate_proj.lora_A.weight" in shapes
    for name, parameter in policy.lora_parameters().items():
        assert torch.equal(policy.shard(name, whole.__getitem__), parameter.data), name
    save_file(whole, tmp_path / "saved")
    assert (tmp_path / "saved").read_bytes() == (adapter / WEIGHTS_FILE).read_bytes()


def test_the_router_is_frozen_and_there_is_no_auxiliary_loss(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path, family="qwen3_moe"))
    trainable = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for parameter in policy.lora_parameters().values()}
    router = policy.gpt.decoder.layers[0].mlp.router
    assert not router.is_aux_loss_enabled()
    assert router.config.moe_expert_capacity_factor is None  # no token is dropped
    assert router.config.moe_z_loss_coeff is None


def test_more_tensor_parallel_ranks_than_one_are_refused(alone, tmp_path, monkeypatch):
    arch = read_arch(str(write_random_model(tmp_path, family="qwen3_moe")))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    with pytest.raises(InvalidInput, match="TANDEM_TENSOR_PARALLEL=1"):
        build_policy(arch, SHAPES[0])


SIZES = [(5, 0, 7, 1, 0), (0, 0, 13, 0, 0), (3, 3, 3, 2, 2)]


def grouped_reference(x, weight, sizes):
    return torch.cat([part @ matrix.T for part, matrix in zip(x.split(sizes), weight, strict=True)])


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_linear(sizes):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 24, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    expected = grouped_reference(x, weight, sizes)
    assert torch.equal(grouped_linear(x, weight, ends), expected)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_linear(x, weight, ends), (x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("sizes", [(300, 0, 700, 1, 23), (0, 0, 1024, 0, 0), (205, 205, 205, 205, 204)])
def test_grouped_linear_on_a_gpu(sizes, rank):
    """bf16 through torch's grouped product against fp64, forward and backward, with empty and odd groups."""
    generator = torch.Generator().manual_seed(0)
    # Made on the CPU and moved: on machines where other tests run too, `device="cuda"` is answered for the CPU.
    wide = torch.randn(1024, 2 * (rank or 128), generator=generator).cuda().bfloat16()
    weight = torch.randn(5, 256, rank or 128, generator=generator).cuda().bfloat16()
    upstream = torch.randn(1024, 2, 256, generator=generator).cuda().bfloat16()
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        x, w = (tensor.detach().to(dtype).requires_grad_() for tensor in (wide, weight))
        # A part of wider rows, and a gradient that is one, as LoRA's are.
        product = grouped_linear(x.chunk(2, dim=-1)[1], w, ends)
        torch.cat([product, -product], dim=-1).backward(upstream.flatten(1).to(dtype))
        found.append([product.detach(), x.grad, w.grad])
    for actual, expected in zip(*found, strict=True):
        assert actual.dtype is torch.bfloat16
        assert (actual.double() - expected).norm() <= 0.01 * expected.norm()
    empty = [group for group, size in enumerate(sizes) if size == 0]
    assert not found[0][2][empty].any()


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_twice(tmp_path):
    """Log-probs and gradients of a mixture of experts: no sum depends on which thread came first."""
    import subprocess
    import sys
    from pathlib import Path

    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import torch
from pathlib import Path
from policies import gradients, make_policy, write_random_adapter
from tandem.model import device, parallel
from tandem.model.policy import RowTensors
from tiny import write_random_model
where = device.activate("cuda"); parallel.init_parallel()
model = write_random_model(Path({str(tmp_path)!r}) / "model", family="qwen3_moe", hidden_size=256, num_experts=32,
    num_experts_per_tok=8, moe_intermediate_size=128, head_dim=64, max_position_embeddings=4096)
policy = make_policy(model, adapter=write_random_adapter(Path({str(tmp_path)!r}) / "adapter", model), recompute="full")
slots = torch.arange(2048, device=where)
row = RowTensors(slots * 7 % 260, slots, torch.full_like(slots, 2048), slots[:-1], slots[1:])
found = []
for _ in range(3):
    outputs = policy(row)
    (outputs.logprobs.mean() + outputs.entropy.mean()).backward()
    found.append([outputs.logprobs.detach(), *gradients(policy).values()])
assert all(tensor.isfinite().all() and tensor.any() for tensor in found[0])
for other in found[1:]:
    assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
parallel.destroy()
print("same bits", len(found[0]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert "same bits" in done.stdout, done.stderr[-3000:]
