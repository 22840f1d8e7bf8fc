"""The real model's part of `make demo`: `tandem rl` on sums of two numbers from 1 to 9."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import sums
from rich import box
from rich.console import Console
from rich.table import Table

from tandem.client import Tandem
from tandem.client.vllm import vllm_url

EXAMPLES = Path(__file__).parent
RUN = "demo"
SHOWN = 5
"""The number of samples that are shown from before the training, and from after it."""


def fetch(directory: Path) -> str | None:
    """Makes the model in a separate process, because the end of the process frees the memory.
    Returns the reason if the model could not be made, else None."""
    command = [sys.executable, str(EXAMPLES / "smollm2.py"), str(directory)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    return None if made.returncode == 0 else made.stderr.strip()[-2000:]


def configuration(steps: int | None) -> str:
    """The text of `sums_cpu.toml`. If `steps` is not None, `steps` replaces the number of steps in
    the text."""
    text = (EXAMPLES / "sums_cpu.toml").read_text()
    return text if steps is None else re.sub(r"(?m)^steps = \d+", f"steps = {steps}", text)


def train(out: Path, text: str, tell: Callable[[str], object]) -> dict[str, Any]:
    """Trains by `tandem rl` with the configuration `text`. Returns the lines that `tandem rl`
    recorded, and samples of the first and the last step. The function `tell` gets a readable
    sentence for each line."""
    config = out / "sums.toml"  # `tandem rl` writes its files into this directory too
    config.write_text(text)
    settings = tomllib.loads(text)
    last = settings["rl"]["steps"]
    with Tandem() as client:
        client.create_run(**settings["run"])
        client.wait_served(RUN, 0)
    report: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "before": samples(0)}
    command = [sys.executable, "-m", "tandem", "rl", str(config), "--json"]
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    begun, lines = time.monotonic(), []
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    ) as loop:
        assert loop.stdout is not None
        for printed in loop.stdout:
            line = json.loads(printed)
            if "notice" not in line:
                lines.append(line)
                tell(described(line))
    if loop.returncode:
        raise SystemExit(f"tandem rl ended with {loop.returncode}; {config} is its config")
    report |= {"rl_seconds": round(time.monotonic() - begun, 3), "after": samples(last)}
    return report | {
        "evaluations": [line for line in lines if "evaluated" in line],
        "steps": [line for line in lines if "step" in line],
    }


def described(line: dict[str, Any]) -> str:
    """A readable sentence for one line of `tandem rl --json`."""
    if "evaluated" in line:
        return (
            f"evaluated @{line['evaluated']}: reward {line['reward']:.3f} on"
            f" {line['samples']} sums, {line['metrics']['alone']:.0%} answers are a number alone"
        )
    spent = line["seconds"]
    parts = ", ".join(f"{name} {spent[name]:.0f} s" for name in ("sampling", "training", "serving"))
    return f"trained @{line['step']}: reward {line['reward']:.3f} of its rollouts; {parts}"


def samples(step: int) -> list[dict[str, Any]]:
    """Samples answers to the first sums from one step, as in training."""
    headers = {"Authorization": f"Bearer {os.environ['TANDEM_API_KEY']}"}
    url = f"{vllm_url(None)}/v1/chat/completions"
    shown = []
    for a, b in sums.Sums(largest=9).tasks()[:SHOWN]:
        asked = {"model": f"{RUN}@{step}", "messages": sums.question(a, b), "max_tokens": 10}
        answer = httpx.post(url, json=asked, headers=headers, timeout=120, trust_env=False)
        answer.raise_for_status()
        said = answer.json()["choices"][0]["message"]["content"]
        right, _ = sums.judge(said, a + b)
        shown.append({"sum": f"{a} + {b}", "said": said, "reward": float(right)})
    return shown


def show(report: dict[str, Any], console: Console) -> None:
    """Prints samples from before and after the training, and the evaluations."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Answer with the number only.")
    for column in ("sum", "before", "reward", "after", "reward"):
        table.add_column(column)
    for before, after in zip(report["before"], report["after"], strict=True):
        cells = [before["sum"]]
        for one in (before, after):
            cells += [repr(one["said"]), f"{one['reward']:g}"]
        table.add_row(*cells)
    console.print(table)
    first, *_, last = report["evaluations"]
    console.print(
        f"mean reward of {last['samples']} sums: [bold]{first['reward']:.3f}[/bold] before,"
        f" [bold]{last['reward']:.3f}[/bold] after {last['evaluated']} steps"
        " (1 for the right number)"
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws the reward against the step: the reward of the rollouts that trained each step, and the
    reward of the evaluations."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [line["step"] - 1 for line in report["steps"]],
        [line["reward"] for line in report["steps"]],
        marker="o",
        label="mean reward of the rollouts",
    )
    evaluations = report["evaluations"]
    axes.scatter(
        [line["evaluated"] for line in evaluations],
        [line["reward"] for line in evaluations],
        marker="*",
        s=160,
        color="tab:orange",
        zorder=3,
        label=f"evaluation on {evaluations[0]['samples']} sums",
    )
    axes.set(
        xlabel="policy (step)",
        ylabel="reward",
        ylim=(0, 1.03),
        title=f"{report['model']}: sums, 1 for the right number",
    )
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
