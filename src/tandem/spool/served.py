"""`runs/<run>/served.json`: what vLLM serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.spool import fs
from tandem.spool.schema import Served

if TYPE_CHECKING:
    from tandem.spool import Spool


class ServedRecords:
    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def get(self, run: str) -> Served | None:
        """What is served of the run, or None before the first publication. NotFound (field `run`) without the run."""
        content = fs.read_bytes(self._spool.runs.directory(run) / "served.json")
        return None if content is None else Served.model_validate_json(content)

    def changed(self, run: str) -> float | None:
        """When the record was last written, Unix seconds by the volume's clock; None without one."""
        try:
            return (self._spool.runs.directory(run) / "served.json").stat().st_mtime
        except FileNotFoundError:
            return None

    def put(self, run: str, served: Served) -> None:
        """Replaces the record, durably."""
        fs.write_json_atomic(self._spool.runs.directory(run) / "served.json", served)
