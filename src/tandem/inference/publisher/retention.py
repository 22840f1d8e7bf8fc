"""Which adapters vLLM may forget, and when."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from tandem.system.logs import Log
from tandem.vllm_client.admin import AdminClient

log = Log("publisher")


def _run_of(name: str) -> str:
    run, _, step = name.rpartition("@")
    return run if step.isdigit() else ""


class Retention:
    """Says what may be unloaded.

    vLLM's unload takes the name away: running requests finish with the adapter they began with, new ones get a 404. So
    an older step goes when no request used it for `grace` seconds in a row (a conversation between two turns is not
    visible), and a step that a rollback discarded goes at once.
    """

    def __init__(self, admin: AdminClient, *, grace: float, max_listed: int) -> None:
        self._admin = admin
        self.grace = grace
        self._max_listed = max_listed
        self._idle_since: dict[str, float] = {}

    def retire(
        self, listed: Mapping[str, str], *, runs: Collection[str], wanted: Collection[str], existing: Collection[str]
    ) -> list[str]:
        """Names of the adapters that may be unloaded now. `existing`: the checkpoints of `runs` that are on the volume.

        What is not `<run>@<step>` of one of `runs` was loaded by somebody else and stays.
        """
        candidates = [name for name in listed if name not in wanted and _run_of(name) in runs]
        self._idle_since = {name: since for name, since in self._idle_since.items() if name in candidates}
        if not candidates:
            return []
        now = time.monotonic()
        in_use = self._admin.adapters_in_use()
        gone: list[str] = []
        # Oldest first: they are listed in the order they were loaded in.
        for name in candidates:
            if name in in_use:
                self._idle_since.pop(name, None)
            idle = now - self._idle_since.setdefault(name, now)
            crowded = len(listed) - len(gone) > self._max_listed
            if name in existing and (name in in_use or (idle < self.grace and not crowded)):
                continue
            self._idle_since.pop(name, None)
            gone.append(name)
            log.info("unloading", model=name, discarded=name not in existing)
        return gone
