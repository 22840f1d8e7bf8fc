"""Full recompute: the same gradients, and after the backward pass a mixture of experts holds nothing (R27)."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench import moe_leak

from policies import assert_close, gradients, linear_row, make_policy, write_random_adapter
from tandem.model import recompute_fix
from tandem.model.mcore import MoELayer, random
from tiny import write_random_model

SIZES = {"layers": 2, "experts": 4, "hidden": 64}
INPUT = 128 * 64 * 4  # bytes of a layer's input of 128 tokens
MEGATRONS = {"experts, Megatron's allgather": "local_probs", "experts, Megatron's alltoall": "probs"}


@pytest.fixture(scope="module", autouse=True)
def fast_collections():
    """`measure` collects garbage often, which takes long with all that other tests have imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def measure(model, recompute_layers, fix):
    return moe_leak.measure(model, recompute_layers=recompute_layers, fix=fix, tokens=128, **SIZES)


def make(model, recompute_layers, fix):
    return moe_leak.make(model, recompute_layers=recompute_layers, fix=fix, **SIZES)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recompute_gives_the_same_gradients(alone, tmp_path, family):
    """Without `Policy._decoder_inputs` making the frozen embedding a leaf there would be none, silently."""
    model = write_random_model(tmp_path / "model", family=family, num_hidden_layers=3)
    adapter = write_random_adapter(tmp_path / "adapter", model)
    by_recompute = {}
    for recompute in ("none", "full"):
        policy = make_policy(model, adapter=adapter, recompute=recompute)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        outputs = policy(linear_row(range(50)))
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
        assert torch.equal(torch.get_rng_state(), before)
        by_recompute[recompute] = gradients(policy)
    assert_close(by_recompute["full"], by_recompute["none"], 5e-5)


@pytest.mark.parametrize("recompute_layers", [1, 2])
@pytest.mark.parametrize("model", MEGATRONS)
def test_megatrons_layers_hold_each_checkpoints_input_and_its_gradient(alone, model, recompute_layers):
    """If this fails because nothing is held any more, Megatron is fixed and `recompute_fix` can go."""
    row = measure(model, recompute_layers, fix=False)
    held = 2 * SIZES["layers"] / recompute_layers
    # A few bytes are the probabilities themselves, which their attributes may keep.
    assert row["bytes"] == pytest.approx(held * INPUT, rel=0.01)
    assert row["after gc"] == row["after backward"]
    assert row["leaves"] == held
    assert row["held by"].startswith(f"{MEGATRONS[model]} ")
    assert row["after the cut"] == 0.0


@pytest.mark.parametrize("recompute_layers", [1, 2])
@pytest.mark.parametrize("model", MEGATRONS)
def test_with_the_fix_nothing_is_held(alone, model, recompute_layers):
    row = measure(model, recompute_layers, fix=True)
    assert row["after forward"] > SIZES["layers"] / recompute_layers
    assert (row["bytes"], row["held by"]) == (0, "-")


@pytest.mark.parametrize("fix", [False, True])
@pytest.mark.parametrize("recompute_layers", [0, 1, 2])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_our_layers_hold_nothing_in_any_case(alone, model, recompute_layers, fix):
    assert measure(model, recompute_layers, fix)["bytes"] == 0


@pytest.mark.parametrize(("model", "recompute_layers"), [("dense", 1), ("dense", 0), ("experts", 0), ("experts", 1)])
def test_only_layers_of_experts_under_recompute_are_patched(alone, model, recompute_layers):
    policy = make(model, recompute_layers, fix=False)
    assert len(recompute_fix.install(policy.gpt)) == (
        SIZES["layers"] if (model, recompute_layers) == ("experts", 1) else 0
    )
    assert all(isinstance(module, MoELayer) for module in policy.modules() if module._forward_hooks)


@pytest.mark.parametrize("model", [*MEGATRONS, "experts"])
def test_gradients_are_the_same_bit_for_bit(alone, model):
    by_fix = []
    for fix in (False, True):
        policy = make(model, 1, fix)
        names = [name for name in policy.lora_parameters() if "Megatron" not in model or "mlp" not in name]
        with torch.no_grad():
            for name in names:
                policy.lora_parameters()[name].normal_(generator=torch.Generator().manual_seed(len(name)))
        policy(linear_row(range(60))).logprobs.sum().backward()
        by_fix.append({name: policy.lora_parameters()[name].grad for name in names})
    assert all(gradient.any() for gradient in by_fix[0].values())
    assert all(torch.equal(by_fix[1][name], gradient) for name, gradient in by_fix[0].items())


@pytest.mark.parametrize("model", MEGATRONS)
def test_tensors_that_share_memory_with_the_inputs_survive(alone, model):
    """The input is a chunk of a tensor used later, beside it is a slice of a parameter; and a hook keeps the
    probabilities that the dispatcher kept."""
    by_fix = []
    for fix in (False, True):
        layer = make(model, 1, fix).gpt.decoder.layers[0].mlp
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(60, 1, SIZES["hidden"], generator=generator, requires_grad=True)
        parameter = torch.nn.Parameter(torch.randn(8, SIZES["hidden"], generator=generator))
        kept = []
        layer.experts.register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[2]))
        doubled = whole * 2
        first, second = doubled.chunk(2)
        output = random.checkpoint(lambda x, row, layer=layer: layer(x * row)[0], False, first, parameter[3:4])
        (output.sum() + (second * output).sum()).backward()
        assert torch.equal(doubled.detach(), whole.detach() * 2)
        assert doubled.untyped_storage().nbytes() == 60 * SIZES["hidden"] * 4
        assert kept[-1].grad_fn is not None  # of the forward inside backward: other references keep their graph
        assert parameter.grad[3].any()
        assert not parameter.grad[4:].any()
        by_fix.append([whole.grad, parameter.grad, kept[-1].detach(), output.detach()])
    assert all(torch.equal(one, other) for one, other in zip(*by_fix, strict=True))


def test_a_dispatcher_that_holds_no_graph_is_left_as_it_is(alone):
    layer = make("experts", 1, fix=True).gpt.decoder.layers[0].mlp
    value = layer.token_dispatcher.something = torch.ones(3)
    layer(torch.randn(20, 1, SIZES["hidden"], requires_grad=True))
    assert layer.token_dispatcher.something is value
    assert recompute_fix.held_graphs(layer) == []


@pytest.mark.gpu
def test_bytes_on_a_gpu(tmp_path):
    """The same in a process of its own, by what CUDA's allocator says."""
    layers, unit = 4, 2048 * 512 * 2
    command = [sys.executable, "-m", "bench.moe_leak", "--device", "cuda", "--layers", str(layers), "--experts", "16",
               "--tokens", "2048", "--hidden", "512", "--out", str(tmp_path / "rows.json")]  # fmt: skip
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 3 + 3 * 5
    for row in rows:
        if "Megatron" in row["model"] and row["fix"] == "off" and row["recompute"] != "none":
            held = 2 * layers / int(row["recompute"].split()[0])
            assert row["bytes"] == pytest.approx(held * unit, rel=0.05), row
            assert row["after gc"] == row["after backward"], row
            assert row["after the cut"] == pytest.approx(0, abs=0.05), row
        elif row["recompute"] != "none":
            assert row["bytes"] <= 0.05 * unit, row
