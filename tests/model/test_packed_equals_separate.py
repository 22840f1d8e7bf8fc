"""A packed row with shared prefixes trains exactly what its sequences train one by one."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import RowTensors, assert_close, gradients, linear_row, make_policy, write_random_adapter
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.packed_format import PackedBatch
from tandem.data.prepare import prepare_rl
from tandem.training.steps import row_tensors
from tiny import write_random_model

VOCABULARY = 260
# Few different ids, so that prefixes are shared beyond the prompt by chance as well.
IDS = st.integers(min_value=250, max_value=252)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def policy(request, alone, tmp_path_factory):
    model = write_random_model(tmp_path_factory.mktemp("model"), family=request.param, seed=11)
    return make_policy(model, adapter=write_random_adapter(tmp_path_factory.mktemp("adapter"), model))


@st.composite
def trajectories(draw, prompt):
    """One to three turns; each later one continues the first or starts over from the prompt."""
    turns, context = [], list(prompt)
    for _ in range(draw(st.integers(1, 3))):
        completion = draw(st.lists(IDS, min_size=1, max_size=8))
        turns.append(Turn(prompt_token_ids=context, token_ids=completion, logprobs=[-1.0] * len(completion)))
        if draw(st.booleans()):
            context = context + completion + draw(st.lists(IDS, min_size=1, max_size=4))
        else:
            context = list(prompt) + draw(st.lists(IDS, max_size=4))
    return Trajectory(turns=turns, reward=0.0, advantage=draw(st.sampled_from([-2.0, -0.5, 0.7, 3.0])))


@st.composite
def groups(draw):
    # Unequal tokens: if all are the same, attention's true gradient is 0 and only rounding would be compared.
    prompt = [250, 251, 252, *draw(st.lists(IDS, max_size=9))]
    return Group(trajectories=draw(st.lists(trajectories(prompt), min_size=1, max_size=5)))


def separate(batch: list[Group]) -> list[tuple[list[int], list[int], list[float]]]:
    """(tokens, trained slots, advantages) of each linear sequence: a turn that continues the one before belongs to the
    same sequence."""
    sequences = []
    for trajectory in (t for group in batch for t in group.trajectories):
        tokens: list[int] = []
        for turn in trajectory.turns:
            if not tokens or turn.prompt_token_ids[: len(tokens)] != tokens:
                trained: list[int] = []
                sequences.append((tokens := [], trained, []))
            tokens[:] = turn.prompt_token_ids
            trained += range(len(tokens), len(tokens) + len(turn.token_ids))
            tokens += turn.token_ids
            sequences[-1][2].extend([trajectory.advantage] * len(turn.token_ids))
    return sequences


def loss(outputs, advantages):
    """A function of log-probs and entropies that weighs each item differently by its advantage."""
    return (outputs.logprobs.exp() * advantages + 0.3 * advantages**2 * outputs.logprobs + outputs.entropy).sum()


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
        )
        with PackedBatch.open(out) as packed:
            rows = [packed.row(index) for index in range(len(packed))]
    total = torch.zeros(())
    for row in rows:
        one = loss(policy(row_tensors(row, torch.device("cpu"))), torch.from_numpy(row.item_advantage))
        one.backward()
        total += one.detach()
    together = gradients(policy)

    expected = torch.zeros(())
    sequences = separate(batch)
    assert sum(len(trained) for _, trained, _ in sequences) == sum(len(row.item_target) for row in rows)
    for tokens, trained, advantages in sequences:
        one = loss(policy(linear_row(tokens, trained)), torch.tensor(advantages))
        one.backward()
        expected += one.detach()
    assert abs(total - expected) <= 1e-5 * abs(expected)
    # Few ids make attention's gradients small differences: a processor's fp32 rounding has been 1.08e-5 of their norm.
    assert_close(together, gradients(policy), 5e-5)


def test_every_log_prob_in_a_deep_tree(policy):
    """By hand: root 5 6, below it 7 8 (with 9 and 10 11 below that) and 12; padding."""
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 0, 0]
    row = RowTensors(
        tokens=torch.tensor(tokens),
        positions=torch.tensor([0, 1, 2, 3, 4, 4, 5, 2, 0, 0]),
        subtree_end=torch.tensor([8, 8, 7, 7, 5, 7, 7, 8, 9, 10]),
        item_source=torch.tensor([0, 1, 2, 3, 3, 5, 1]),
        item_target=torch.tensor([1, 2, 3, 4, 5, 6, 7]),
    )
    with torch.no_grad():
        packed = policy(row).logprobs
        long = policy(linear_row([5, 6, 7, 8, 10, 11])).logprobs
        middle = policy(linear_row([5, 6, 7, 8, 9])).logprobs
        short = policy(linear_row([5, 6, 12])).logprobs
    expected = torch.stack([long[0], long[1], long[2], middle[3], long[3], long[4], short[1]])
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)
