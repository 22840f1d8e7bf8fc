"""Packing groups of trajectories into rows: seconds, and slots with and without shared prefixes."""

import tempfile
import time
from pathlib import Path

import numpy as np

from bench.report import report
from tandem.data.inputs import AdvantageSettings, Group, PackingSettings, Trajectory, Turn
from tandem.data.prepare import prepare_rl

# groups, trajectories per group, tokens of a prompt, mean tokens of a completion, row length
SHAPES = [(64, 16, 512, 768, 8192), (16, 64, 1000, 2000, 16384), (1000, 4, 40, 20, 2048)]


def groups(shape: tuple[int, int, int, int, int], seed: int = 0) -> list[Group]:
    """Random tokens; each group's trajectories share a prompt."""
    rng = np.random.default_rng(seed)
    count, size, prompt_length, mean, _ = shape
    made = []
    for _ in range(count):
        prompt = rng.integers(0, 150_000, prompt_length).tolist()
        members = []
        for _ in range(size):
            ids = rng.integers(0, 150_000, max(1, int(rng.uniform(0.5, 1.5) * mean))).tolist()
            turn = Turn(prompt_token_ids=prompt, token_ids=ids, logprobs=[-1.0] * len(ids))
            members.append(Trajectory(turns=[turn], reward=float(rng.normal())))
        made.append(Group(trajectories=members))
    return made


def main() -> None:
    """Pack each shape once."""
    rows = []
    for shape in SHAPES:
        made = groups(shape)
        with tempfile.TemporaryDirectory() as directory:
            begin = time.perf_counter()
            packed = prepare_rl(
                made,
                vocab_size=151_936,
                advantage=AdvantageSettings(),
                packing=PackingSettings(sequence_length=shape[4]),
                out=Path(directory) / "data",
            )
            seconds = time.perf_counter() - begin
        rows.append(
            {
                "groups x size": f"{shape[0]} x {shape[1]}",
                "row length": shape[4],
                "tokens unshared": packed.num_unshared_tokens,
                "tokens stored": packed.num_tokens,
                "rows": packed.num_rows,
                "rows filled": packed.num_tokens / (packed.num_rows * shape[4]),
                "seconds": seconds,
            }
        )
    report("packing", "Packing with shared prefixes", rows)


if __name__ == "__main__":
    main()
