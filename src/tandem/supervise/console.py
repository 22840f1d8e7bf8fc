"""What `tandem up` prints: the lines of all programs' logs, each with its program's name in front, and its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tandem.supervise.supervisord import log_path
from tandem.system.logs import json_line
from tandem.system.tail import Tail

_COLOURS = {"controller": "36", "vllm": "35", "publisher": "33", "runner": "32", "exporter": "34", "up": "1"}


class Console:
    """`logs`: the directory of the programs' logs, which are followed from their present ends. `as_json`: every printed
    line is a JSON object with a key `program`."""

    def __init__(self, logs: Path, programs: Iterable[str], *, as_json: bool) -> None:
        self._as_json = as_json
        self._tails = {name: Tail(log_path(logs, name), from_end=True) for name in programs}

    def follow(self) -> None:
        """Print the lines that the programs have logged since the last call."""
        for name, tail in self._tails.items():
            for line in tail.lines():
                self._print(name, line)

    def say(self, text: str) -> None:
        """Print lines of `tandem up` itself."""
        for line in text.splitlines():
            self._print("up", line)

    def _print(self, program: str, text: str) -> None:
        if self._as_json:
            line = _with_program(program, text)
        else:
            prefix = f"{program:>10} |"
            if sys.stdout.isatty():
                prefix = f"\x1b[{_COLOURS.get(program, '1')}m{prefix}\x1b[0m"
            line = f"{prefix} {text}"
        with suppress(OSError):  # the terminal may be gone; the logs remain
            print(line, flush=True)


def _with_program(program: str, text: str) -> str:
    try:
        entry = json.loads(text)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        entry = json.loads(json_line("info", program, text))
    return json.dumps({"program": program} | entry)
