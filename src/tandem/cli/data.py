"""`tandem data`: shows how a file of examples would be trained, and lists its mistakes."""

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from itertools import batched
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.text import Text

from tandem.cli.common import Json, data_extra, details, err, make_client, out, show, table
from tandem.cli.train import apply_setting
from tandem.data.examples import Rendering, SFTExample
from tandem.data.formats import Examples
from tandem.errors import InvalidInput, UnknownArchitecture, Unreachable
from tandem.families.registry import read_arch

app = typer.Typer(help="Look at data before it is trained.", no_args_is_help=True)
_SLICE, _ON_PAGE = 200, 100
_AS_CONTROL = (
    "which the tokenizer reads as control tokens, as vLLM does; correct them, or leave the record"
    " out"
)
_THINK = (
    "give their reasoning, or train without thoughts: --set chat_template_kwargs.NAME=false, with"
    " the template's name for it (Qwen3's: enable_thinking), here, in training and in sampling"
)
_NULLS = (
    ". Arrow has nulls for keys that other rows have, so those in calls and tools are left out;"
    " store them as JSON text where they mean something"
)
_DATE = ", which the chat template prints; training prints the day on which its run was made"
_NO_PLACE = ". The chat template has no place for it, so it is not trained"
type _Render = Callable[[list[Any]], list[Rendering]]


@app.callback()
def _data() -> None:
    pass


@app.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSON lines, a JSON array, Parquet, a saved dataset."),
    ],
    format: Annotated[  # noqa: A002
        str, typer.Option(help="auto, or the format's name (docs/data.md).")
    ] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="A model's directory or hub name: no controller is asked.")
    ] = None,
    sequence_length: Annotated[
        int, typer.Option(min=2, help="Tokens of a row, as of `tandem train`.")
    ] = 2048,
    examples: Annotated[int, typer.Option("--show", min=0, help="How many examples to show.")] = 3,
    html: Annotated[
        Path | None, typer.Option(help=f"Write a page with up to {_ON_PAGE} examples.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="As of `tandem train`: chat_template_kwargs.NAME=VALUE; repeatable.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse control tokens in the texts of messages.")
    ] = False,
    json: Json = False,
) -> None:
    """Show examples or pairs as they would be trained, with the trained tokens marked; list what is
    wrong.

    Exit status: 1 if a record is broken.
    """
    data = Examples(file, format, template_kwargs=_template_kwargs(setting or []))
    render = _offline(tokenizer) if tokenizer else _by_controller()
    tally = _Tally(sequence_length, strict, most=max(examples, _ON_PAGE if html else 0))
    slices = list(batched(range(len(data)), _SLICE))
    for indices in track(
        slices, "checking", console=err, disable=json or not err.is_terminal, transient=True
    ):
        for place, example, rendering in _rendered(data.parse, indices, render):
            tally.add(place, example, rendering)
    broken, shown = tally.broken, tally.shown
    if tally.turns and tally.turns == tally.endless_turns:
        broken.append((data.name, str(tally.endless)))
    facts = tally.facts(data)
    if html:
        page = _page(data.name, facts, tally.lengths, broken, shown)
        html.write_text(page, encoding="utf-8", errors="backslashreplace")
    del shown[examples:]
    if json:
        lists = {
            "broken": broken,
            "too_long": tally.too_long,
            "duplicates": tally.duplicates,
            "shown": shown,
        }
        show(facts | lists, json, str)
    else:
        _print(out, shown)
        _summarise(out, data.name, facts, tally.lengths)
    _list(err, broken)
    if broken:
        raise typer.Exit(1)


class _Tally:
    """Counts and remarks about all records. `most`: the number of records that are kept to be
    shown."""

    def __init__(self, sequence_length: int, strict: bool, most: int) -> None:
        self._sequence_length, self._strict, self._most = sequence_length, strict, most
        self._seen: dict[bytes, str] = {}
        self.lengths, self.trained = array("Q"), 0
        self.turns = self.endless_turns = self.empty_thoughts = 0
        self.endless: str | None = None
        self.control_tokens = Counter[str]()
        self.broken: list[tuple[str, str]] = []
        self.shown: list[tuple[str, Rendering]] = []
        self.too_long: list[str] = []
        self.duplicates: list[str] = []
        # Feature of records, such as "empty_thoughts" -> the places of the records with this
        # feature.
        self.places = defaultdict[str, list[str]](list)
        self.date: str | None = None

    def add(self, place: str, example: Any, rendering: Rendering) -> None:
        if rendering.error is not None:
            where = f"{rendering.field}: " if rendering.field else ""
            self.broken.append((place, where + rendering.error))
            return
        if self._strict and rendering.control_tokens:
            names = ", ".join(map(repr, rendering.control_tokens))
            self.broken.append((place, f"has {names} in its texts, {_AS_CONTROL}"))
            return
        self.trained += rendering.trained
        self.lengths.append(rendering.slots)
        self.turns += rendering.trained_turns
        self.endless_turns += rendering.endless_turns
        self.empty_thoughts += rendering.empty_thoughts
        self.endless, self.date = rendering.endless or self.endless, rendering.date or self.date
        self.control_tokens.update(rendering.control_tokens)
        kinds = ("endless_turns", "empty_thoughts", "control_tokens")
        for what in (*rendering.left_out, *(kind for kind in kinds if getattr(rendering, kind))):
            self.places[what].append(place)
        if rendering.slots > self._sequence_length:
            self.too_long.append(f"{place} ({rendering.slots})")
        content = example.model_dump_json().encode()
        same = self._seen.setdefault(hashlib.blake2b(content, digest_size=8).digest(), place)
        if same != place:
            self.duplicates.append(f"{place} (as {same})")
        if len(self.shown) < self._most:
            self.shown.append((place, rendering))

    def facts(self, data: Examples) -> dict[str, Any]:
        ordered = sorted(self.lengths) or [0]
        median, most = ordered[len(ordered) // 2], ordered[int(0.95 * (len(ordered) - 1))]
        named = ", ".join(f"{token!r} {n} times" for token, n in self.control_tokens.items())
        endless = f"{self.endless_turns} trained turns do not end with a token at which vLLM stops"
        empty = f"{self.empty_thoughts} answers train an empty thought"
        return {
            "records": len(data),
            "format": data.format,
            "broken": len(self.broken) or None,
            "trained tokens": self.trained,
            "tokens of an example": (
                f"{ordered[0]} to {ordered[-1]}, median {median}, 95 % up to {most}"
            ),
            "too long": _counted(self.too_long, _refusal(data.kind, self._sequence_length)),
            "duplicates": _counted(self.duplicates),
            "columns left out": ", ".join(sorted(data.ignored)) or None,
            **{
                f"{what} left out": _counted(self.places[what], _NO_PLACE)
                for what in ("reasoning", "tools")
            },
            "nulls left out": _counted(data.nulls, _NULLS),
            "without a stop token": _counted(self.places["endless_turns"], f". {endless}"),
            "empty thoughts": _counted(self.places["empty_thoughts"], f". {empty}; {_THINK}"),
            "control tokens": _counted(
                self.places["control_tokens"], f". The texts have {named}, {_AS_CONTROL}"
            ),
            "date": f"{self.date}{_DATE}" if self.date else None,
        }


def _template_kwargs(settings: list[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for setting in settings:
        apply_setting(given, setting)
    found = given.pop("chat_template_kwargs", {})
    if given or not isinstance(found, dict):
        problem = "only chat_template_kwargs.NAME=VALUE can be set here"
        raise InvalidInput(problem, field="--set")
    return found


def _rendered(
    parse: Callable[[int], Any], indices: tuple[int, ...], render: _Render
) -> Iterator[tuple[str, Any, Rendering]]:
    """The places, examples and renderings of the records `indices`, in order. For a broken record,
    the example is None and the rendering has the error."""
    places, parsed, errors = [], [], {}
    for i in indices:
        try:
            place, example = parse(i)
            parsed.append(example)
        except InvalidInput as error:
            place, _, problem = str(error).partition(": ")
            errors[place] = Rendering(error=problem)
        places.append(place)
    both = iter(zip(parsed, render(parsed), strict=True))
    for place in places:
        example, rendering = (None, errors[place]) if place in errors else next(both)
        if rendering.error and rendering.field:  # examples.17.messages.0
            rendering = rendering.model_copy(
                update={"field": ".".join(rendering.field.split(".")[2:])}
            )
        yield place, example, rendering


def _by_controller() -> _Render:
    tandem = make_client()

    def render(ones: list[Any]) -> list[Rendering]:
        try:
            return tandem.render(*_by_kind(ones)) if ones else []
        except Unreachable as error:
            alone = "to check without a controller, give --tokenizer and a model's directory"
            raise Unreachable(f"{error.message}; {alone}", field=error.field) from error

    return render


def _offline(directory: str) -> _Render:
    try:
        with data_extra("checking with a tokenizer"):
            from tandem.data.chat_template import load_tokenizer
            from tandem.data.render import preview

            tokenizer = load_tokenizer(directory)
    except InvalidInput as error:
        raise InvalidInput(error.message, field="--tokenizer") from error
    vocab_size = None
    if (Path(directory) / "config.json").is_file():
        # config.json may belong to a model that Tandem does not train.
        with suppress(InvalidInput, UnknownArchitecture):
            vocab_size = read_arch(directory).vocab_size
    return lambda ones: preview(tokenizer, *_by_kind(ones), vocab_size)


def _by_kind(ones: list[Any]) -> tuple[list[Any], list[Any]]:
    return (ones, []) if ones and isinstance(ones[0], SFTExample) else ([], ones)


def _counted(places: list[str], more: str = "") -> str | None:
    return (
        f"{len(places)}: {', '.join(places[:3])}{', …' if len(places) > 3 else ''}{more}"
        if places
        else None
    )


def _refusal(kind: str, sequence_length: int) -> str:
    """A text on how training treats records that are too long, and which options help."""
    remedy = "raise its --sequence-length, or give it --too-long drop" + (
        " or truncate" if kind == "sft" else ""
    )
    return f". `tandem train` refuses what doesn't fit a row of {sequence_length} tokens; {remedy}"


def _list(console: Console, broken: list[tuple[str, str]]) -> None:
    for place, problem in broken:
        console.print(
            f"[bold red]broken[/bold red]: [bold]{escape(place)}[/bold]: {escape(problem)}",
            soft_wrap=not console.record,
        )


def _page(
    name: str,
    facts: dict[str, Any],
    lengths: array[int],
    broken: list[tuple[str, str]],
    shown: list[tuple[str, Rendering]],
) -> str:
    """The whole report as HTML."""
    page = Console(
        record=True, file=StringIO(), width=100, color_system="truecolor", highlight=False
    )
    _summarise(page, name, facts, lengths)
    _list(page, broken)
    _print(page, shown)
    return page.export_html(inline_styles=True)


def _summarise(console: Console, name: str, facts: dict[str, Any], lengths: array[int]) -> None:
    counts = Counter(max(length - 1, 0).bit_length() for length in lengths)
    powers = range(min(counts, default=0), max(counts, default=-1) + 1)
    scale = 30 / max(counts.values(), default=1)
    rows = [
        (f"≤ {2**power}", counts[power], "█" * round(scale * counts[power])) for power in powers
    ]
    console.print(table("Tokens of an example", ["tokens#", "examples#", ""], rows))
    console.print(details(name, list(facts.items())))


def _print(console: Console, shown: list[tuple[str, Rendering]]) -> None:
    for place, rendering in shown:
        console.rule(
            f"{escape(place)} · {' + '.join(map(str, rendering.lengths))} tokens,"
            f" {rendering.trained} trained"
        )
        for parts in rendering.parts:
            styles = (
                ("bright_black", "black on #b9e6c3", "black on #f3b6b0")[(w > 0) + 2 * (w < 0)]
                for _, w in parts
            )
            # Brackets mark the trained text if the console has no colours.
            texts = (
                text if console.color_system or not weight else f"⟦{text}⟧"
                for text, weight in parts
            )
            console.print(Text.assemble(*zip(texts, styles, strict=True)))
