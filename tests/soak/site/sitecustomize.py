"""The soak's programs import this module at Python's start. This module makes the programs' clocks
wrong and the programs' volume slow.

SOAK_CONDITIONS names a JSON file with two errors. `clock` maps a program's module to the seconds by
which the program's `time.time` is wrong. `slow` is the longest time in seconds that an fsync or a
rename takes. The file may change at any time.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

_PERIOD = 0.2
_real_time, _real_time_ns = time.time, time.time_ns


class _Conditions:
    def __init__(self, path: str) -> None:
        self._path = Path(path)
        words = sys.orig_argv
        self._program = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
        self._read = -1.0
        self._clock = self._slow = 0.0

    def _refresh(self) -> None:
        if time.monotonic() - self._read < _PERIOD:
            return
        self._read = time.monotonic()
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = {}
        self._clock, self._slow = (
            found.get("clock", {}).get(self._program, 0.0),
            found.get("slow", 0.0),
        )

    def clock(self) -> float:
        self._refresh()
        return self._clock

    def pause(self) -> None:
        self._refresh()
        if self._slow:
            time.sleep(random.random() * self._slow)


def _install(conditions: _Conditions) -> None:
    def slow(name: str) -> None:
        real = getattr(os, name)

        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            conditions.pause()
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in ("fsync", "rename", "replace"):
        slow(name)
    time.time = lambda: _real_time() + conditions.clock()
    time.time_ns = lambda: _real_time_ns() + int(conditions.clock() * 1e9)


if "SOAK_CONDITIONS" in os.environ:
    _install(_Conditions(os.environ["SOAK_CONDITIONS"]))
