"""What `tandem up` prints: the lines of all programs' logs, each with its program's name in front, and its own."""

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
            entry = None
            with suppress(ValueError):
                entry = json.loads(text)
            if not isinstance(entry, dict):
                entry = json.loads(json_line("info", program, text))
            text = json.dumps({"program": program} | entry)
        else:
            before, after = (f"\x1b[{_COLOURS.get(program, '1')}m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
            text = f"{before}{program:>10} |{after} {text}"
        with suppress(OSError):  # the terminal may be gone; the logs remain
            print(text, flush=True)
