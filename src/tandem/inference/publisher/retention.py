"""Old steps are unloaded from vLLM when nobody uses them."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tandem.system.logs import Log
from tandem.vllm_client.client import VllmClient

log = Log("publisher")


@dataclass
class Retention:
    """Which adapters are unloaded, and when.

    After an unload, running requests finish with the adapter that they began with, and new ones get a 404.

    So an older step goes once no request has used it for `grace` seconds in a row: a conversation between two turns has
    no request. Beyond `most` older steps the grace is ignored. (The newest steps don't count, so that runs that nobody
    uses don't push out what others sample.) A step that a rollback discarded goes at once.
    """

    client: VllmClient
    grace: float
    most: int
    _idle_since: dict[str, float] = field(default_factory=dict)

    def expired(
        self, listed: Mapping[str, str], *, runs: Collection[str], wanted: Collection[str], existing: Collection[str]
    ) -> list[str]:
        """Names of `listed` that can be unloaded now. `existing`: the steps in the chains of `runs`.

        A name that is not `<run>@<step>` of one of `runs` belongs to somebody else and stays.
        """
        candidates = [name for name in listed if name not in wanted and run_of(name) in runs]
        self._idle_since = {name: since for name, since in self._idle_since.items() if name in candidates}
        if not candidates:
            return []
        now = time.monotonic()
        in_use = self.client.adapters_in_use()
        expired: list[str] = []
        # vLLM lists adapters in the order in which they were loaded, so the oldest go first.
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
    """The run of `<run>@<step>`; empty for another name."""
    run, _, step = name.rpartition("@")
    return run if step.isdigit() else ""
