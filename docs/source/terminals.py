"""`python -m docs.source.terminals` makes pictures of a terminal's content in docs/pictures/.

live.svg          the view of `tandem rl` at the end of `make demo`, from the lines that it recorded
data-check.svg    `tandem data check` of examples/data/sums.jsonl, with the demo's tiny model
memory.svg        `tandem memory` of an RL job of the volume in tests/releases
"""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from tandem.cli.jobs import memory_report
from tandem.cli.rl import panel
from tandem.client.memory import by_attempt
from tandem.client.rl.config import Config
from tandem.spool import Spool

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
RECORD = Path(__file__).parent / "recorded/demo.jsonl"
VOLUME = ROOT / "tests/releases/volume-0.1.0.tar.xz"
CONFIG = "examples/sums_cpu.toml"
WIDTH = 92
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The CSS rules by which a page would load rich's fonts from another host."""


def picture(name: str, title: str, shown: RenderableType) -> str:
    """The content of a terminal of WIDTH columns, as an SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    return FONTS.sub("", console.export_svg(title=title, unique_id=name))


def live() -> str:
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    last = lines.pop()["last"]
    newest = max(line["step"] for line in lines if "step" in line)
    turns = [SimpleNamespace(policy_step=last["step"], token_ids=range(last["tokens"]))]
    loop: Any = SimpleNamespace(
        config=Config.model_validate(tomllib.loads((ROOT / CONFIG).read_text())),
        record=SimpleNamespace(lines=lines),
        # The RL loop has ended: no rollout runs, and the loop waits for no step.
        running={},
        ready=[],
        counts=Counter(),
        awaited=None,
        error=None,
        sample=SimpleNamespace(
            turns=turns, **{k: last[k] for k in ("messages", "reward", "metrics")}
        ),
        base=newest,
        last=newest,
        served=newest,
    )
    loop.groups_in_flight = (
        loop.config.rl.max_off_policy_steps + 1
    ) * loop.config.rl.groups_per_step
    return picture("live", f"tandem rl {CONFIG}", panel(loop))


def data_check() -> str:
    with tempfile.TemporaryDirectory() as directory:
        model = f"{directory}/tiny"
        make = [sys.executable, ROOT / "examples/tiny_model.py", model]
        subprocess.run(make, stdout=subprocess.DEVNULL, check=True)
        words = ("data", "check", "examples/data/sums.jsonl", "--show", "2")
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *words, "--tokenizer", model],
            env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    return picture("data-check", f"tandem {' '.join(words)}", Text.from_ansi(done.stdout.rstrip()))


def memory() -> str:
    job = "main-rl"
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(VOLUME) as archive:
            archive.extractall(directory, filter="data")
        attempts = by_attempt(Spool(Path(directory)).events.read(job))
    return picture("memory", f"tandem memory {job}", memory_report(job, attempts))


TERMINALS: dict[str, Callable[[], str]] = {
    "live": live,
    "data-check": data_check,
    "memory": memory,
}


def main() -> None:
    for name, draw in TERMINALS.items():
        (PICTURES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
