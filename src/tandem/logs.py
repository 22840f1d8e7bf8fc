"""How Tandem's own programs log: one line per event, `time level program message key=value ...`, on stderr."""

from __future__ import annotations

import logging
import sys
import time
from typing import override


class Formatter(logging.Formatter):
    """`extra={"fields": {...}}` of a record becomes ` key=value` after the message; values with spaces are quoted."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        pairs = "".join(f" {key}={_value(value)}" for key, value in fields.items() if value is not None)
        return super().formatMessage(record) + pairs


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text


def configure(level: int = logging.INFO) -> None:
    """Send this program's log to stderr in Tandem's format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # A line per request of a poll twice a second would bury everything else.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class Log:
    """A logger that takes its fields as keyword arguments."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, message: str, **fields: object) -> None:
        self._logger.info(message, extra={"fields": fields})

    def warning(self, message: str, **fields: object) -> None:
        self._logger.warning(message, extra={"fields": fields})

    def error(self, message: str, **fields: object) -> None:
        self._logger.error(message, extra={"fields": fields})
