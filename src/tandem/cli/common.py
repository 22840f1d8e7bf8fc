"""The parts that all commands share: the client, arguments, files of settings, tables, JSON, errors
on stderr, exit statuses."""

import json as jsonlib
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args

import typer
from pydantic import BaseModel, ByteSize, ValidationError
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.client import Tandem
from tandem.errors import (
    InvalidInput,
    JobFailed,
    NotServed,
    StepRefused,
    TandemError,
    Unreachable,
    from_validation_error,
)

# Seconds for which requests are repeated: long enough for a restart of the controller, and short
# enough for a user who waits with a wrong URL.
PATIENCE = 10.0


def _console(stream: TextIO, **options: Any) -> Console:
    """A console. If the stream is not a terminal, the console is wide, so that lines and tables are
    not wrapped."""
    return Console(width=None if stream.isatty() or "COLUMNS" in os.environ else 240, **options)


out, err = _console(sys.stdout), _console(sys.stderr, stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text, for programs.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        help=(
            "A layer to adapt (q_proj, ...); repeatable.  \\[default: all; of a mixture"
            " attention's]"
        )
    ),
]


def make_client() -> Tandem:
    """The client for one command; its connection ends with the process."""
    return Tandem(patience=PATIENCE)


def show[T](data: T, json: bool, render: Callable[[T], object]) -> None:
    """Print the result of a command.

    Args:
        data: the result; pydantic must be able to write it as JSON.
        json: whether `data` is printed, as one JSON document.
        render: turns `data` into the object that is printed if `json` is false. If `render`
            returns None, nothing is printed.
    """
    if json:
        print(to_json(data, indent=2, inf_nan_mode="constants").decode())
    elif (rendered := render(data)) is not None:
        out.print(rendered)


def show_line(data: object) -> None:
    """Print `data` as one line of JSON, without buffering."""
    print(to_json(data, inf_nan_mode="constants").decode(), flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table. The first column is never cut, because people copy its values.

    Args:
        columns: the names. A column whose name ends with `#` is aligned to the right, and its
            header is printed without the `#`.
        rows: the cells of each row, one for each column; None: an empty cell.
    """
    made = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        made.add_column(
            column.removesuffix("#"),
            justify="right" if column.endswith("#") else "left",
            no_wrap=not i,
        )
    for row in rows:
        made.add_row(*("" if cell is None else escape(str(cell)) for cell in row))
    return made


def details(title: str, pairs: Sequence[tuple[str, object]]) -> Table:
    """A table of names and values, without the values that are None."""
    made = table(title, ["", ""], [(name, value) for name, value in pairs if value is not None])
    made.show_header, made.columns[0].style = False, "bold"
    return made


def when(seconds: float | None) -> str | None:
    """Unix seconds as a text with date and time, in this machine's time zone."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(count: int | None) -> str | None:
    """A number of bytes as a text with its unit: B, KiB, ..."""
    return None if count is None else ByteSize(count).human_readable(separator=" ")


@contextmanager
def data_extra(what: str, field: str | None = None) -> Iterator[None]:
    """Raises InvalidInput if a package of the extra `data` is missing."""
    try:
        yield
    except ImportError as error:
        problem = f"{what} needs {error.name}: pip install 'tandem-rl[data]'"
        raise InvalidInput(problem, field=field) from error


def print_error(error: Exception, *, json: bool) -> None:
    """Print an error on stderr, with the offending field first."""
    code, message, field = (
        "timeout" if isinstance(error, TimeoutError) else "os_error",
        str(error),
        None,
    )
    if isinstance(error, TandemError):
        code, message, field = error.code, error.message, error.field
    if json:
        print(
            jsonlib.dumps({"error": {"type": code, "message": message, "field": field}}),
            file=sys.stderr,
        )
        return
    where = f"[bold]{escape(field)}[/bold]: " if field else ""
    err.print(f"[bold red]error[/bold red] ({code}): {where}{escape(message)}", soft_wrap=True)


def exit_code(error: Exception) -> int:
    """The exit status for an error. `tandem --help` lists the statuses."""
    codes: list[tuple[type[Exception], int]] = [
        (JobFailed, 3),
        (StepRefused, 6),
        (NotServed, 4),
        (TimeoutError, 4),
        (Unreachable, 5),
    ]
    return next((code for kind, code in codes if isinstance(error, kind)), 1)


def fields(data: Mapping[str, Any], names: Sequence[str]) -> str:
    """The values of `names` in `data`, as a text `name=value name=value`. Floats have four
    significant digits. Names without a value are left out."""
    values = {name: data[name] for name in names if data.get(name) is not None}
    return " ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )


def read_toml[M: BaseModel](
    path: Path | None, model: type[M], change: Callable[[dict[str, Any]], object] = lambda _: None
) -> M:
    """Reads the TOML file and validates its content. Raises InvalidInput.

    Args:
        path: the file; None: the content is empty.
        model: the record that the content must form.
        change: a function that changes the content's dictionary in place before the validation.
    """
    try:
        text = path.read_text() if path else ""
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"can't read {path} as TOML: {error}") from error
    try:
        change(content)
        return model.model_validate(content)
    except ValidationError as error:
        first, refused = error.errors()[0], from_validation_error(error)
        where = f"{path}, line {_line(text, first['loc'])}: " if path else ""
        known = _keys(model, first["loc"][:-1]) if first["type"] == "extra_forbidden" else []
        keys = f"; the keys are {', '.join(known)}" if known else ""
        raise InvalidInput(f"{where}{refused.message}{keys}", field=refused.field) from error


def _keys(model: type[BaseModel], loc: Sequence[int | str]) -> list[str]:
    """The keys of the record at `loc`; empty if `loc` may have records of several kinds."""
    for name in loc:
        if name in model.model_fields:  # skips list indices and tags of unions
            kinds = _records(model.model_fields[str(name)].annotation)
            if len(kinds) != 1:
                return []
            model = kinds[0]
    return [name for name in model.model_fields if name != "kind"]


def _records(annotation: Any) -> list[type[BaseModel]]:
    """The kinds of records in a type such as `list[Record] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _records(part)]


def _line(text: str, loc: tuple[int | str, ...]) -> int:
    """The number of the line that sets `loc`. If no line sets `loc`, the innermost table that
    contains `loc` is chosen, and the result is the number of the line with its header."""
    lines: dict[tuple[int | str, ...], int] = {(): 1}
    counts: dict[str, int] = {}
    table: tuple[int | str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            table, names = (), header[2].split(".")
            counts[header[2]] = counts.get(header[2], -1) + (header[1] == "[[")
            for name in (".".join(names[: i + 1]) for i in range(len(names))):
                table += (
                    name.rpartition(".")[2],
                    *([counts[name]] if counts.get(name, -1) >= 0 else []),
                )
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault((*table, *key[1].split(".")), number)
    # If a setting is a list and the file has a single table for the setting, the table is the
    # list's only item.
    loc = tuple(part for i, part in enumerate(loc) if part != 0 or (*loc[:i], 0) in lines)
    return next(lines[loc[:end]] for end in range(len(loc), -1, -1) if loc[:end] in lines)
