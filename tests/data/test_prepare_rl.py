"""The rows that `prepare_rl` packs. Every sequence can be read back from the rows, and the mask,
items, counts and advantages are right."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.packed_format import PackedBatch, PackedRow
from tandem.data.prepare import prepare_rl
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import PackedData

VOCAB = 5


def turn(
    prompt: list[int], sampled: list[int], first_logprob: float = -0.5, step: int | None = None
) -> Turn:
    """A turn. The log-probs of the sampled tokens are `first_logprob`, `first_logprob` - 1/8 and so
    on. These log-probs distinguish turns with the same tokens."""
    logprobs = [first_logprob - index / 8 for index in range(len(sampled))]
    return Turn(prompt_token_ids=prompt, token_ids=sampled, logprobs=logprobs, policy_step=step)


def group(members: list[Trajectory]) -> Group:
    return Group(trajectories=members)


def rows(out: Path) -> list[PackedRow]:
    with PackedBatch.open(out) as batch:
        return [batch.row(number) for number in range(len(batch))]


def one(prompt: list[int], sampled: list[int], reward: float, **more: object) -> Trajectory:
    return Trajectory.model_validate({"turns": [turn(prompt, sampled)], "reward": reward, **more})


def run(
    out: Path,
    groups: list[Group],
    *,
    length: int = 32,
    too_long: str = "refuse",
    vocab_size=VOCAB,
    **more: object,
) -> PackedData:
    """Packs `groups` into `out` and returns the counts. `more`: further settings of the
    advantages."""
    packing = PackingSettings.model_validate({"sequence_length": length, "too_long": too_long})
    advantage = AdvantageSettings.model_validate(more)
    return prepare_rl(
        groups, vocab_size=vocab_size, advantage=advantage, packing=packing, out=out, base_step=2
    )


def lineages(row: PackedRow) -> list[list[int]]:
    """For each slot, the slots on the path from the root to this slot. The paths are computed only
    from depths: a slot's parent is the nearest earlier slot whose depth is smaller by 1."""
    path: list[int] = []
    return [path := [*path[: row.positions[slot]], slot] for slot in range(row.num_tokens)]


# The vocabulary is tiny and the sequences are short. Shared prefixes, duplicates, and sequences
# that are prefixes of other sequences are therefore likely.
steps = st.none() | st.integers(0, 2)
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@st.composite
def trajectories(draw: st.DrawFn, prompt: list[int]) -> Trajectory:
    turns = [turn(prompt, draw(ids), -draw(st.integers(0, 9)), draw(steps))]
    for _ in range(draw(st.integers(0, 2))):
        context = turns[-1].prompt_token_ids + turns[-1].token_ids
        continues = draw(st.booleans())
        context = (
            context + draw(ids) if continues else context[: draw(st.integers(1, len(context)))]
        )
        turns.append(turn(context, draw(ids), -draw(st.integers(0, 9)), draw(steps)))
    return Trajectory(turns=turns, reward=draw(st.sampled_from([0.0, 0.25, 1.0])))


@st.composite
def batches(draw: st.DrawFn) -> list[Group]:
    prompts = draw(st.lists(ids, min_size=1, max_size=4))
    return [
        group(draw(st.lists(trajectories(prompt), min_size=1, max_size=6))) for prompt in prompts
    ]


def linear(
    trajectory: Trajectory,
) -> list[tuple[tuple[int, ...], tuple[tuple[int, float, int], ...]]]:
    """The sequences of a trajectory, computed in a slow and simple way. Each sequence is (its
    tokens, its trained tokens). Each trained token is (index, log-prob, step)."""
    found: list[tuple[list[int], list[tuple[int, float, int]]]] = []
    for sampled in trajectory.turns:
        if found and sampled.prompt_token_ids[: len(found[-1][0])] == found[-1][0]:
            trained = found.pop()[1]
        else:
            trained = []
        start = len(sampled.prompt_token_ids)
        step = -1 if sampled.policy_step is None else sampled.policy_step
        trained = trained + [
            (start + index, value, step) for index, value in enumerate(sampled.logprobs)
        ]
        found.append((sampled.prompt_token_ids + sampled.token_ids, trained))
    return [(tuple(tokens), tuple(trained)) for tokens, trained in found]


def cut(sequence: tuple, length: int) -> tuple | None:
    """Cuts a sequence to `length` tokens, as `truncate` does, but in a slow and simple way. The
    result is None if no trained token is left."""
    tokens, trained = sequence
    if len(tokens) <= length:
        return sequence
    trained = tuple(entry for entry in trained if entry[0] < length)
    return (tokens[: trained[-1][0] + 1], trained) if trained else None


def read_back(batch: PackedBatch) -> Counter:
    """Counts the sequences in the rows by (trajectory, tokens, trained tokens), and checks the
    structure of each row."""
    found: Counter = Counter()
    for r in range(len(batch)):
        row = batch.row(r)
        used, lineage = row.num_tokens, lineages(row)
        slot = np.arange(batch.sequence_length)
        mask = (slot[None, :] <= slot[:, None]) & (slot[:, None] < row.subtree_end[None, :])
        for query in range(used):
            assert np.flatnonzero(mask[query]).tolist() == lineage[query]
            assert row.positions[query] == len(lineage[query]) - 1
        for query in range(used, batch.sequence_length):
            assert np.flatnonzero(mask[query]).tolist() == [query]
            assert row.tokens[query] == row.positions[query] == 0
        # No prefix is stored twice, so the paths to two slots never have the same tokens.
        prefixes = [tuple(row.tokens[path]) for path in lineage]
        assert len(set(prefixes)) == used
        # No slot is superfluous: each slot is on the path to a trained slot.
        assert set(range(used)) == {slot for target in row.item_target for slot in lineage[target]}

        for sequence in np.unique(row.item_sequence):
            at = np.flatnonzero(row.item_sequence == sequence)
            assert (np.diff(at) == 1).all()
            assert len(set(row.item_trajectory[at])) == 1
            path = lineage[row.item_target[at[-1]]]
            for item in at:
                assert row.item_source[item] == lineage[row.item_target[item]][-2]
                assert row.item_target[item] in path
            trained = tuple(
                (
                    int(row.positions[row.item_target[i]]),
                    float(row.item_logprob[i]),
                    int(row.item_policy_step[i]),
                )
                for i in at
            )
            found[
                (
                    int(row.item_trajectory[at[0]]),
                    tuple(int(token) for token in row.tokens[path]),
                    trained,
                )
            ] += 1
    return found


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(2, 40), st.sampled_from(["truncate", "drop"]))
@example([group([one([1], [2, 3], 0.0), one([1], [2, 3], 1.0), one([1], [2], 1.0)])], 3, "drop")
def test_nothing_is_lost(groups: list[Group], length: int, too_long: str) -> None:
    expected: Counter = Counter()
    rewards, group_numbers, counts = [], [], []
    truncated = dropped = 0
    for g, group in enumerate(groups):
        for trajectory in group.trajectories:
            sequences = linear(trajectory)
            long = any(len(tokens) > length for tokens, _ in sequences)
            fitted = [
                cut(sequence, length)
                for sequence in sequences
                if not long or too_long == "truncate"
            ]
            kept = [sequence for sequence in fitted if sequence]
            dropped += not kept
            if kept:
                truncated += long
                expected.update((len(rewards), tokens, trained) for tokens, trained in kept)
                rewards.append(trajectory.reward)
                group_numbers.append(g)
                counts.append(sum(len(trained) for _, trained in kept))

    with TemporaryDirectory() as directory:
        out = Path(directory) / "data"
        if not rewards:
            with pytest.raises(NothingToLearn):
                run(out, groups, length=length, too_long=too_long, keep_zero_variance=True)
            assert not out.exists()
            return
        data = run(out, groups, length=length, too_long=too_long, keep_zero_variance=True)
        with PackedBatch.open(out) as batch:
            assert read_back(batch) == expected
            assert batch.trajectory_reward.tolist() == pytest.approx(rewards)
            assert batch.trajectory_num_items.tolist() == counts
            _, renumbered = np.unique(group_numbers, return_inverse=True)
            assert batch.trajectory_group.tolist() == renumbered.tolist()
            per_group = np.bincount(renumbered, weights=counts)
            assert batch.group_num_items.tolist() == per_group.tolist()
            # A group whose tokens fit into one row is stored in one row.
            for g in range(len(batch.group_num_items)):
                own = [tokens for t, tokens, _ in expected if renumbered[t] == g]
                nodes = {tokens[: depth + 1] for tokens in own for depth in range(len(tokens))}
                rows = [
                    r
                    for r in range(len(batch))
                    if g in batch.trajectory_group[batch.row(r).item_trajectory]
                ]
                assert len(rows) == 1 or len(nodes) > length
            assert data.num_rows == len(batch)
            assert data.num_tokens == batch.row_num_tokens.sum()
        assert data.num_items == sum(counts)
        assert data.num_unshared_tokens == sum(
            len(tokens) * n for (_, tokens, _), n in expected.items()
        )
        assert data.num_tokens <= data.num_unshared_tokens
        assert (data.num_trajectories, data.num_groups) == (len(rewards), len(set(group_numbers)))
        assert (data.truncated_trajectories, data.dropped_trajectories) == (truncated, dropped)
        assert data.sequence_length == length


SYSTEM = list(range(30))
LAYOUTS = {
    "split groups fill each other's rows": (
        # 5 completions of 10 tokens after a prompt of 20 tokens fill 60 slots of one row and 30
        # slots of the next row. The second group starts in the 30 slots that are left.
        [group([one([g] * 20, [10 * g + i] * 10, i) for i in range(5)]) for g in (1, 2)],
        60,
        (3, 60 + 60 + 60),
    ),
    "groups in a row share a system prompt": (
        [group([one([*SYSTEM, 40 + g], [50 + g, i], i) for i in range(3)]) for g in range(6)],
        100,
        (1, 30 + 6 * 5),
    ),
    # If the groups were packed in the order in which they come, they would need three rows.
    "best fit decreasing": (
        [
            group([one([g], list(range(10 * g, 10 * g + size - 1)), 1)])
            for g, size in enumerate([4, 5, 6, 5])
        ],
        10,
        (2, 20),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_filled(tmp_path: Path, name: str) -> None:
    groups, length, expected = LAYOUTS[name]
    data = run(tmp_path / "a", groups, length=length, vocab_size=100, keep_zero_variance=True)
    assert (data.num_rows, data.num_tokens) == expected


def test_zero_variance_is_dropped_and_counted(tmp_path: Path) -> None:
    flat = group([one([1], [2], 0.1), one([1], [3], 0.1), one([1], [4], 0.1)])
    varied = group([one([2], [2], 0.0), one([2], [3], 1.0)])
    data = run(tmp_path / "a", [flat, varied])
    assert (data.dropped_groups, data.num_groups, data.num_trajectories) == (1, 1, 2)
    # The statistics of rewards cover the trajectories of dropped groups too.
    assert data.reward_mean == pytest.approx(1.3 / 5)
    assert data.reward_std == pytest.approx(np.std([0.1, 0.1, 0.1, 0, 1]))
    assert (data.reward_min, data.reward_max) == (0.0, 1.0)
    data = run(tmp_path / "b", [flat, varied], keep_zero_variance=True)
    assert (data.dropped_groups, data.num_groups, data.num_trajectories) == (0, 2, 5)
    advantages = [row.item_weight[row.item_trajectory < 3] for row in rows(tmp_path / "b")]
    assert np.concatenate(advantages).tolist() == [0, 0, 0]
    with pytest.raises(NothingToLearn, match="1 groups have no variance"):
        run(tmp_path / "c", [flat])


@pytest.mark.parametrize(
    ("groups", "settings", "expected"),
    [
        # An advantage in the input replaces the computed advantage. The group with this advantage
        # has variance, although its rewards are equal.
        ([[one([1], [2], 0.0, advantage=-2.5), one([1], [3], 0.0)]], {}, [-2.5, 0.0]),
        # Advantages are computed before a trajectory is dropped.
        (
            [[one([1], [2], 1.0), one([1], [2] * 5, 0.0), one([1], [3], 0.5)]],
            {"scale": "none"},
            [0.5, 0.0],
        ),
        # The last group, whose rewards are equal, is dropped. The dropped group counts in the
        # batch's spread: the rewards 0, 0, 2, 2, 1, 1 have the spread sqrt(2 / 3).
        (
            [
                [one([1], [2], reward) for reward in rewards]
                for rewards in ((0.0, 2.0), (0.0, 2.0), (1.0, 1.0))
            ],
            {"scale": "batch"},
            [-(1.5**0.5), 1.5**0.5] * 2,
        ),
    ],
)
def test_advantages(
    tmp_path: Path, groups: list[list[Trajectory]], settings: dict[str, str], expected: list[float]
) -> None:
    run(
        tmp_path / "a",
        [group(members) for members in groups],
        length=4,
        too_long="drop",
        **settings,
    )
    found = {
        t: a
        for row in rows(tmp_path / "a")
        for t, a in zip(row.item_trajectory, row.item_weight, strict=True)
    }
    assert [found[number] for number in sorted(found)] == pytest.approx(expected, rel=1e-5)


good = group([one([1], [2], 0.0), one([1], [3], 1.0)])


@pytest.mark.parametrize(
    ("step", "says"),
    [(4, None), (6, None), (3, "3 steps older"), (7, "newer"), (None, "not given")],
)
def test_turns_may_be_as_old_as_the_bound(
    tmp_path: Path, step: int | None, says: str | None
) -> None:
    def made(step: int | None) -> Group:
        turns = [turn([1], [2]).model_copy(update={"policy_step": step})]
        return group([Trajectory(turns=turns, reward=reward) for reward in (0.0, 1.0)])

    groups = [made(6), made(step)]

    def pack() -> PackedData:
        return prepare_rl(
            groups,
            vocab_size=VOCAB,
            advantage=AdvantageSettings(),
            packing=PackingSettings(),
            out=tmp_path / "a",
            base_step=6,
            max_off_policy_steps=2,
        )

    if says is None and step is not None:
        data = pack()
        assert (data.policy_step_min, data.policy_step_mean) == (step, (6 + step) / 2)
    else:
        with pytest.raises(InvalidInput, match=says) as refused:
            pack()
        assert refused.value.field == "groups.1.trajectories.0.turns.0.policy_step"


@pytest.mark.parametrize(
    ("bad", "field", "message"),
    [
        ([], "groups", "no group"),
        (
            [good, group([one([1], [2, 5], 0)])],
            "groups.1.trajectories.0.turns.0.token_ids",
            "id 5 .*of 5",
        ),
        (
            [group([one([1, 7], [2], 0)])],
            "groups.0.trajectories.0.turns.0.prompt_token_ids",
            "id 7 at index 1",
        ),
        ([good, group([one([1], [2] * 32, 0)])], "groups.1.trajectories.0", "33 tokens .* 32"),
        (
            [group([one([1], [2], 3e38), one([1], [3], -3e38)])],
            "item_weight",
            "an advantage is not finite",
        ),
    ],
)
def test_refused_naming_the_field(
    tmp_path: Path, bad: list[Group], field: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        run(tmp_path / "a", bad, baseline="leave_one_out", scale="none")
    assert refused.value.field == field
    assert not (tmp_path / "a").exists()
