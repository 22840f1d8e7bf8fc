"""`tandem rl`: train a run by RL with an environment of one's own. Shows a live panel if the output
is a terminal; if not, prints a line per step."""

import sys
from collections import Counter
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from tandem.cli.common import Json, err, out, read_toml, show, show_line
from tandem.client import AsyncTandem
from tandem.client.rl.config import Config
from tandem.client.rl.distill import Teacher, open_teacher
from tandem.client.rl.environment import Environment
from tandem.client.rl.loop import Loop
from tandem.client.rl.record import LEFT_OUT, RunRecord
from tandem.client.rl.sampler import PATIENCE
from tandem.client.rl.samples import find_samples, read_samples, said, sample, samples_file, shown
from tandem.client.rl.watch import run_to_the_end
from tandem.client.vllm import open_vllm
from tandem.errors import InvalidInput, StepRefused
from tandem.system.open_files import allow_many_open_files


def rl(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The TOML file (docs/rl.md).")],
    state: Annotated[
        Path | None, typer.Option(help="The state file.  \\[default: <CONFIG>.state.json]")
    ] = None,
    from_served: Annotated[
        bool,
        typer.Option(
            "--from-served", help="If a step was refused, discard it, and go on before it."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Train a run by RL: roll out an environment's groups, train on the groups, and repeat with the
    new step.

    After Ctrl-C or a kill, the same command continues the training. TANDEM_INFERENCE_URL is vLLM's
    address (http://127.0.0.1:8000). Exit status 6: the publisher refused a trained step, so vLLM
    does not serve the step. After a restart of vLLM, or earlier, the publisher tries the step
    again. Once vLLM serves the step, the same command continues. With --from-served, the same
    command continues from the step that vLLM serves.
    """

    def stopped() -> None:
        out.show_cursor(True)
        err.print(
            f"Stopped; a submitted job goes on. The same command continues: tandem rl {config}",
            soft_wrap=True,
        )

    allow_many_open_files()  # each rollout that samples holds a connection
    try:
        run_to_the_end(
            _run(config, state or config.with_suffix(".state.json"), json, from_served), stopped
        )
    except StepRefused as error:
        goes_on = "The same command goes on once the refused step is served"
        again = (
            f"{error.message}. vLLM serves no step of the run. {goes_on}"
            if error.served is None
            else f"{error.message}. vLLM serves step {error.served}. {goes_on}; tandem rl {config}"
            f" --from-served discards it, and goes on from step {error.served}"
        )
        raise StepRefused(again, served=error.served) from error
    except KeyboardInterrupt:
        stopped()
        raise


def samples(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run's name, or the TOML file of its training.")
    ],
    step: Annotated[
        int | None,
        typer.Option(help="The step that sampled.  \\[default: the newest that did]"),
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="How many at most, the last ones.")] = 20,
    state: Annotated[
        Path | None,
        typer.Option(help="The state file of the training.  \\[default: found in this directory]"),
    ] = None,
    json: Json = False,
) -> None:
    """List what a step sampled, with rewards. `tandem rl` keeps the samples of the last 1,000
    rollouts beside its state file."""
    if state is None and Path(run).suffix == ".toml":
        state = Path(run).with_suffix(".state.json")
    file = samples_file(state) if state else find_samples(run, Path())
    found = read_samples(file) if file else []
    if not found:
        where = file or f"a file *.samples.jsonl of run {run!r} in this directory"
        problem = f"{where} has no samples; name the training's TOML file, or its --state"
        raise InvalidInput(problem, field="RUN")
    wanted = found[-1]["step"] if step is None else step
    chosen = [one for one in found if one["step"] == wanted]
    if not chosen:
        steps = sorted({one["step"] for one in found})
        problem = f"no samples of step {wanted} are kept, only of {steps[0]} to {steps[-1]}"
        raise InvalidInput(problem, field="--step")
    rewards = Counter(f"{one['reward']:g}" for one in chosen)
    counts = ", ".join(f"{reward} ({count} times)" for reward, count in rewards.most_common(10))
    if json:
        show(chosen[-last:], json, str)
        return
    print(f"{chosen[-1]['run']}@{wanted} sampled {len(chosen)} rollouts; the rewards: {counts}")
    for one in chosen[-last:]:
        print(f"\n--- task {one['task']}, reward {one['reward']:g}\n{said(one)}")


class _Named(TyperGroup):
    """The command group: `tandem rl CONFIG` means `tandem rl train CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["train", *args])


app = typer.Typer(
    cls=_Named,
    no_args_is_help=True,
    help="Train a run by RL with an environment of your own ([bold]tandem rl CONFIG[/bold]); see"
    " what it samples.",
)
app.command("train")(rl)
app.command("samples")(samples)


async def _run(config: Path, state: Path, json: bool, from_served: bool) -> None:
    settings = read_toml(config, Config)
    sys.path.insert(0, str(config.parent.resolve()))
    sections = [
        (section, f"rl.environment.{i}") for i, section in enumerate(settings.rl.environment)
    ]
    for i, each in enumerate(settings.eval):
        if each.environment:
            where = f"eval.{i}.environment" if len(settings.eval) > 1 else "eval.environment"
            sections.append((each.environment, where))
    environments = [Environment(section, settings.run.seed, where) for section, where in sections]
    live = out.is_terminal and not json

    def tell(line: dict[str, Any]) -> None:
        if json:
            show_line(line)
        elif not live:
            print(text_line(line), flush=True)

    async with AsyncExitStack() as opened:
        tandem = await opened.enter_async_context(AsyncTandem(patience=PATIENCE))
        vllm = await opened.enter_async_context(open_vllm())
        teacher: Teacher | None = None
        if settings.rl.distill:
            teacher = Teacher(settings.rl.distill, await opened.enter_async_context(open_teacher()))
            await teacher.raise_unless_served()
        record = RunRecord(config.with_suffix(".metrics.jsonl"), tell)
        loop = Loop(
            settings,
            tandem,
            vllm,
            environments,
            state,
            record,
            from_served=from_served,
            teacher=teacher,
        )
        with (
            Live(get_renderable=lambda: panel(loop), console=out, refresh_per_second=2)
            if live
            else nullcontext()
        ):
            await loop.run()
    if not json:
        best = loop.evaluations.best()
        kept = (
            f" The best step by evaluation is {settings.run.name}@{best[0]} ({best[1]:.3f}); its"
            " checkpoint is pinned."
            if best
            else ""
        )
        out.print(
            f"vLLM serves {settings.run.name}@{loop.last}.{kept} A larger rl.steps goes on from"
            " there."
        )


def sparkline(values: list[float], width: int = 50) -> str:
    """The last `width` values as bars between their minimum and maximum, followed by the last
    value."""
    shown = values[-width:]
    low, span = min(shown), (max(shown) - min(shown)) or 1.0
    return (
        "".join("▁▂▃▄▅▆▇█"[round((value - low) / span * 7)] for value in shown)
        + f" {values[-1]:.3f}"
    )


def text_line(line: dict[str, Any]) -> str:
    """A line of the training's record as text for people."""
    sampled = line.get("last") or [line["sample"]] if "sample" in line else []
    if "notice" in line:
        return f"{line['notice']}{shown(sampled)}"
    if "evaluated" in line:
        reward = "none" if line["reward"] is None else f"{line['reward']:.3f}"
        passed = "".join(
            f", pass@{k} {value:.3f}"
            for k, value in line.get("pass_at", {}).items()
            if value is not None
        )
        alike = ""
        if "rewards" in line:
            counts = ", ".join(
                f"{value} ({count} times)" for value, count in line["rewards"].items()
            )
            alike = f"; the rewards: {counts}; the answers are {line['texts']} texts"
        return (
            f"evaluated @{line['evaluated']}{f' ({named})' if (named := line.get('name')) else ''}:"
            f" reward {reward} of {line['samples']} samples, {line['failed']} failed"
            f"{passed}{alike}{shown(sampled)}"
        )
    behind = line["off_policy_steps"]
    parts = [
        f"reward {line['reward']:.3f}",
        f"off policy {behind['mean']:.2f}, at most {behind['max']} steps",
    ]
    parts += [f"{name} {seconds:.1f} s" for name, seconds in line["seconds"].items()]
    parts += [f"{count} groups {why}" for why, count in line["left_out"].items() if count]
    for what, reasons in line.get("lost", {}).items():
        parts += [f"{count} rollouts {what} ({reason})" for reason, count in reasons.items()]
    parts += [f"{line['too_long']} rollouts longer than a row"] if line.get("too_long") else []
    error = f"; {line['errors']} errors, the last: {line['last_error']}" if line["errors"] else ""
    numbers = f"@{line['step']}: {', '.join(parts)}, {line['tokens']} tokens{error}"
    return numbers + shown(sampled)


def panel(loop: Loop) -> RenderableType:
    """The live panel with the loop's current state."""
    steps = [line for line in loop.record.lines if "step" in line]
    evaluated = [
        line["reward"]
        for line in loop.record.lines
        if "evaluated" in line and line["reward"] is not None
    ]
    table = Table.grid(padding=(0, 2))
    if steps:
        table.add_row("reward", sparkline([line["reward"] for line in steps]))
        table.add_row(
            "off policy", f"{sparkline([line['off_policy_steps']['mean'] for line in steps])} steps"
        )
        seconds = steps[-1]["seconds"].items()
        table.add_row("time", ", ".join(f"{name} {value:.1f} s" for name, value in seconds))
    if evaluated:
        table.add_row("evaluated", sparkline(evaluated))
    table.add_row(
        "groups",
        f"{len(loop.running)} of {loop.groups_in_flight} in flight, {len(loop.ready)} ready",
    )
    left_out = {
        why: loop.counts[why] + sum(line["left_out"][why] for line in steps) for why in LEFT_OUT
    }
    table.add_row("left out", ", ".join(f"{count} groups {why}" for why, count in left_out.items()))
    if too_long := sum(line.get("too_long", 0) for line in steps):
        table.add_row(
            "too long", f"{too_long} rollouts longer than a row ({loop.config.rl.packing.too_long})"
        )
    if loop.awaited is not None:
        table.add_row("waits", f"until vLLM serves {loop.config.run.name}@{loop.awaited}")
    parts: list[RenderableType] = [table]
    if loop.error:
        parts.append(Text(f"last error: {loop.error[:300]}", style="red"))
    if loop.sample:
        text = said(sample(loop.sample))[-800:]
        parts.append(Panel(Text(text), title=f"last sample, reward {loop.sample.reward:g}"))
    return Panel(
        Group(*parts),
        title=f"{loop.config.run.name}@{loop.base} of {loop.last}, served @{loop.served}",
    )
