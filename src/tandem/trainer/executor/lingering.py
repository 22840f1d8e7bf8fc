"""The Kubernetes Jobs whose pods stay after an attempt and wait for another attempt."""

import time
from dataclasses import dataclass, field
from threading import Lock


@dataclass
class LingeringJobs:
    """The lingering Jobs of one executor. The threads of several attempts share this object. The
    object contains a Job from the end of the Job's attempt until the Job's deletion. A Job that is
    not in this object and has no attempt is deleted."""

    # Maps a Job's name to the monotonic time at which its wait ends, and to the run of its last
    # attempt.
    _until: dict[str, tuple[float, str]] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def add(self, name: str, run: str, seconds: float) -> None:
        """Adds a Job whose pods wait from now on.

        Args:
            name: the Job's name.
            run: the run of the attempt that has ended.
            seconds: the time for which the pods wait.
        """
        with self._lock:
            self._taken.discard(name)
            self._until[name] = time.monotonic() + seconds, run

    def take(self, run: str) -> str | None:
        """Takes a waiting Job; None if no Job waits. The caller has to use the Job for an attempt,
        or delete it. A Job of the same run is preferred, because its nodes have already read the
        run's model."""
        with self._lock:
            return self._take(sorted(self._until, key=lambda name: self._until[name][1] != run))

    def take_late(self) -> str | None:
        """Takes a Job whose waiting time is over; None if there is none."""
        now = time.monotonic()
        with self._lock:
            return self._take([name for name, (until, _) in self._until.items() if until <= now])

    def _take(self, names: list[str]) -> str | None:
        for name in names:
            del self._until[name]
            self._taken.add(name)
            return name
        return None

    def forget(self, name: str) -> None:
        """Removes a taken Job from this object. If the caller could not delete the Job, the next
        search for Jobs without an attempt deletes it."""
        with self._lock:
            self._taken.discard(name)

    @property
    def names(self) -> set[str]:
        with self._lock:
            return self._until.keys() | self._taken
