"""Jobs of pairs, jobs with batches of examples, and held-out examples give the same results as PEFT
and torch's AdamW."""

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_model
import torch
import transformers
from torch.nn.functional import logsigmoid

from rank import jobs
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_dpo, prepare_sft
from tandem.data.render import render
from tandem.errors import InvalidInput
from tandem.spool import Spool
from tandem.spool.schema import DPOJob, PreferenceLoss, Schedule, SFTJob, SFTLoss

ROW = 64
BETA, RATE = 0.3, 3e-3
SETTINGS: dict[str, Any] = {
    "learning_rate": RATE,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "max_grad_norm": 1e9,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "m"
    tiny_model.write_tiny_qwen3(
        directory, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16
    )
    return directory


def pair(n: int) -> PreferencePair:
    return PreferencePair(
        prompt=f"Question {n}? ", chosen="yes " * (n % 3 + 1), rejected="no" + " no" * (n % 4)
    )


PAIRS, HELD_OUT = [pair(n) for n in range(6)], [pair(n) for n in range(6, 9)]


def submit_pairs(
    spool: Spool,
    model: Path,
    run: str,
    loss: PreferenceLoss,
    held_out: list[PreferencePair] = HELD_OUT,
    **optimizer: Any,
) -> str:
    pack = partial(
        prepare_dpo,
        PAIRS,
        held_out=held_out,
        tokenizer_path=str(model),
        vocab_size=320,
        packing=PackingSettings(sequence_length=ROW),
        batch_size=optimizer.get("batch_size"),
    )
    return jobs._submit(spool, DPOJob, run, f"dpo-{run}", pack, loss, SETTINGS | optimizer)


class Reference:
    """PEFT's model with the adapter of a checkpoint. The model computes in fp32, on whole sequences
    without packing."""

    def __init__(self, model: Path, adapter: Path) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
        self.tokenizer = load_tokenizer(str(model))

    def answers(self, pairs: list[PreferencePair]) -> list[list[torch.Tensor]]:
        """Log-probs of the tokens of each pair's chosen and rejected answer."""
        rendered = render(self.tokenizer, pairs, ["" for _ in pairs])
        return [
            [self._of(one.tokens.tolist(), one.trained.tolist()) for one in both]
            for both in rendered
        ]

    def _of(self, tokens: list[int], trained: list[int]) -> torch.Tensor:
        ids, where = torch.tensor(tokens), torch.tensor(trained)
        logprobs = self.model(ids[None]).logits[0].log_softmax(-1)
        return logprobs[where - 1, ids[where]]

    def loss(self, pairs: list[PreferencePair], before: list[list[torch.Tensor]]) -> torch.Tensor:
        """The loss of DPO by equation 7 of the paper on DPO."""
        margins = [
            sum(
                sign * (now - old).sum()
                for sign, now, old in zip((1, -1), answers, olds, strict=True)
            )
            for answers, olds in zip(self.answers(pairs), before, strict=True)
        ]
        return -logsigmoid(BETA * torch.stack(margins)).mean()


def test_dpo_equals_peft_and_adamw_over_several_steps(spool: Spool, model: Path) -> None:
    name = submit_pairs(
        spool,
        model,
        "r",
        PreferenceLoss(beta=BETA),
        epochs=4,
        batch_size=len(PAIRS),
        schedule=Schedule(shape="linear", warmup=1, total=4),
    )
    made = jobs.run_here(spool, name)
    reference = Reference(model, spool.checkpoints.path("r", 0))
    with torch.no_grad():
        before, held_out = reference.answers(PAIRS), reference.answers(HELD_OUT)
    trained = [parameter for parameter in reference.model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = jobs.steps_of(spool, name)
    assert len(steps) == 4
    for step, factor in zip(steps, (0.5, 1.0, 2 / 3, 1 / 3), strict=True):
        loss = reference.loss(PAIRS, before)
        adam.zero_grad()
        loss.backward()
        norm = torch.linalg.vector_norm(
            torch.stack([parameter.grad.norm() for parameter in trained])
        )
        adam.param_groups[0]["lr"] = factor * RATE
        adam.step()
        assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert step["learning_rate"] == pytest.approx(factor * RATE)
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert steps[-1]["loss"] < 0.5
    assert steps[-1]["pair_accuracy"] == 1
    with torch.no_grad():
        expected = reference.loss(HELD_OUT, held_out).item()
    [evaluated] = [event.data for event in spool.events.read(name) if event.type == "evaluated"]
    assert evaluated["metrics"]["held_out_loss"] == pytest.approx(expected, rel=1e-4)
    assert (
        spool.checkpoints.manifest("r", 1).metrics["held_out_loss"]
        == evaluated["metrics"]["held_out_loss"]
    )
    theirs = {
        name.replace(".default", ""): p.detach()
        for name, p in reference.model.named_parameters()
        if "lora" in name
    }
    start = jobs.tensors(spool.checkpoints.path("r", 0))
    ours = jobs.tensors(made)
    moved = sum(float(((ours[key] - start[key]) ** 2).sum()) for key in ours) ** 0.5
    apart = sum(float(((ours[key] - theirs[key].numpy()) ** 2).sum()) for key in ours) ** 0.5
    assert apart <= 1e-3 * moved


@pytest.mark.slow
def test_two_ranks_of_the_experts_evaluate_one_held_out_pair(tmp_path: Path) -> None:
    """The second rank has no rows of the held-out pair. The second rank computes its experts for
    the first rank's tokens."""
    spool, model = (
        Spool.create(tmp_path / "spool"),
        jobs.make_model(tmp_path / "m", "qwen3_moe", vocab_size=320),
    )
    tiny_model.write_tokenizer(model)
    evaluated = []
    for run in ("one", "two"):
        jobs.make_run(spool, model, run, seed=3)
        name = submit_pairs(
            spool,
            model,
            run,
            PreferenceLoss(beta=BETA),
            held_out=HELD_OUT[:1],
            eps=1e-2,
            batch_size=len(PAIRS),
        )
        if run == "one":
            jobs.run_here(spool, name)
        else:
            jobs.run_two_ranks(spool, {name: "ep"})
        [event] = [
            event.data["metrics"] for event in spool.events.read(name) if event.type == "evaluated"
        ]
        evaluated.append(event)
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)
    assert evaluated[0]["held_out_loss"] != pytest.approx(0.6931, abs=1e-4)


@pytest.mark.parametrize("reference", ["start", "base", 0])
def test_the_reference_of_a_later_job(spool: Spool, model: Path, reference: Any) -> None:
    """The job begins at step 1. The reference "start" is step 1. So the loss with the reference
    "start" begins at log 2. The references "base" and step 0 are the same model."""
    jobs.run_here(spool, submit_pairs(spool, model, "r", PreferenceLoss(beta=BETA), epochs=4))
    pack = partial(
        prepare_dpo,
        PAIRS,
        tokenizer_path=str(model),
        vocab_size=320,
        packing=PackingSettings(sequence_length=ROW),
    )
    again = jobs._submit(
        spool, DPOJob, "r", "again", pack, PreferenceLoss(beta=BETA, reference=reference), SETTINGS
    )
    jobs.run_here(spool, again)
    first = jobs.steps_of(spool, again)[0]["loss"]
    assert (first == pytest.approx(0.6931, abs=1e-4)) == (reference == "start")
    assert reference == "start" or first < 0.5


def test_weights_of_either_sign_and_other_targets_are_a_weighted_sum(
    spool: Spool, model: Path
) -> None:
    """The job's loss is minus the sum of weight times log-prob. A client may know the derivative of
    another loss with respect to each log-prob. If the client sends minus these derivatives as
    weights, the job's gradient is the gradient of the other loss."""
    rng = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 250, (2, 9), generator=rng)
    targets = torch.randint(0, 250, (2, 9), generator=rng)
    weights = torch.randn(2, 9, generator=rng).double()
    weights[:, 0] = weights[0, 4] = 0
    examples = [
        SFTExample(token_ids=i, weights=w, targets=t)
        for i, w, t in zip(ids.tolist(), weights.tolist(), targets.tolist(), strict=True)
    ]
    pack = partial(
        prepare_sft,
        examples,
        tokenizer_path="",
        vocab_size=320,
        signed=True,
        packing=PackingSettings(sequence_length=ROW),
    )
    name = jobs._submit(spool, SFTJob, "r", "signed", pack, SFTLoss(normalisation="sum"), SETTINGS)
    jobs.run_here(spool, name)
    reference = Reference(model, spool.checkpoints.path("r", 0))
    logprobs = (
        reference.model(ids).logits[:, :-1].log_softmax(-1).gather(-1, targets[:, 1:, None])[..., 0]
    )
    loss = -(weights[:, 1:] * logprobs).sum()
    loss.backward()
    norm = (
        sum(
            float(p.grad.square().sum()) for p in reference.model.parameters() if p.grad is not None
        )
        ** 0.5
    )
    [step] = jobs.steps_of(spool, name)
    assert step["trainable_tokens"] == 15
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_mean_of_weights_of_either_sign_is_refused(tmp_path: Path) -> None:
    example = SFTExample(token_ids=[1, 2, 3], weights=[0, 1, -1])
    with pytest.raises(InvalidInput, match="sum") as refused:
        prepare_sft(
            [example],
            tokenizer_path="",
            vocab_size=9,
            packing=PackingSettings(),
            out=tmp_path / "data",
        )
    assert refused.value.field == "examples.0.weights"
    assert not (tmp_path / "data").exists()
