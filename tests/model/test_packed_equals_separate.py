"""A packed row with shared prefixes has the same loss and gradients as its sequences, computed one
by one."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.test_prepare_rl import ids, linear, trajectories
from policies import assert_close, gradients, linear_row, make_policy, write_random_adapter
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings
from tandem.data.packed_format import PackedBatch
from tandem.data.prepare import prepare_rl
from tandem.training.rows import row_tensors
from tiny import write_random_model

VOCABULARY = 260


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def policy(request, alone, tmp_path_factory):
    model = write_random_model(tmp_path_factory.mktemp("model"), family=request.param, seed=11)
    return make_policy(
        model, adapter=write_random_adapter(tmp_path_factory.mktemp("adapter"), model)
    )


@st.composite
def groups(draw):
    # The prompt has unequal tokens. If all tokens were the same, attention's true gradient would be
    # 0, and the test would compare rounding only.
    prompt = [1, 2, 3, *draw(ids)]
    members = draw(st.lists(trajectories(prompt), min_size=1, max_size=5))
    advantage = st.sampled_from([-2.0, -0.5, 0.7, 3.0])
    return Group(
        trajectories=[
            member.model_copy(update={"advantage": draw(advantage)}) for member in members
        ]
    )


def loss(outputs, advantages: torch.Tensor | float):
    """A function of log-probs and entropies. The function gives each item a weight that depends on
    the item's advantage."""
    return (
        outputs.logprobs.exp() * advantages
        + 0.3 * advantages**2 * outputs.logprobs
        + outputs.entropy
    ).sum()


@pytest.mark.slow
@given(st.lists(groups(), min_size=1, max_size=3), st.sampled_from([64, 101, 256]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_packed_equals_one_by_one(policy, batch, sequence_length):
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "packed"
        prepare_rl(
            batch,
            vocab_size=VOCABULARY,
            advantage=AdvantageSettings(keep_zero_variance=True),
            packing=PackingSettings(sequence_length=sequence_length),
            out=out,
            base_step=2,
        )
        with PackedBatch.open(out) as packed:
            rows = [packed.row(index) for index in range(len(packed))]
    total = torch.zeros(())
    for row in rows:
        one = loss(policy(row_tensors(row, torch.device("cpu"))), torch.from_numpy(row.item_weight))
        one.backward()
        total += one.detach()
    together = gradients(policy)

    expected = torch.zeros(())
    members = [member for group in batch for member in group.trajectories]
    sequences = [(*sequence, member.advantage) for member in members for sequence in linear(member)]
    assert sum(len(trained) for _, trained, _ in sequences) == sum(
        len(row.item_target) for row in rows
    )
    for tokens, trained, advantage in sequences:
        one = loss(policy(linear_row(tokens, [slot for slot, *_ in trained])), advantage)
        one.backward()
        expected += one.detach()
    assert abs(total - expected) <= 1e-5 * abs(expected)
    # With few ids, attention's gradients are small differences of large numbers. On one processor,
    # rounding in fp32 was 1.08e-5 of the gradients' norm.
    assert_close(together, gradients(policy), 5e-5)
