"""Draws the rewards of `tandem rl` runs against the step: those of evaluations and of rollouts.

python docs/source/curves.py docs/sums.png "SmolLM2 on sums" sums.metrics.jsonl ...
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt


def main(picture: str, title: str, *files: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, file in enumerate(files):
        lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
        steps = [line for line in lines if "step" in line]
        evaluations = [line for line in lines if "evaluated" in line]
        label = Path(file).name.removesuffix(".metrics.jsonl")
        color = f"C{number}"
        axes.plot(
            [line["step"] - 1 for line in steps],
            [line["reward"] for line in steps],
            color=color,
            linewidth=0.9,
            label=f"{label}: all rollouts of a step",
        )
        axes.plot(
            [line["evaluated"] for line in evaluations],
            [line["reward"] for line in evaluations],
            "*",
            color=color,
            markersize=11,
            label=f"{label}: evaluation of {evaluations[0]['samples']}",
        )
    axes.set(xlabel="policy (step)", ylabel="reward", ylim=(0, 1.03), title=title)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
