"""`tandem data`: looks at a file of examples before it is trained."""

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import track
from rich.text import Text

from tandem.cli.common import Json, connect, details, err, out, show, table
from tandem.cli.data_page import bins, page
from tandem.data.examples import PreferencePair, Rendering, SFTExample
from tandem.data.formats import Examples, open_examples
from tandem.errors import InvalidInput

app = typer.Typer(help="Look at data before it is trained.", no_args_is_help=True)
_SLICE = 200
type _Render = Callable[[list[Any]], list[Rendering]]


@dataclass
class Report:
    """What was found in a file. `lengths`: tokens of each example's longest sequence; `shown`: (place, rendering)."""

    examples: Examples
    row: int
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    broken: list[tuple[str, str]] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    shown: list[tuple[str, Rendering]] = field(default_factory=list)
    tokens: int = 0
    trained: int = 0

    def facts(self) -> dict[str, object]:
        """Names and values, for people; what is not there is None."""
        ordered = sorted(self.lengths)
        at = [ordered[int(share * (len(ordered) - 1))] for share in (0, 0.5, 0.95, 1)] if ordered else []
        long = (
            f"{len(self.too_long)} don't fit a row of {self.row} tokens: {_first(self.too_long)}. Training refuses "
            'them; raise packing.sequence_length, or set packing.too_long to "drop" or "truncate"'
        )
        return {
            "records": len(self.examples),
            "format": self.examples.format,
            "broken": len(self.broken) or None,
            "tokens": self.tokens,
            "trained tokens": self.trained,
            "tokens of an example": f"{at[0]} to {at[3]}, median {at[1]}, 95 % up to {at[2]}" if at else None,
            "too long": long if self.too_long else None,
            "duplicates": f"{len(self.duplicates)}: {_first(self.duplicates)}" if self.duplicates else None,
            "columns left out": ", ".join(sorted(self.examples.ignored)) or None,
        }


def _first(places: list[str]) -> str:
    return ", ".join(places[:3]) + (", …" if len(places) > 3 else "")


@app.callback()
def _data() -> None:
    pass


@app.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON lines, a JSON array, Parquet, or a saved dataset.")
    ],
    format: Annotated[str, typer.Option(help="auto, or the format's name (docs/data.md)")] = "auto",  # noqa: A002
    tokenizer: Annotated[
        str | None, typer.Option(help="A directory with a tokenizer, to check without a controller.")
    ] = None,
    sequence_length: Annotated[int, typer.Option(help="Slots of a row, as in packing.sequence_length.")] = 2048,
    examples: Annotated[int, typer.Option("--show", help="How many examples to show.")] = 3,
    html: Annotated[Path | None, typer.Option(help="Write a page with what is found and up to 100 examples.")] = None,
    json: Json = False,
) -> None:
    """Show examples or pairs as they would be trained, with the trained tokens marked; list what is wrong.

    Exit status: 1 if a record is broken.
    """
    report = Report(open_examples(file, format), sequence_length)
    render = _offline(tokenizer) if tokenizer else _by_controller()
    look(report, render, max(examples, 100 if html else 0), quiet=json or not err.is_terminal)
    for place, problem in report.broken:
        err.print(f"[bold red]broken[/bold red]: [bold]{escape(place)}[/bold]: {escape(problem)}", soft_wrap=True)
    if html:
        html.write_text(page(file.name, report.facts(), report.lengths, report.broken, report.shown), encoding="utf-8")
    shown = report.shown[:examples]
    lists = {name: getattr(report, name) for name in ("broken", "too_long", "duplicates")}
    show(report.facts() | lists | {"shown": shown}, json, lambda _: _print(report, shown))
    if report.broken:
        raise typer.Exit(1)


def look(report: Report, render: _Render, shown: int, *, quiet: bool) -> None:
    """Fill in the report, slice by slice, with `shown` examples."""
    seen: dict[bytes, str] = {}
    slices = list(batched(range(len(report.examples)), _SLICE))
    for indices in track(slices, "checking", console=err, disable=quiet, transient=True):
        parsed: list[tuple[str, SFTExample | PreferencePair]] = []
        for i in indices:
            try:
                parsed.append(report.examples.parse(i))
            except InvalidInput as error:
                place, _, problem = str(error).partition(": ")
                report.broken.append((place, problem))
        for (place, example), rendering in zip(parsed, render([one for _, one in parsed]), strict=True):
            if rendering.error is not None:
                where = ".".join((rendering.field or "").split(".")[2:])
                report.broken.append((place, f"{where}: {rendering.error}" if where else rendering.error))
                continue
            report.tokens += sum(rendering.lengths)
            report.trained += rendering.trained
            report.lengths.append(longest := max(rendering.lengths))
            if longest > report.row:
                report.too_long.append(f"{place} ({longest})")
            same = seen.setdefault(hashlib.blake2b(example.model_dump_json().encode(), digest_size=8).digest(), place)
            if same != place:
                report.duplicates.append(f"{place} (as {same})")
            if len(report.shown) < shown:
                report.shown.append((place, rendering))


def _by_controller() -> _Render:
    tandem = connect()
    return lambda ones: tandem.render(*_by_kind(ones)) if ones else []


def _offline(directory: str) -> _Render:
    try:
        from tandem.data.chat_template import load_tokenizer
        from tandem.data.preview import previews

        tokenizer = load_tokenizer(directory)
    except ImportError as error:
        problem = f"checking with a tokenizer needs {error.name}: pip install 'tandem-rl[data]'"
        raise InvalidInput(problem, field="--tokenizer") from error
    except InvalidInput as error:
        raise InvalidInput(error.message, field="--tokenizer") from error
    return lambda ones: previews(tokenizer, *_by_kind(ones))


def _by_kind(ones: list[Any]) -> tuple[list[SFTExample], list[PreferencePair]]:
    return (ones, []) if ones and isinstance(ones[0], SFTExample) else ([], ones)


def _print(report: Report, shown: list[tuple[str, Rendering]]) -> None:
    for place, rendering in shown:
        out.rule(f"{escape(place)} · {' + '.join(map(str, rendering.lengths))} tokens, {rendering.trained} trained")
        for parts in rendering.parts:
            styles = (("dim", "bold green", "bold red")[(weight > 0) + 2 * (weight < 0)] for _, weight in parts)
            # Without colours, brackets mark what is trained.
            texts = (text if out.is_terminal or not weight else f"⟦{text}⟧" for text, weight in parts)
            out.print(Text.assemble(*zip(texts, styles, strict=True)))
    out.rule("[bold green]⟦trained⟧[/bold green] · [dim]context[/dim]" if shown else "")
    counted = bins(report.lengths)
    most = max((count for _, count in counted), default=1)
    rows = [(f"≤ {limit}", count, "█" * round(30 * count / most)) for limit, count in counted]
    out.print(table("Tokens of an example", ["tokens#", "examples#", ""], rows))
    out.print(details(report.examples.name, list(report.facts().items())))
