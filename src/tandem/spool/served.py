"""`runs/<run>/served.json`: what vLLM serves of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem.spool import fs
from tandem.spool.schema import Served

if TYPE_CHECKING:
    from tandem.spool import Spool


class ServedRecords:
    """All methods raise NotFound (field `run`) without the run."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def _path(self, run: str) -> Path:
        return self._spool.runs.directory(run) / "served.json"

    def get(self, run: str) -> Served | None:
        """The run's record, or None before the first publication."""
        return fs.read_record(self._path(run), Served)

    def put(self, run: str, served: Served) -> None:
        """Replaces the record, durably."""
        fs.write_json_atomic(self._path(run), served)

    def changed(self, run: str) -> float | None:
        """When the record was last written, Unix seconds by the volume's clock; None without one."""
        try:
            return self._path(run).stat().st_mtime
        except FileNotFoundError:
            return None
