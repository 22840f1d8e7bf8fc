"""Samples for people: the texts of rollouts, a file of the last rollouts, and what the rollouts of
groups with equal rewards have in common."""

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.client import Trajectory
from tandem.spool.fs import write_atomic

KEPT = 1000
"""The number of rollouts that the file keeps. The file grows to twice this number before its older
half is removed."""
# A sample has at most _MESSAGES messages, and at most _CHARACTERS characters of each message.
_MESSAGES, _CHARACTERS = 12, 2000


def sample(trajectory: Trajectory, **more: Any) -> dict[str, Any]:
    """The trajectory's reward and texts, cut to a length that people read. `more`: further keys of
    the result, such as the task."""
    messages = trajectory.messages or []
    if len(messages) > _MESSAGES:
        left_out = f"... {len(messages) - _MESSAGES} messages ..."
        messages = [*messages[:2], {"content": left_out}, *messages[2 - _MESSAGES :]]
    return {
        **more,
        "step": trajectory.turns[-1].policy_step,
        "reward": trajectory.reward,
        "metrics": trajectory.metrics,
        "tokens": sum(len(turn.token_ids) for turn in trajectory.turns),
        "messages": [{"role": str(one.get("role")), "content": _text(one)} for one in messages],
    }


def _text(message: Mapping[str, Any]) -> str:
    content, calls = message.get("content"), message.get("tool_calls")
    parts = (
        [content if isinstance(content, str) else json.dumps(content, default=str)]
        if content
        else []
    )
    text = "\n".join([*parts, *([json.dumps(calls, default=str)] if calls else [])])
    half = _CHARACTERS // 2
    return text if len(text) <= _CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def said(sampled: Mapping[str, Any]) -> str:
    """The texts of a `sample`, without characters that control a terminal."""
    lines = (f"{one['role']}: {one['content']}" for one in sampled["messages"])
    text = "\n".join(lines) or f"({sampled['tokens']} tokens, without messages)"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shown(samples: Iterable[Mapping[str, Any]]) -> str:
    """A text with the samples, one below another. Each sample's reward is on the line above the
    sample."""
    return "".join(f"\n--- reward {one['reward']:g}\n{said(one)}" for one in samples)


def same_text(group: Iterable[Trajectory]) -> bool:
    """Whether all trajectories sampled the same tokens."""
    return len({tuple(tuple(turn.token_ids) for turn in one.turns) for one in group}) == 1


class Alike:
    """Counts the rewards of groups' trajectories, and the groups whose answers are all the same
    text. Keeps the last three samples."""

    def __init__(self, groups: Iterable[Sequence[Trajectory]] = ()) -> None:
        self.rewards: Counter[float] = Counter()
        self.groups = self.same_text = 0
        self.last: deque[dict[str, Any]] = deque(maxlen=3)
        for group in groups:
            self.add(group)

    def add(self, group: Sequence[Trajectory]) -> None:
        self.groups, self.same_text = self.groups + 1, self.same_text + same_text(group)
        self.rewards.update(trajectory.reward for trajectory in group)
        self.last.extend(map(sample, group[-3:]))

    def counts(self) -> dict[str, int]:
        """How often each of the ten most frequent rewards was given."""
        return {f"{reward:g}": count for reward, count in self.rewards.most_common(10)}

    def told(self) -> str:
        """A text with the rewards' counts, the number of groups whose answers are all equal, and
        the last samples."""
        counts = ", ".join(f"{reward} ({count} times)" for reward, count in self.counts().items())
        return (
            f"The rewards: {counts}. In {self.same_text} of {self.groups} groups all answers are"
            f" the same text, in {self.groups - self.same_text} they differ. The last samples:"
            f"{shown(self.last)}"
        )


def samples_file(state: Path) -> Path:
    """The path of the file of samples, which is in the directory of the file `state`."""
    return state.with_name(
        f"{state.name.removesuffix('.json').removesuffix('.state')}.samples.jsonl"
    )


def find_samples(run: str, directory: Path) -> Path | None:
    """The newest file in the directory with samples of the run `run`."""
    files = sorted(directory.glob("*.samples.jsonl"), key=lambda file: -file.stat().st_mtime)
    return next((file for file in files if any(s["run"] == run for s in read_samples(file))), None)


def read_samples(file: Path) -> list[dict[str, Any]]:
    """The last samples, the oldest first. A line that a crash has damaged is left out."""
    found: deque[dict[str, Any]] = deque(maxlen=KEPT)
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            one = json.loads(line)
        except ValueError:
            continue
        if isinstance(one, dict) and {"run", "step", "reward", "messages"} <= one.keys():
            found.append(one)
    return list(found)


class SampleFile:
    """The file of samples. Only one process writes the file. A kill loses at most the sample that
    was being added."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._replace(read_samples(file))

    def add(self, samples: Sequence[Mapping[str, Any]]) -> None:
        with self._file.open("ab") as file:
            file.write(b"".join(map(_line, samples)))
        self._lines += len(samples)
        if self._lines > 2 * KEPT:
            self._replace(read_samples(self._file))

    def _replace(self, samples: Sequence[Mapping[str, Any]]) -> None:
        if samples:
            write_atomic(self._file, b"".join(map(_line, samples)))
        self._lines = len(samples)


def _line(one: Mapping[str, Any]) -> bytes:
    return json.dumps(one).encode() + b"\n"
