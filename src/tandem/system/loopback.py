"""Decides what a server without a key may answer: programs on this machine, and no page of another
site in a browser here."""

import ipaddress
import re
from typing import Literal


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this name or address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def foreign_header(host: str, origin: str | None) -> Literal["Host", "Origin"] | None:
    """The header that shows that a request comes from a page of another site; None if there is
    none. A web page can rebind its DNS name to 127.0.0.1, but its name stays in the Host header."""
    if not is_loopback(re.sub(r":\d+$", "", host)):
        return "Host"
    if origin is not None and origin.partition("://")[2] != host:
        return "Origin"
    return None
