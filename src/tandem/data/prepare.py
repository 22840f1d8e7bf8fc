"""From what a client hands in to the packed directory of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.advantages import group_advantages
from tandem.data.pack import PackedTrajectory, pack
from tandem.data.packed import write_packed
from tandem.data.sequences import LinearSequence, fit_to_row, linear_sequence, link_turns
from tandem.data.sft import chat_turns, load_tokenizer
from tandem.data.trajectories import AdvantageSettings, Group, PackingSettings, SFTExample
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import PackedData

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def prepare_rl(
    groups: Sequence[Group],
    *,
    vocab_size: int,
    advantage: AdvantageSettings,
    packing: PackingSettings,
    out: Path,
) -> PackedData:
    """Write `groups` as a packed directory `out` and return what a job records of it.

    A group is dropped, and counted, when all its advantages are 0 (no variance in its rewards) and
    `keep_zero_variance` is off: it has no policy gradient. Advantages are computed over the whole group, before
    trajectories that are too long are left out. Reward statistics are over everything handed in. `PackedData.path` is
    left empty: the spool sets it when the directory gets its final name.

    Raises InvalidInput (field: `groups.<i>.trajectories.<j>...`) and NothingToLearn; nothing is written then.
    """
    if not groups:
        raise InvalidInput("there is no group", field="groups")
    dropped_groups = 0
    kept: list[PackedTrajectory] = []
    for g, group in enumerate(groups):
        rewards = np.array([trajectory.reward for trajectory in group.trajectories], np.float64)
        for t, reward in enumerate(rewards):
            _check_range(reward, f"groups.{g}.trajectories.{t}.reward")
        advantages = group_advantages(rewards, advantage)
        members = []
        for t, trajectory in enumerate(group.trajectories):
            where = f"groups.{g}.trajectories.{t}"
            for k, turn in enumerate(trajectory.turns):
                _check_vocabulary(turn.prompt_token_ids, vocab_size, f"{where}.turns.{k}.prompt_token_ids")
                _check_vocabulary(turn.token_ids, vocab_size, f"{where}.turns.{k}.token_ids")
            if trajectory.advantage is not None:
                _check_range(trajectory.advantage, f"{where}.advantage")
                advantages[t] = trajectory.advantage
            sequences = link_turns((turn.prompt_token_ids, turn.token_ids, turn.logprobs) for turn in trajectory.turns)
            _check_length(sequences, packing, where)
            members.append(PackedTrajectory(sequences, g, float(advantages[t]), trajectory.reward))
        if advantages.any() or advantage.keep_zero_variance:
            kept.extend(members)
        else:
            dropped_groups += 1
    every = np.array([trajectory.reward for group in groups for trajectory in group.trajectories], np.float64)
    statistics = {
        "reward_mean": float(every.mean()),
        "reward_std": float(every.std()),
        "reward_min": float(every.min()),
        "reward_max": float(every.max()),
    }
    return _write(kept, vocab_size, packing, out, dropped_groups=dropped_groups, **statistics)


def prepare_sft(
    examples: Sequence[SFTExample],
    *,
    tokenizer_path: str,
    vocab_size: int,
    packing: PackingSettings,
    out: Path,
) -> PackedData:
    """Write `examples` as a packed directory `out`; each is a trajectory and a group of its own, with its weight as
    advantage. `tokenizer_path` (directory or hub name) is read only if an example has `messages`; how those become
    tokens is said in `tandem.data.sft`. Otherwise as `prepare_rl`; fields are `examples.<i>...`."""
    if not examples:
        raise InvalidInput("there is no example", field="examples")
    tokenizer = load_tokenizer(tokenizer_path) if any(example.messages for example in examples) else None
    trajectories = []
    for e, example in enumerate(examples):
        where = f"examples.{e}"
        _check_range(example.weight, f"{where}.weight")
        if example.token_ids is not None and example.trainable is not None:
            _check_vocabulary(example.token_ids, vocab_size, f"{where}.token_ids")
            targets = [index for index, trained in enumerate(example.trainable) if trained]
            sequences = [linear_sequence(example.token_ids, targets, [float("nan")] * len(targets))]
        else:
            turns = chat_turns(tokenizer, example.messages or [], where)
            for prompt, completion in turns:
                _check_vocabulary(prompt + completion, vocab_size, f"{where}.messages")
            sequences = link_turns((prompt, ids, [float("nan")] * len(ids)) for prompt, ids in turns)
        _check_length(sequences, packing, where)
        trajectories.append(PackedTrajectory(sequences, e, example.weight, float("nan")))
    return _write(trajectories, vocab_size, packing, out)


def _write(
    trajectories: list[PackedTrajectory], vocab_size: int, packing: PackingSettings, out: Path, **summary: Any
) -> PackedData:
    kept: list[PackedTrajectory] = []
    truncated = 0
    numbers: dict[int, int] = {}  # of the groups that something is left of
    for trajectory in trajectories:
        fitted = fit_to_row(trajectory.sequences, packing)
        if fitted.sequences:
            number = numbers.setdefault(trajectory.group, len(numbers))
            kept.append(replace(trajectory, sequences=fitted.sequences, group=number))
            truncated += fitted.truncated
    dropped = len(trajectories) - len(kept)
    if not kept:
        reasons = []
        if flat := summary.get("dropped_groups", 0):
            reasons.append(
                f"{flat} groups have no variance in their rewards (sample more per prompt, take prompts that are "
                "neither always solved nor never, or set advantage.keep_zero_variance)"
            )
        if dropped:
            reasons.append(
                f"{dropped} trajectories don't fit {packing.sequence_length} tokens (raise packing.sequence_length)"
            )
        raise NothingToLearn(f"nothing is left to train: {'; '.join(reasons)}")
    arrays = pack(kept, packing.sequence_length)
    write_packed(out, arrays, vocab_size=vocab_size)
    return PackedData(
        path="",
        num_rows=len(arrays.tokens),
        sequence_length=packing.sequence_length,
        num_items=len(arrays.item_target),
        num_tokens=int(arrays.row_num_tokens.sum()),
        num_unshared_tokens=sum(len(sequence.tokens) for trajectory in kept for sequence in trajectory.sequences),
        num_trajectories=len(kept),
        num_groups=len(numbers),
        dropped_trajectories=dropped,
        truncated_trajectories=truncated,
        **summary,
    )


def _check_vocabulary(ids: list[int], vocab_size: int, field: str) -> None:
    if (highest := max(ids)) >= vocab_size:
        raise InvalidInput(
            f"token id {highest} at index {ids.index(highest)} is outside the model's vocabulary of {vocab_size}; "
            "was it sampled from another model?",
            field=field,
        )


def _check_range(value: float, field: str) -> None:
    if abs(value) > _MAX_FLOAT32:
        raise InvalidInput(f"{value} does not fit float32", field=field)


def _check_length(sequences: list[LinearSequence], packing: PackingSettings, field: str) -> None:
    longest = max(len(sequence.tokens) for sequence in sequences)
    if packing.too_long == "refuse" and longest > packing.sequence_length:
        raise InvalidInput(
            f"{longest} tokens don't fit a row of {packing.sequence_length}; "
            'raise packing.sequence_length, or set packing.too_long to "truncate" or "drop"',
            field=field,
        )
