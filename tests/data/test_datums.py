"""The data of a session's forward and backward passes. The tests check the losses that have
Tinker's names, and the packed rows."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.data.datums import Datum, named_loss, pass_request
from tandem.data.packed_format import PackedBatch
from tandem.errors import InvalidInput
from tandem.spool.schema import RLLoss, SFTLoss
from tandem.training import losses

VOCAB = 50
RNG = np.random.default_rng(3)


def datum(length: int = 5, *, prompt: list[int] | None = None, sampled: bool = True) -> Datum:
    tokens = RNG.integers(0, VOCAB, length)
    if prompt:
        tokens[: len(prompt)] = prompt
    return Datum(
        tokens.astype(np.int32),
        RNG.integers(0, VOCAB, length).astype(np.int32),
        RNG.normal(size=length).astype(np.float32),
        (-RNG.exponential(2.0, length)).astype(np.float32) if sampled else None,
    )


# The losses of a token as Tinker's documentation defines them. The token's log-probs by the policy
# and by the sampler are lp and q. The token's weight or advantage is a.
FORMULAS = {
    "cross_entropy": ({}, lambda lp, q, a: -a * lp),
    "importance_sampling": ({}, lambda lp, q, a: -torch.exp(lp - q) * a),
    "ppo": (
        {},
        lambda lp, q, a: (
            -torch.minimum(torch.exp(lp - q) * a, torch.exp(lp - q).clamp(0.8, 1.2) * a)
        ),
    ),
    "ppo ": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0},
        lambda lp, q, a: (
            -torch.minimum(torch.exp(lp - q) * a, torch.exp(lp - q).clamp(0.5, 3.0) * a)
        ),
    ),
    "cispo": ({}, lambda lp, q, a: -torch.exp(lp - q).clamp(0.0, 4.0).detach() * a * lp),
    "cispo ": (
        {"clip_low_threshold": 0.9},
        lambda lp, q, a: -torch.exp(lp - q).clamp(0.9, 4.0).detach() * a * lp,
    ),
    "dro": ({"beta": 0.3}, lambda lp, q, a: -(lp * a - 0.15 * (lp - q) ** 2)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_named_loss_is_tinkers_formula(name):
    config, formula = FORMULAS[name]
    loss = named_loss(name.strip(), config)
    n = 200
    ours = -torch.distributions.Exponential(0.5).sample((n,)).double()
    theirs = ours.clone().requires_grad_()
    ours.requires_grad_()
    sampler, factors = ours.detach() + torch.randn(n).double(), torch.randn(n).double()
    items = losses.Items(
        ours, torch.zeros(n).double(), torch.ones(n).double(), torch.zeros(n).long(), 1
    )
    assert loss.mean_over == "sum"
    if isinstance(loss, SFTLoss):
        items.weights = factors
        value = losses.sft_loss(items).loss
    else:
        items.advantages, items.old_logprobs = factors, sampler
        items.sampler_logprobs = sampler
        value = losses.rl_loss(items, loss).loss
    want = formula(theirs, sampler, factors).sum()
    value.backward()
    want.backward()
    torch.testing.assert_close(value, want)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("name", "config", "field"),
    [
        ("stable_reinforce", {}, "loss_fn"),
        ("gspo", {"beta": 1.0}, "loss_fn_config.beta"),
        ("gspo", {"clip_low_threshold": 1.1}, "loss_fn_config"),
        ("custom", {}, "loss_fn"),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config.beta"),
        ("ppo", {"clip_low_threshold": -0.1}, "loss_fn_config.clip_low_threshold"),
        ("ppo", {"clip_high_threshold": float("nan")}, "loss_fn_config.clip_high_threshold"),
        ("ppo", {"clip_high_threshold": 0.9}, "loss_fn_config"),
        ("cispo", {"clip_low_threshold": 1.5}, "loss_fn_config"),
        ("dro", {}, "loss_fn_config.beta"),
    ],
)
def test_other_losses_are_refused(name, config, field):
    with pytest.raises(InvalidInput) as refused:
        named_loss(name, config)
    assert refused.value.field == field


def test_every_position_is_an_item_with_its_own_target(tmp_path: Path):
    prompt = [1, 2, 3, 4, 5, 6]
    data = [datum(9, prompt=prompt), datum(3), datum(8, prompt=prompt), datum(1)]
    request, write = pass_request("forward", data, "ppo", {}, vocab_size=VOCAB)
    assert request.lengths == (9, 3, 8, 1)
    assert isinstance(request.loss, RLLoss)
    sha256 = write(tmp_path)
    assert sha256 == hashlib.sha256((tmp_path / "arrays.npy").read_bytes()).hexdigest()
    with PackedBatch.open(tmp_path, sha256) as batch:
        assert (len(batch), batch.sequence_length) == (1, 128) == (request.num_rows, 128)
        row = batch.row(0)
    # The prompt of 6 tokens that two sequences share is stored once.
    assert request.num_tokens == row.num_tokens == sum(n + 1 for n in request.lengths) - 6
    for d, one in enumerate(data):
        of = row.item_trajectory == d
        assert row.item_token[of].tolist() == one.targets.tolist()
        assert row.tokens[row.item_source[of]].tolist() == one.tokens.tolist()
        assert row.item_weight[of].tolist() == one.factors.tolist()
        assert one.logprobs is not None
        assert row.item_logprob[of].tolist() == one.logprobs.tolist()
        assert row.positions[row.item_source[of]].tolist() == list(range(len(one.tokens)))


def test_gspos_ratio_is_of_the_marked_positions(tmp_path: Path):
    one = replace(datum(5), sequence_ratio_mask=np.array([0, 1, 0, 2, 1], np.float32))
    request, write = pass_request("forward", [one], "gspo", {}, vocab_size=VOCAB)
    assert isinstance(request.loss, RLLoss)
    assert request.loss.clip_bounds == (1 - 3e-4, 1 + 4e-4)
    sha256 = write(tmp_path)
    with PackedBatch.open(tmp_path, sha256) as batch:
        row = batch.row(0)
    assert one.logprobs is not None
    assert np.isnan(row.item_logprob).tolist() == [True, False, True, False, False]
    assert row.item_logprob[[1, 3, 4]].tolist() == one.logprobs[[1, 3, 4]].tolist()
    for mask in (None, np.zeros(5, np.float32)):
        bad = replace(one, sequence_ratio_mask=mask)
        with pytest.raises(InvalidInput, match="marks no token") as refused:
            pass_request("forward", [one, bad], "gspo", {}, vocab_size=VOCAB)
        assert refused.value.field == "data.1.sequence_ratio_mask"


def test_the_same_data_makes_the_same_bytes_and_rows_have_few_lengths(tmp_path: Path):
    for lengths, slots in (
        ([5], 128),
        ([200, 3], 256),
        ([600] * 5, 4096),
        ([600] * 20, 4096),
        ([3000, 10], 4096),
    ):
        data = [datum(length, sampled=False) for length in lengths]
        hashes = set()
        for name in "ab":
            request, write = pass_request("forward", data, "cross_entropy", {}, vocab_size=VOCAB)
            (out := tmp_path / f"{len(lengths)}x{slots}{name}").mkdir()
            hashes.add(write(out))
        assert len(hashes) == 1
        assert request.sequence_length == slots


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": np.array([1, VOCAB, 2], np.int32)}, "data.1.tokens"),
        ({"targets": np.array([1, -1, 2], np.int32)}, "data.1.targets"),
        ({"targets": np.array([1, 2], np.int32)}, "data.1.targets"),
        ({"factors": np.array([1, np.inf, 2], np.float32)}, "data.1.factors"),
        ({"logprobs": np.array([1, np.nan, 2], np.float32)}, "data.1.logprobs"),
        ({"logprobs": None}, "data.1.logprobs"),
        ({"tokens": np.zeros(0, np.int32)}, "data.1"),
    ],
)
def test_data_that_cant_be_computed_are_refused(change, field):
    bad = Datum(**(vars(datum(3)) | change))
    with pytest.raises(InvalidInput) as refused:
        pass_request("forward_backward", [datum(), bad], "ppo", {}, vocab_size=VOCAB)
    assert refused.value.field == field
    with pytest.raises(InvalidInput, match="no datum"):
        pass_request("forward_backward", [], "ppo", {}, vocab_size=VOCAB)
    with pytest.raises(InvalidInput, match="5 tokens"):
        pass_request("forward", [datum(5)], "ppo", {}, vocab_size=VOCAB, longest=5)
