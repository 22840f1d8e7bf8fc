"""Draws the evaluations of `tandem rl` and of TRL's GRPO against the wall clock.

python docs/source/peers.py docs/peers.png     (reads bench/results/peers.json)
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

ROWS = Path(__file__).parents[2] / "bench/results/peers.json"


def main(picture: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in json.loads(ROWS.read_text())["rows"]:
        evaluations = row["evaluations"] if row.get("drawn", True) else []
        if evaluations:
            name = f"{row['peer']}, {row['GPUs']} x H200"
            axes.plot(
                [one["at"] for one in evaluations],
                [one["reward"] for one in evaluations],
                "*-",
                markersize=9,
                label=f"{name}: {row['seconds per step']:.1f} s per step",
            )
            for one in evaluations[1:]:
                axes.annotate(
                    one["step"],
                    (one["at"], one["reward"]),
                    xytext=(0, 7),
                    textcoords="offset points",
                    fontsize=7,
                    ha="center",
                )
    axes.set(
        xlabel="seconds since the first sample",
        ylabel="reward of 200 other sums",
        ylim=(0, 1.03),
        title="SmolLM2-135M-Instruct on sums of 10 to 99 (numbers: steps)",
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
