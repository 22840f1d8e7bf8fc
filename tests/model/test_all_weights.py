"""Full fine-tuning: loss and gradients of all weights are transformers', and three steps those of torch's AdamW.

`BROKEN` lists mistakes that the comparison must see.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from family_cases import CASES, SEQUENCES, WEIGHTS, packed_row
from full import Full, make_full, saved, tensors
from oracle.breaks import BREAKS
from policies import assert_close
from tandem.model.layer.blocks import Keep
from tandem.spool.schema import OptimizerSettings
from tandem.training.sharded_adam import joined, split
from tiny import write_random_model

SUPPORTED = {name: case for name, case in CASES.items() if case["family"] not in ("glm4_moe", "gpt_oss")}
SUPPORTED["qwen2, tied"] = {"family": "qwen2", "tie_word_embeddings": True}
SETTINGS = OptimizerSettings(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=1.0)


def their_loss(model) -> torch.Tensor:
    loss = torch.zeros(())
    for sequence, weights in zip(SEQUENCES, WEIGHTS, strict=True):
        logits = model(sequence[None]).logits[0, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, sequence[1:, None])[:, 0]
        loss = loss + (logprobs * weights).sum()
    return loss


def train(full: Full, steps: int) -> None:
    for _ in range(steps):
        full.optimizer.zero_grad()
        (full.policy(packed_row()).logprobs * torch.cat(WEIGHTS)).sum().backward()
        full.optimizer.reduce_gradients()
        full.optimizer.step(full.optimizer.gradient_norm(), SETTINGS.learning_rate)


@dataclass(frozen=True)
class Reference:
    """What transformers and torch's AdamW compute; tensors by the names of the model's files."""

    model: Path
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    norm: float
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]  # three steps


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Callable[[str], Reference]:
    @cache
    def compute(case: str) -> Reference:
        path = tmp_path_factory.mktemp("reference")
        model = write_random_model(path / "model", seed=4, spread=1.0, num_hidden_layers=3, **SUPPORTED[case])
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        named = dict(theirs.named_parameters())
        before = saved(theirs, path / "before", named)
        vectors = [p for p in named.values() if p.ndim == 1]
        groups = [{"params": [p for p in named.values() if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]
        adam = torch.optim.AdamW(
            groups, lr=SETTINGS.learning_rate, betas=(SETTINGS.beta1, SETTINGS.beta2), eps=SETTINGS.eps,
            weight_decay=SETTINGS.weight_decay,
        )  # fmt: skip
        loss = their_loss(theirs)
        loss.backward()
        gradients = saved(theirs, path / "gradients", {name: p.grad for name, p in named.items()})
        norm = torch.nn.utils.get_total_norm([p.grad for p in named.values()])
        for _ in range(3):
            adam.zero_grad()
            their_loss(theirs).backward()
            torch.nn.utils.clip_grad_norm_(named.values(), SETTINGS.max_grad_norm)
            adam.step()
        return Reference(model, loss.detach(), gradients, float(norm), before, saved(theirs, path / "after", named))

    return compute


def compare(expected: Reference, directory: Path, levels: Iterable[Keep] = Keep) -> None:
    """Assert that loss and gradients at each level, and three steps, are the reference's."""
    full = make_full(expected.model, SETTINGS)
    for keep in levels:
        for layer in full.policy.gpt.decoder.layers:
            layer.keep = keep
        full.optimizer.zero_grad()
        loss = (full.policy(packed_row()).logprobs * torch.cat(WEIGHTS)).sum()
        loss.backward()
        assert (loss - expected.loss).abs() <= 1e-5 * expected.loss.abs(), keep
        assert_close(tensors(full.write(directory / f"gradients-{keep}", full.gradients())), expected.gradients, 1e-5)
    assert full.optimizer.gradient_norm() == pytest.approx(expected.norm, rel=1e-5)
    train(full, 3)
    actual = tensors(full.write(directory / "after", dict(full.policy.base())))
    moved = torch.cat([(expected.after[name] - expected.before[name]).flatten() for name in actual])
    difference = torch.cat([(expected.after[name] - actual[name]).flatten() for name in actual])
    assert moved.norm() > 0.01
    assert difference.norm() <= 1e-3 * moved.norm()


@pytest.mark.parametrize("case", SUPPORTED)
def test_like_transformers_and_adamw(alone, tmp_path, reference, case):
    compare(reference(case), tmp_path)


BROKEN = {
    "norms have no gradient": "qwen3",
    "norms after a block are passed over": "gemma3",
    "biases have no gradient": "qwen2",
    "heads' norms: RoPE is not undone": "qwen3",
    "heads' norms: those of queries and keys are swapped": "qwen3",
    "embedding: a token counts once": "qwen3",
    "output layer has no gradient": "qwen3",
    "tied output layer has no gradient": "qwen2, tied",
    "experts: only the first has a gradient": "qwen3_moe",
    "router has no gradient": "qwen3_moe",
    "Adam: bias correction of the next step": "qwen3",
    "Adam: vectors decay": "qwen3",
    "Adam: gradients are not clipped": "qwen3",
    "Adam: steps are not counted": "qwen3",
}
"""Mistakes of `oracle.breaks` and the case that shows each."""


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_seen(alone, tmp_path, reference, monkeypatch, name):
    expected = reference(BROKEN[name])
    where, attribute, broken = BREAKS[name].patch
    monkeypatch.setattr(where, attribute, broken, raising=False)
    with pytest.raises(AssertionError):
        compare(expected, tmp_path, [Keep.ALL])


def test_master_values_in_bf16_lose_nothing():
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(10_000, generator=generator) * 10.0 ** torch.randint(-30, 30, (10_000,), generator=generator)
    weights, remainder = torch.empty(10_000, dtype=torch.bfloat16), torch.empty(10_000, dtype=torch.int16)
    split(master.clone(), weights, remainder)
    assert torch.equal(joined(weights, remainder), master)
    assert torch.equal(weights, master.bfloat16())  # no exact tie is among random values
    tie = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])
    split(tie.clone(), weights[:2], remainder[:2])
    assert weights[:2].tolist() == [1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert torch.equal(joined(weights[:2], remainder[:2]), tie)


def test_bf16_steps_add_up_below_its_resolution(alone, tmp_path):
    """Steps of a thousandth of a weight's resolution: the master values are those of a model in fp32, bit for bit."""
    model = write_random_model(tmp_path / "model", seed=4, spread=1.0)
    exact, half = make_full(model, SETTINGS), make_full(model, SETTINGS, torch.bfloat16)
    for name, weight in exact.policy.base().items():
        weight.data.copy_(half.policy.base()[name])
    for full in (exact, half):
        for step in range(20):
            full.optimizer.zero_grad()
            for name, gradient in full.gradients().items():
                gradient.fill_(1.0 if step % 5 else -0.5).mul_(len(name))
            full.optimizer.reduce_gradients()
            full.optimizer.step(1.0, 2e-6)
    remainders = half.optimizer.whole("remainder")
    for name, weight in exact.policy.base().items():
        master = joined(half.policy.base()[name].data.flatten(), remainders[name].flatten())
        assert torch.equal(master, weight.data.flatten()), name
