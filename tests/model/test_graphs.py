"""CUDA graphs of the layers. The tests check when a job's passes are captured. They also check that
captured passes give the same bits."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model.cpu_reference import random_row
from model.family_cases import CASES
from policies import gradients, linear_row, make_policy, write_random_adapter
from tandem.model import device, fp8, graphs, parallel
from tandem.model.layer.sublayers import SaveLevel
from tandem.spool.schema import LoraShape, OptimizerSettings
from tandem.training.optimizer import AdapterOptimizer
from tandem.training.steps import Training
from tiny import write_random_model

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LORA = LoraShape(rank=16, alpha=32.0)
DENSE = ["llama, linear rope", "mistral", "qwen2", "qwen3", "gemma3"]
"""Families whose layers are captured."""


def test_passes_are_captured_where_they_gain_more_than_the_capture_takes():
    """The host needs 10 ms to launch a pass, and a capture costs as much time as two passes."""
    cases = {(2, 0.0): False, (3, 2.5): True, (4, 6.0): False, (100, 9.9): False, (300, 9.9): True}
    for (passes, gpu), worth in cases.items():
        assert graphs.worth_capturing(passes, 10.0, gpu) == worth, (passes, gpu)
    # The GPU needs 12 ms for a pass, so the host waits for the GPU.
    assert not graphs.worth_capturing(10**6, 10.0, 12.0)


def test_captured_passes_take_the_place_of_the_layers_where_gradients_are_computed(alone, tmp_path):
    model = write_random_model(tmp_path / "model", num_hidden_layers=3)
    policy = make_policy(model, adapter=write_random_adapter(tmp_path / "adapter", model))
    row, calls = linear_row(range(50)), []

    def backward() -> list[torch.Tensor]:
        outputs = policy(row)
        outputs.logprobs.sum().backward()
        return [outputs.logprobs, *gradients(policy).values()]

    def layers(hidden, tree):
        calls.append(len(hidden))
        for layer in policy.gpt.decoder.layers:
            hidden, _ = layer(hidden, packed_seq_params=tree)
        return hidden

    expected = backward()
    policy.layer_graphs = layers
    assert all(torch.equal(*pair) for pair in zip(backward(), expected, strict=True))
    assert calls == [50]
    with torch.no_grad():
        assert torch.equal(policy(row).logprobs, expected[0])
    assert calls == [50]
    graphs.drop(policy)
    backward()
    assert calls == [50]


def test_nothing_is_captured_on_the_cpu(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path))
    graphs.repeat(policy, linear_row(range(50)), 1000)
    assert policy.layer_graphs is None


@pytest.mark.parametrize("family", ["qwen3", "olmo3", "smollm3", "ministral3", "gemma4_text"])
def test_families_without_a_test_of_their_graphs_are_not_captured(
    alone, tmp_path, monkeypatch, family
):
    asked = []
    lora = LoraShape(rank=2, targets=("q_proj",))
    policy = make_policy(write_random_model(tmp_path, family=family), lora)
    monkeypatch.setattr(graphs.device, "is_cuda", lambda: True)
    monkeypatch.setattr(graphs, "_gpu_is_done", lambda: asked.append(family))
    graphs.repeat(policy, linear_row(range(50)), 1000)
    assert asked == (["qwen3"] if family == "qwen3" else [])


def test_a_capture_that_fails_leaves_the_passes_as_they_are(alone, tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    policy = make_policy(write_random_model(tmp_path))
    monkeypatch.setattr(graphs, "LayerGraphs", fail)
    row = linear_row(range(50))
    with pytest.warns(UserWarning, match="no memory"):
        graphs.capture(policy, policy.first_hidden(row), policy.decoder_inputs(row))
    assert policy.layer_graphs is None


def test_a_step_that_runs_out_of_memory_drops_the_graphs_first(alone, tmp_path):
    policy = make_policy(write_random_model(tmp_path))
    policy.layer_graphs = lambda hidden, _tree: hidden
    had_graphs = []

    def add_gradients(*_):
        had_graphs.append(policy.layer_graphs is not None)
        if len(had_graphs) == 1:
            raise torch.OutOfMemoryError
        return {}, {}

    optimizer = SimpleNamespace(zero_grad=lambda: None)
    rows = SimpleNamespace(add_gradients=add_gradients, fit=SimpleNamespace(lower=lambda: False))
    schedule = SimpleNamespace(micro_steps=lambda *_: [])
    place = SimpleNamespace(place=SimpleNamespace(data=0))
    training = SimpleNamespace(
        policy=policy, optimizer=optimizer, schedule=schedule, topology=place, _rows=rows
    )
    assert Training._gradients(training, 0, 1.0) == ({}, {})
    assert had_graphs == [True, False]


@pytest.fixture
def on_gpu() -> Iterator[None]:
    device.activate("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)
    parallel.init_parallel()
    yield
    parallel.destroy()


class Trained:
    """A policy whose gradients stay at the same addresses, and three rows of the same length."""

    def __init__(self, directory, case: str, lora: LoraShape = LORA) -> None:
        model = write_random_model(directory / "model", spread=1.0, **{**CASES[case], **SHAPE})
        adapter = write_random_adapter(directory / "adapter", model, lora)
        self.policy = make_policy(model, lora, adapter, dtype=torch.bfloat16)
        self.optimizer = AdapterOptimizer(self.policy, OptimizerSettings(learning_rate=1e-3))
        trees, chain = random_row(2048), linear_row([7 * i % 2048 for i in range(900)], padding=100)
        self.rows = [self.move(row) for row in (trees, chain, trees)]

    @staticmethod
    def move(row):
        tensors = {
            name: value.cuda()
            for name, value in vars(row).items()
            if value is not None and name != "subtree_end"
        }
        return replace(row, **tensors)

    def passes(self) -> list[torch.Tensor]:
        """The log-probs of each row, and the gradients summed over the rows."""
        self.optimizer.zero_grad()
        found = []
        with self.policy.adapter_fixed():
            for row in self.rows:
                outputs = self.policy(row, temperature=0.7)
                (outputs.logprobs.mean() + 0.1 * outputs.entropy.mean()).backward()
                found.append(outputs.logprobs.detach())
        return found + [memory.clone() for memory, _ in self.optimizer._gradients]

    def capture(self) -> None:
        row = self.policy.lay_out(self.rows[0])
        with torch.no_grad():
            hidden, inputs = self.policy.first_hidden(row), self.policy.decoder_inputs(row)
        graphs.capture(self.policy, hidden, inputs["packed_seq_params"])
        assert self.policy.layer_graphs is not None


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    assert all(tensor.any() for tensor in one)
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [[2, 2, 2], [0, 1, 2]])
@pytest.mark.parametrize("case", DENSE)
def test_graphs_have_the_same_bits(on_gpu, tmp_path, case, levels):
    """Captured graphs compute the captured row, and rows with other trees. They also run after a
    change of the adapter, and after a second capture."""
    trained = Trained(tmp_path, case)
    for layer, level in zip(trained.policy.gpt.decoder.layers, levels, strict=True):
        layer.save_level = SaveLevel(level)
    for _ in range(2):
        expected = trained.passes()
        trained.capture()
        assert same(trained.passes(), expected)
        trained.optimizer.step(trained.optimizer.gradient_norm(), 1e-3)
        captured = trained.passes()
        assert not torch.equal(captured[0], expected[0])
        assert graphs.drop(trained.policy)
        assert same(trained.passes(), captured)


@pytest.mark.gpu
def test_graphs_of_a_quantised_base_have_the_same_bits(on_gpu, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    trained = Trained(tmp_path, "qwen3", LoraShape(rank=8, targets=("q_proj", "down_proj")))
    trained.policy.quantise_base()
    assert any(isinstance(layer.fp8, fp8.Fp8Weight) for layer in trained.policy._linear_layers())
    expected = trained.passes()
    trained.capture()
    assert same(trained.passes(), expected)


@pytest.mark.gpu
def test_a_small_model_is_captured_if_enough_passes_are_left_and_the_memory_is_ample(
    on_gpu, tmp_path, monkeypatch
):
    trained = Trained(tmp_path, "qwen3")
    for _ in range(2):  # The first passes load the kernels.
        expected = trained.passes()
    graphs.repeat(trained.policy, trained.rows[0], 2)
    assert trained.policy.layer_graphs is None
    with monkeypatch.context() as patch:
        used = torch.cuda.max_memory_allocated() + graphs.LEAST_HEADROOM
        patch.setattr(graphs.memory, "obtainable", lambda: used)
        graphs.repeat(trained.policy, trained.rows[0], 1000)
    assert trained.policy.layer_graphs is None
    graphs.repeat(trained.policy, trained.rows[0], 1000)
    assert trained.policy.layer_graphs is not None
    assert same(trained.passes(), expected)


@pytest.mark.gpu
def test_a_capture_that_runs_out_of_memory_gives_back_what_it_took(on_gpu, tmp_path):
    trained = Trained(tmp_path, "qwen3")
    expected = trained.passes()
    graphs.memory.release_cached()
    before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 8 * 2**20) / total)
    try:
        with pytest.warns(UserWarning, match="memory"), pytest.raises(AssertionError):
            trained.capture()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_reserved() <= before + 4 * 2**20
    assert same(trained.passes(), expected)
