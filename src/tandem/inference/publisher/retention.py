"""Which adapters are unloaded, and when."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tandem.system.logs import Log
from tandem.vllm_client.client import VllmClient

log = Log("publisher")


@dataclass
class Retention:
    """After an unload, running requests finish with the adapter that they began with, and new ones get a 404.

    So an older step goes once no request has used it for `grace` seconds in a row: a conversation between two turns has
    no request. Beyond `max_listed` models the grace is ignored. A step that a rollback discarded goes at once.
    """

    client: VllmClient
    grace: float
    max_listed: int
    _idle_since: dict[str, float] = field(default_factory=dict)

    def expired(
        self, listed: Mapping[str, str], *, runs: Collection[str], wanted: Collection[str], existing: Collection[str]
    ) -> list[str]:
        """Names of `listed` that can be unloaded now. `existing`: the checkpoints of `runs` that are on the volume.

        A name that is not `<run>@<step>` of one of `runs` belongs to somebody else and stays.
        """
        candidates = [name for name in listed if name not in wanted and _run_of(name) in runs]
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
            crowded = len(listed) - len(expired) > self.max_listed
            if name in existing and (name in in_use or (idle < self.grace and not crowded)):
                continue
            expired.append(name)
            log.info("unloading", model=name, discarded=name not in existing)
        return expired


def _run_of(name: str) -> str:
    run, _, step = name.rpartition("@")
    return run if step.isdigit() else ""
