"""Tracks the use of adapters: when clients last sampled each run, and which older steps are unused
and can be unloaded."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from tandem.spool import fs
from tandem.system.logs import Log
from tandem.vllm_client.client import VllmClient

log = Log("publisher")

LOOK_SECONDS = 15.0
"""Seconds between two reads of vLLM's metrics."""
_LAST = TypeAdapter(dict[str, FiniteFloat])
_OWN_SECONDS = 5.0
"""vLLM's metrics count the verification of an adapter as a use. The time of this use is at most
this many seconds after the verification."""


class Usage:
    """The time of each run's last use, from vLLM's metrics. The times are kept in `file`, so that
    they survive a restart of the publisher or vLLM."""

    def __init__(self, client: VllmClient, file: Path) -> None:
        self._client, self._file = client, file
        self._next_look = 0.0
        self._last: dict[str, float] = {}  # run -> time of its last use, Unix seconds
        with suppress(OSError, ValidationError):
            self._last = _LAST.validate_json(file.read_bytes())

    def last(self, run: str) -> float:
        """The time at which the run was last sampled, in Unix seconds; 0 if no sample is known."""
        return self._last.get(run, 0.0)

    def update(self, runs: set[str], verified: Callable[[str], float | None]) -> None:
        """Ask vLLM for its metrics, every LOOK_SECONDS. `runs`: all runs; `verified(name)`: the
        time at which this publisher verified an adapter, in Unix seconds. Raises the errors of
        VllmClient."""
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


@dataclass
class Retention:
    """Decides which adapters are unloaded, and when.

    An older step is unloaded once it has had no request for `grace` consecutive seconds. The grace
    period covers the pause between two turns of a conversation. If there are more than `most` older
    steps, the grace period is ignored. The newest step of each run is not counted, so that unused
    runs don't displace steps that clients sample. A step that a rollback discarded is unloaded
    immediately.
    """

    client: VllmClient
    grace: float
    most: int
    _idle_since: dict[str, float] = field(default_factory=dict)

    def expired(
        self,
        listed: Mapping[str, str],
        *,
        runs: Collection[str],
        wanted: Collection[str],
        existing: Collection[str],
    ) -> list[str]:
        """The names in `listed` that can be unloaded now. If a name does not have the form
        `<run>@<step>`, or if its run is not in `runs`, the adapter belongs to another program and
        stays loaded.

        Args:
            existing: the names of the steps that are in the checkpoint chains of `runs`.
        """
        candidates = [name for name in listed if name not in wanted and run_of(name) in runs]
        self._idle_since = {
            name: since for name, since in self._idle_since.items() if name in candidates
        }
        if not candidates:
            return []
        now = time.monotonic()
        in_use = self.client.adapters_in_use()
        expired: list[str] = []
        # vLLM lists adapters in the order of their loads, so the oldest adapters are unloaded
        # first.
        for name in candidates:
            if name in in_use:
                self._idle_since.pop(name, None)
            idle = now - self._idle_since.setdefault(name, now)
            crowded = len(candidates) - len(expired) > self.most
            if name in existing and (name in in_use or (idle < self.grace and not crowded)):
                continue
            expired.append(name)
            log.info("unloading", model=name, discarded=name not in existing)
        return expired


def run_of(name: str) -> str:
    """The run's name, if `name` is `<run>@<step>`; otherwise empty."""
    run, _, step = name.rpartition("@")
    return run if step.isdigit() else ""
