"""Turns a client's groups or examples into linear sequences in a packed directory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import PreferencePair, SFTExample
from tandem.data.inputs import (
    EQUAL_REWARDS,
    MAX_FLOAT32,
    AdvantageSettings,
    Group,
    PackingSettings,
    Trajectory,
)
from tandem.data.packed_format import write_packed
from tandem.data.packing import LinearSequence, PackedTrajectory, pack, slots_of
from tandem.data.render import check_ends, check_ids, check_vocabulary, render
from tandem.data.routing import Mixture, joined, routed_expert_ids
from tandem.errors import InvalidInput, NothingToLearn
from tandem.spool.schema import PackedData


def prepare_rl(
    groups: Sequence[Group],
    *,
    vocab_size: int,
    advantage: AdvantageSettings,
    packing: PackingSettings,
    out: Path,
    batch_size: int | None = None,
    base_step: int = 0,
    max_off_policy_steps: int | None = None,
    mixture: Mixture | None = None,
) -> PackedData:
    """Writes `groups` as a packed directory `out`, and returns the `PackedData` of the job.

    Drops and counts groups whose advantages are all 0 (equal rewards give no policy gradient),
    unless `keep_zero_variance` is on. Reward statistics are over all trajectories of `groups`.
    `PackedData.path` stays empty: the spool sets it when the directory gets its final name.

    Before writing, raises InvalidInput (field `groups.<i>.trajectories.<j>...`) or NothingToLearn.

    Args:
        batch_size: groups per optimizer step, for `row_batch`; None: all groups in one step.
        max_off_policy_steps: the largest allowed `base_step` - `policy_step` of a turn. The job
            starts from `base_step`. None: a turn may lack `policy_step`.
        mixture: the base model's mixture of experts; None: the model is dense.
    """
    if not groups:
        raise InvalidInput("there is no group", field="groups")
    dropped_groups, trajectories = 0, list[PackedTrajectory]()
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in everything], np.float64)
    batch_spread = spread(np.array([trajectory.returns[0] for trajectory in everything]))
    for g, group in enumerate(groups):
        advantages = turn_advantages(group, advantage, batch_spread=batch_spread)
        members: list[PackedTrajectory] = []
        for t, trajectory in enumerate(group.trajectories):
            field = f"groups.{g}.trajectories.{t}"
            for k, turn in enumerate(trajectory.turns):
                _check_policy_step(
                    turn.policy_step,
                    base_step,
                    max_off_policy_steps,
                    f"{field}.turns.{k}.policy_step",
                )
            sequences = _linked_turns(trajectory, advantages[t], vocab_size, mixture, field)
            fitted, truncated = _fit_to_row(sequences, packing, field)
            members.append(PackedTrajectory(fitted, g, 1.0, trajectory.reward, truncated))
        teaches = any(turn.any() for turns in advantages for turn in turns)
        if teaches or advantage.keep_zero_variance:
            trajectories.extend(members)
        else:
            dropped_groups += 1
    statistics = {
        f"reward_{name}": float(getattr(rewards, name)()) for name in ("mean", "std", "min", "max")
    }
    turns = [
        turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns
    ]
    if policy_steps := [turn.policy_step for turn in turns if turn.policy_step is not None]:
        statistics |= {
            "policy_step_min": min(policy_steps),
            "policy_step_mean": sum(policy_steps) / len(policy_steps),
        }
    return _write(trajectories, vocab_size, packing, out, batch_size, dropped_groups, **statistics)


def prepare_sft(
    examples: Sequence[SFTExample],
    *,
    tokenizer_path: str,
    vocab_size: int,
    packing: PackingSettings,
    out: Path,
    held_out: Sequence[SFTExample] = (),
    batch_size: int | None = None,
    signed: bool = False,
    day: date | None = None,
) -> PackedData:
    """Like `prepare_rl`, but for `examples`. Each example is a weighted trajectory in its own
    group. `tandem.data.render` turns examples into tokens. Fields of errors are `examples.<i>...`
    and `held_out.<i>...`.

    Args:
        tokenizer_path: a directory or a hub name; read only if an example has no `token_ids`.
        held_out: examples that are only evaluated.
        signed: whether weights may be negative.
        day: the date that chat templates print as today's; None: the clock's date.
    """
    everything, fields = _listed(examples, held_out, "examples")
    plain = all(example.token_ids is not None for example in everything)
    tokenizer = None if plain else load_tokenizer(tokenizer_path)
    rendered = render(tokenizer, everything, fields, day)
    check_ends(tokenizer, everything, rendered, "examples")
    trajectories = []
    for e, sequences in enumerate(rendered):
        example, field = everything[e], fields[e]
        check_vocabulary(example, sequences, vocab_size, field)
        for one in sequences:
            if not signed and (one.weights < 0).any():
                problem = (
                    'a negative weight needs loss.normalisation="sum", since a mean divides by the'
                    " weights"
                )
                raise InvalidInput(problem, field=f"{field}.weights")
            if (
                largest := example.weight * max(1.0, float(np.abs(one.weights).max()))
            ) > MAX_FLOAT32:
                raise InvalidInput(f"{largest} does not fit float32", field=f"{field}.weight")
        fitted, truncated = _fit_to_row(sequences, packing, field)
        batch = 0 if e < len(examples) else -1
        trajectories.append(
            PackedTrajectory(fitted, e, example.weight, float("nan"), truncated, batch)
        )
    return _write(trajectories, vocab_size, packing, out, batch_size, dropped_groups=0)


def prepare_dpo(
    pairs: Sequence[PreferencePair],
    *,
    tokenizer_path: str,
    vocab_size: int,
    packing: PackingSettings,
    out: Path,
    held_out: Sequence[PreferencePair] = (),
    batch_size: int | None = None,
    day: date | None = None,
) -> PackedData:
    """Like `prepare_sft`, but for `pairs`. A pair is a group of two trajectories in one row; their
    common beginning is stored once. Fields of errors are `pairs.<i>...`."""
    everything, fields = _listed(pairs, held_out, "pairs")
    tokenizer = load_tokenizer(tokenizer_path)
    rendered = render(tokenizer, everything, fields, day)
    check_ends(tokenizer, everything, rendered, "pairs")
    trajectories = []
    for p, both in enumerate(rendered):
        slots = slots_of(both)
        fits = slots <= packing.sequence_length
        if not fits and packing.too_long != "drop":
            remedy = 'raise packing.sequence_length, or set packing.too_long to "drop"'
            problem = (
                f"the pair takes {slots} tokens, which don't fit a row of {packing.sequence_length}"
            )
            raise InvalidInput(f"{problem}; {remedy}", field=fields[p])
        batch = 0 if p < len(pairs) else -1
        check_vocabulary(everything[p], both, vocab_size, fields[p])
        for is_rejected in (False, True):
            kept = [one for one in both if fits and one.rejected == is_rejected]
            trajectories.append(
                PackedTrajectory(kept, p, 1.0, float("nan"), not fits, batch, is_rejected)
            )
    return _write(trajectories, vocab_size, packing, out, batch_size, dropped_groups=0)


def spread(rewards: NDArray[np.float64]) -> float:
    """The divisor for rewards: their population standard deviation sqrt(sum (r_i - m)^2 / n) plus
    1e-6, with m the mean reward. `rewards`: float64 [n]."""
    return float(rewards.std()) + 1e-6


def group_advantages(
    rewards: NDArray[np.float64], settings: AdvantageSettings, *, batch_spread: float
) -> NDArray[np.float64]:
    """Advantages [n] of one group's rewards [n], float64. `batch_spread`: `spread` of all groups'
    rewards.

    In the formulas, m is the mean of the group's n rewards, and s is `spread` of these rewards:

    - `baseline="mean"`, `scale="group"`: (r_i - m) / s, GRPO (Shao et al., 2024, arXiv:2402.03300);
    - `baseline="mean"`, `scale="batch"`: (r_i - m) / batch_spread, Lite PPO (Liu et al., 2025,
      arXiv:2508.08221). Lite PPO is steadier than GRPO if a group's rewards differ little;
    - `baseline="mean"`, `scale="none"`: r_i - m, Dr. GRPO (Liu et al., 2025, arXiv:2503.20783). A
      division would give more weight to questions whose rewards differ little;
    - `baseline="leave_one_out"`: r_i minus the mean of the other n - 1 rewards, RLOO (Ahmadian et
      al., 2024, arXiv:2402.14740). RLOO's advantage before scaling is n / (n - 1) (r_i - m).
      `scale` has the same divisors as with `baseline="mean"`;
    - `baseline="none"`: r_i.

    With a baseline, a group with equal rewards (or with one reward) has the advantage 0 for each
    reward. Rewards within `EQUAL_REWARDS` of one another are equal.
    """
    if settings.baseline == "none":
        return rewards.copy()
    if np.ptp(rewards) <= EQUAL_REWARDS:
        # Rewards that differ only by rounding would give advantages up to 1 if divided by `spread`.
        return np.zeros_like(rewards)
    divisor = {"none": 1.0, "group": spread(rewards), "batch": batch_spread}[settings.scale]
    others = len(rewards) / (len(rewards) - 1) if settings.baseline == "leave_one_out" else 1.0
    advantages: NDArray[np.float64] = (rewards - rewards.mean()) * (others / divisor)
    return advantages


def turn_advantages(
    group: Group, settings: AdvantageSettings, *, batch_spread: float
) -> list[list[NDArray[np.float64]]]:
    """For each trajectory and each turn, the advantages of the sampled tokens, [tokens].

    Without turn rewards, a token's advantage is the advantage of its trajectory: the given
    advantage, or the result of `group_advantages`. With turn rewards, a turn's return is the
    trajectory's reward plus the turn rewards from this turn on. A turn's return is compared with
    the returns of the turns with the same index in the group's other trajectories. If no other
    trajectory has this index and `baseline` is not "none", the turn gets the advantage of its
    trajectory's first return. A turn's `advantage` replaces the computed advantage; a turn's
    `advantages` are added.
    """
    returns = [trajectory.returns for trajectory in group.trajectories]
    whole = group_advantages(
        np.array([each[0] for each in returns], np.float64), settings, batch_spread=batch_spread
    )
    found = [np.full(len(each), whole[t]) for t, each in enumerate(returns)]
    if any(turn.reward for trajectory in group.trajectories for turn in trajectory.turns):
        for k in range(1, max(map(len, returns))):
            having = [t for t, each in enumerate(returns) if len(each) > k]
            compared = group_advantages(
                np.array([returns[t][k] for t in having]), settings, batch_spread=batch_spread
            )
            for t, value in zip(having, compared, strict=True):
                if len(having) > 1 or settings.baseline == "none":
                    found[t][k] = value
    advantages = []
    for t, trajectory in enumerate(group.trajectories):
        own = found[t] if trajectory.advantage is None else [trajectory.advantage] * len(found[t])
        advantages.append(
            [
                np.full(len(turn.token_ids), value if turn.advantage is None else turn.advantage)
                + (np.zeros(1) if turn.advantages is None else np.array(turn.advantages))
                for turn, value in zip(trajectory.turns, own, strict=True)
            ]
        )
    return advantages


def _listed[T](trained: Sequence[T], held_out: Sequence[T], name: str) -> tuple[list[T], list[str]]:
    """All examples or pairs, and their fields in errors."""
    if not trained:
        raise InvalidInput(f"there are no {name}", field=name)
    fields = [f"{name}.{i}" for i in range(len(trained))] + [
        f"held_out.{i}" for i in range(len(held_out))
    ]
    return [*trained, *held_out], fields


def _linked_turns(
    trajectory: Trajectory,
    advantages: Sequence[NDArray[np.float64]],
    vocab_size: int,
    mixture: Mixture | None,
    field: str,
) -> list[LinearSequence]:
    """Joins turns into sequences by the rule in `Trajectory`. Tokens between turns are context."""
    sequences: list[LinearSequence] = []
    for k, turn in enumerate(trajectory.turns):
        both = (turn.prompt_token_ids, turn.token_ids)
        prompt, sampled = (np.array(ids, np.int32) for ids in both)
        check_ids(prompt, vocab_size, f"{field}.turns.{k}.prompt_token_ids")
        check_ids(sampled, vocab_size, f"{field}.turns.{k}.token_ids")
        expert_ids = routed_expert_ids(turn, mixture, f"{field}.turns.{k}.routed_experts")
        tokens, logprobs = np.concatenate([prompt, sampled]), np.array(turn.logprobs, np.float32)
        trained = np.arange(len(prompt), len(tokens), dtype=np.int32)
        step = -1 if turn.policy_step is None else turn.policy_step
        policy_steps = np.full(len(sampled), step, np.int32)
        with np.errstate(over="ignore"):  # values that do not fit float32 are refused after packing
            weights = advantages[k].astype(np.float32)
        if sequences and np.array_equal(prompt[: len(sequences[-1].tokens)], sequences[-1].tokens):
            before = sequences.pop()
            trained = np.concatenate([before.trained, trained])
            logprobs = np.concatenate([before.logprobs, logprobs])
            policy_steps = np.concatenate([before.policy_steps, policy_steps])
            weights = np.concatenate([before.weights, weights])
            expert_ids = joined(before.expert_ids, expert_ids)
        sequences.append(
            LinearSequence.of(
                tokens,
                trained,
                weights=weights,
                logprobs=logprobs,
                policy_steps=policy_steps,
                expert_ids=expert_ids,
            )
        )
    return sequences


def _fit_to_row(
    sequences: list[LinearSequence], packing: PackingSettings, field: str
) -> tuple[list[LinearSequence], bool]:
    """The sequences of one trajectory after `packing.too_long` was applied, and whether the
    sequences were changed. The list is empty if the trajectory is dropped."""
    length = packing.sequence_length
    longest = max(len(sequence.tokens) for sequence in sequences)
    if longest <= length:
        return sequences, False
    if packing.too_long == "refuse":
        remedy = 'raise packing.sequence_length, or set packing.too_long to "truncate" or "drop"'
        raise InvalidInput(f"{longest} tokens don't fit a row of {length}; {remedy}", field=field)
    if packing.too_long == "drop":
        return [], True
    return [cut for sequence in sequences if (cut := sequence.cut(length)) is not None], True


def _write(
    trajectories: list[PackedTrajectory],
    vocab_size: int,
    packing: PackingSettings,
    out: Path,
    batch_size: int | None,
    dropped_groups: int,
    **statistics: Any,
) -> PackedData:
    """Writes the packed directory. Held-out trajectories come last, with `batch` -1."""
    kept: list[PackedTrajectory] = []
    numbers: dict[int, int] = {}  # old -> new number of each group that is kept
    for trajectory in trajectories:
        if trajectory.sequences:
            group = numbers.setdefault(trajectory.group, len(numbers))
            batch = (
                group // batch_size if batch_size and trajectory.batch >= 0 else trajectory.batch
            )
            kept.append(replace(trajectory, group=group, batch=batch))
    dropped = len(trajectories) - len(kept)
    trained = [trajectory for trajectory in kept if trajectory.batch >= 0]
    if not trained:
        reasons = []
        if dropped_groups:
            remedy = "sample more per prompt, take prompts that are neither always solved nor never"
            remedy += ", or set advantage.keep_zero_variance"
            reasons.append(f"{dropped_groups} groups have no variance in their rewards ({remedy})")
        if dropped:
            limit = f"{packing.sequence_length} tokens (raise packing.sequence_length)"
            reasons.append(f"{dropped} trajectories don't fit {limit}")
        raise NothingToLearn(f"nothing is left to train: {'; '.join(reasons)}")
    if not all(np.isfinite(each.weights).all() for one in kept for each in one.sequences) or any(
        abs(trajectory.weight) > MAX_FLOAT32 for trajectory in kept
    ):
        raise InvalidInput(f"packed data in {out}: an advantage is not finite", field="item_weight")
    arrays = pack(kept, packing.sequence_length)
    unshared = sum(
        len(sequence.tokens) for trajectory in trained for sequence in trajectory.sequences
    )
    rows = arrays["row_batch"] >= 0
    return PackedData(
        path="",
        sha256=write_packed(out, arrays, vocab_size=vocab_size),
        num_rows=int(rows.sum()),
        sequence_length=packing.sequence_length,
        num_items=int(np.diff(arrays["item_offsets"])[rows].sum()),
        num_tokens=int(arrays["row_num_tokens"][rows].sum()),
        num_unshared_tokens=unshared,
        num_trajectories=len(trained),
        num_groups=len({trajectory.group for trajectory in trained}),
        num_held_out=len({trajectory.group for trajectory in kept[len(trained) :]}),
        dropped_groups=dropped_groups,
        dropped_trajectories=dropped,
        truncated_trajectories=sum(trajectory.truncated for trajectory in kept),
        **statistics,
    )


def _check_policy_step(step: int | None, base_step: int, most: int | None, field: str) -> None:
    if step is not None and step > base_step:
        raise InvalidInput(
            f"step {step} is newer than the job's base step {base_step}", field=field
        )
    if most is not None and (step is None or base_step - step > most):
        age = (
            "not given"
            if step is None
            else f"{base_step - step} steps older than the job's base step {base_step}"
        )
        raise InvalidInput(
            f"the step that sampled the turn is {age}; max_off_policy_steps is {most}", field=field
        )
