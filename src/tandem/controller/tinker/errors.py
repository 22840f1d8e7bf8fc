"""Keys and statuses of the package `tinker`: the package sends keys in its own header and form, and
treats some statuses as temporary faults."""

import re
from http import HTTPStatus

PREFIX = "/api/v1"
_PATHS = re.compile(rf"^{PREFIX}(/|$)")
# The package repeats a request for five minutes after status 409, and for an hour after status 402.
_STATUSES = {HTTPStatus.CONFLICT: 400, HTTPStatus.PAYMENT_REQUIRED: 400}


def is_tinker(path: str) -> bool:
    return _PATHS.match(path) is not None


def tinker_status(status: int) -> int:
    return _STATUSES.get(HTTPStatus(status), status)


def bearer(given: str) -> str:
    """The header Authorization that is equivalent to an X-API-Key. The package sends only keys that
    begin with `tml-`, so clients put this prefix before a key of another form."""
    return f"Bearer {given.removeprefix('tml-')}" if given else ""
