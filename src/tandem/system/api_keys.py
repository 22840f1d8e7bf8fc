"""API keys and their names: finds the name of a request's key, and adds the name to the request's
line in the access log. Controller and vLLM's server both use this module, so it imports no server
framework."""

import hmac
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from hashlib import sha256

_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):(.+)")
asking: ContextVar[str] = ContextVar("asking", default="")
"""The name of the key with which the current task's request was sent; empty if the key has no
name."""


def split_name(entry: str) -> tuple[str, str]:
    """The pair (name, key) of an entry `name:key` in a file of keys. The name is empty for an entry
    without a name."""
    match = _NAMED.fullmatch(entry)
    return (match[1], match[2]) if match else ("", entry)


def digests(keys: Mapping[str, str]) -> dict[str, str]:
    """Maps the SHA-256 of each key to the key's name, for `name_of`."""
    return {sha256(key.encode()).hexdigest(): name for key, name in keys.items()}


def name_of(authorization: str, known: Mapping[str, str]) -> str | None:
    """The name of the key in the value of an Authorization header; None if the key is unknown."""
    scheme, _, key = authorization.partition(" ")
    digest = sha256(key.strip().encode("latin-1")).hexdigest()
    # All keys are compared, each in constant time, so that the time does not reveal how close a
    # guess is.
    names = [name for one, name in known.items() if hmac.compare_digest(digest, one)]
    return names[0] if names and scheme.lower() == "bearer" else None


def name_in_log(record: logging.LogRecord) -> bool:
    """A filter for uvicorn's access log that inserts the key's name after the address. The filter
    never drops a line."""
    if (name := asking.get()) and isinstance(record.args, tuple) and record.args:
        record.args = (f"{record.args[0]} {name}", *record.args[1:])
    return True
