"""Keys and statuses of Tinker's package: it sends keys in a header and a form of its own, and takes
some statuses for passing faults."""

import re
from http import HTTPStatus

PREFIX = "/api/v1"
_PATHS = re.compile(rf"^{PREFIX}(/|$)")
# The package repeats a request after 409 for five minutes, and after 402 for an hour.
_STATUSES = {HTTPStatus.CONFLICT: 400, HTTPStatus.PAYMENT_REQUIRED: 400}


def is_tinker(path: str) -> bool:
    return _PATHS.match(path) is not None


def tinker_status(status: int) -> int:
    return _STATUSES.get(HTTPStatus(status), status)


def bearer(given: str) -> str:
    """The header Authorization that X-API-Key stands for. The package sends keys that begin with
    `tml-` only, so that stands before a key of another form."""
    return f"Bearer {given.removeprefix('tml-')}" if given else ""
