"""When the adapters of each run were last sampled."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from tandem.spool import fs
from tandem.vllm_client.client import VllmClient

LOOK_SECONDS = 15.0
"""How often vLLM is asked."""
_LAST = TypeAdapter(dict[str, FiniteFloat])
_OWN_SECONDS = 5.0
"""vLLM counts the verification of an adapter as a use, up to this long after its end."""


class Usage:
    """What vLLM's metrics say, kept in `file`, so that a new publisher and a new vLLM know it too."""

    def __init__(self, client: VllmClient, file: Path) -> None:
        self._client, self._file = client, file
        self._next_look = 0.0
        self._last: dict[str, float] = {}  # run -> Unix seconds
        with suppress(OSError, ValidationError):
            self._last = _LAST.validate_json(file.read_bytes())

    def last(self, run: str) -> float:
        """Unix seconds; 0 for a run that nobody is known to have sampled."""
        return self._last.get(run, 0.0)

    def update(self, runs: set[str], verified: Callable[[str], float | None]) -> None:
        """Ask vLLM, every LOOK_SECONDS. `runs`: all there are; `verified(name)`: when this publisher verified an
        adapter, Unix seconds. Raises what VllmClient raises."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_SECONDS
        last = {run: at for run, at in self._last.items() if run in runs}
        for name, at in self._client.adapters_last_used().items():
            run, own = name.rpartition("@")[0], verified(name)
            if run in runs and own is not None and at > own + _OWN_SECONDS:
                last[run] = max(at, last.get(run, 0.0))
        if last != self._last:
            self._last = last
            fs.write_atomic(self._file, _LAST.dump_json(last))
