"""Removes what dead processes left on the volume and what the settings don't keep, as long as the controller runs."""

import threading

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.spool.recovery import sweep
from tandem.spool.removal import prune
from tandem.system.logs import Log

SWEEP_SECONDS = 600.0

log = Log("controller")


class Sweeper:
    def __init__(self, spool: Spool, settings: Settings) -> None:
        self._spool = spool
        self._settings = settings
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="sweep", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread after its present sweep, without waiting for it."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(SWEEP_SECONDS):
            try:
                self._spool.check()
                prune(self._spool, self._settings)
                sweep(self._spool)
            except (TandemError, OSError) as error:
                log.warning("can't remove old or stale files", error=error)
