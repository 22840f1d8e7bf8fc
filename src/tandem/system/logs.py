"""The log format of Tandem's own programs. The programs log to stderr, one line per event.

A line of the default format, text, is `time level program message key=value ...`. A line of the
format json is an object with `time`, `level`, `logger`, `message`, and `fields` if there are any.

TANDEM_LOG_FORMAT chooses the format. TANDEM_LOG_FORMAT is read directly from the environment,
because a program logs before it has read its settings.
"""

import json
import logging
import os
import sys
import time
from datetime import UTC, datetime
from typing import override


class TextFormatter(logging.Formatter):
    """A record's fields are appended to the message as ` key=value`; values with spaces are
    quoted."""

    @override
    def formatMessage(self, record: logging.LogRecord) -> str:
        line = f"{_timestamp(record.created)} {record.levelname:<7} {record.name}: {record.message}"
        return line + "".join(f" {key}={_quoted(value)}" for key, value in _fields(record).items())


class JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(
            record.levelname, record.name, record.getMessage(), at=record.created, **fields
        )


def json_line(
    level: str, logger: str, message: str, *, at: float | None = None, **fields: object
) -> str:
    """A line of the json format, ASCII only.

    Args:
        at: Unix seconds, by default now.
    """
    stamp = _timestamp(time.time() if at is None else at)
    entry = {"time": stamp, "level": level.lower(), "logger": logger, "message": message}
    return json.dumps(entry | ({"fields": fields} if fields else {}), default=str)


def _timestamp(seconds: float) -> str:
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in getattr(record, "fields", {}).items() if value is not None}


def _quoted(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return repr(text) if not text or any(c.isspace() or c in "\"'=" for c in text) else text


def as_json() -> bool:
    return os.environ.get("TANDEM_LOG_FORMAT") == "json"


def configure(level: int = logging.INFO) -> None:
    """Sends this program's log to stderr in Tandem's format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json() else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level, force=True)
    # At level INFO, these HTTP libraries log a line per request. The lines of a client that polls
    # twice a second would hide all other lines.
    for client in ("httpx", "httpx2"):
        logging.getLogger(client).setLevel(logging.WARNING)


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
