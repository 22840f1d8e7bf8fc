"""TOML files of settings, whose errors name the line, the setting and what to do."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.data.inputs import from_validation_error
from tandem.errors import InvalidInput


def read_toml[M: BaseModel](
    path: Path | None, model: type[M], change: Callable[[dict[str, Any]], object] = lambda _: None
) -> M:
    """The file's content, or without a file nothing, after `change`, as `model`. Raises InvalidInput."""
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
        remedies = {"extra_forbidden": "no such setting; correct or remove it", "missing": "is missing; add it"}
        what = remedies.get(first["type"], refused.message)
        where = f"{path}, line {_line(text, first['loc'])}: " if path else ""
        raise InvalidInput(f"{where}{what}", field=refused.field) from error


def _line(text: str, loc: tuple[int | str, ...]) -> int:
    """The line that sets `loc`, else that of the nearest table around it."""
    lines: dict[tuple[int | str, ...], int] = {(): 1}
    counts: dict[str, int] = {}
    table: tuple[int | str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            table, names = (), header[2].split(".")
            counts[header[2]] = counts.get(header[2], -1) + (header[1] == "[[")
            for name in (".".join(names[: i + 1]) for i in range(len(names))):
                table += (name.rpartition(".")[2], *([counts[name]] if counts.get(name, -1) >= 0 else []))
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault((*table, *key[1].split(".")), number)
    return next(lines[loc[:end]] for end in range(len(loc), -1, -1) if loc[:end] in lines)
