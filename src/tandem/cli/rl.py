"""`tandem rl`: train a run by RL with an environment of one's own."""

import asyncio
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from tandem.cli.common import Json, err, out, show_line
from tandem.client import AsyncTandem
from tandem.client.rl.config import Config
from tandem.client.rl.environment import Environment
from tandem.client.rl.loop import Loop
from tandem.client.rl.record import Record
from tandem.client.rl.sampler import PATIENCE, open_vllm
from tandem.client.rl.view import panel, text_line
from tandem.client.toml_file import read_toml


def rl(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file (docs/rl.md).")],
    state: Annotated[Path | None, typer.Option(help="The state file.  \\[default: <CONFIG>.state.json]")] = None,
    json: Json = False,
) -> None:
    """Train a run by RL: roll out an environment's groups, train on them, sample from the new step, and again.

    The same command goes on after Ctrl-C or a kill. OPENAI_BASE_URL is vLLM's address (http://127.0.0.1:8000/v1).
    """
    try:
        asyncio.run(_run(config, state or config.with_suffix(".state.json"), json))
    except KeyboardInterrupt:
        err.print(f"Stopped; a submitted job goes on. The same command continues: tandem rl {config}", soft_wrap=True)
        raise


async def _run(config: Path, state: Path, json: bool) -> None:
    settings = read_toml(config, Config)
    sys.path.insert(0, str(config.parent.resolve()))
    sections = [(section, f"rl.environment.{i}") for i, section in enumerate(settings.rl.environment)]
    if settings.eval and settings.eval.environment:
        sections.append((settings.eval.environment, "eval.environment"))
    environments = [Environment(section, settings.run.seed, where) for section, where in sections]
    live = out.is_terminal and not json

    def tell(line: dict[str, Any]) -> None:
        if json:
            show_line(line)
        elif not live:
            print(text_line(line), flush=True)

    async with AsyncTandem(patience=PATIENCE) as tandem, open_vllm() as vllm:
        record = Record(config.with_suffix(".metrics.jsonl"), tell)
        loop = Loop(settings, tandem, vllm, environments, state, record)
        with Live(get_renderable=lambda: panel(loop), console=out, refresh_per_second=2) if live else nullcontext():
            await loop.run()
