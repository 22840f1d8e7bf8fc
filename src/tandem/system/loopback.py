"""Checks requests to a server without an API key. Such a server may answer only programs on this
machine. The server must not answer a web page of another site in a browser on this machine."""

import ipaddress
import re
from typing import Literal


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this name or address."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def foreign_header(host: str, origin: str | None) -> Literal["Host", "Origin"] | None:
    """The header that shows that a request comes from a page of another site; None if no header
    shows it. A web page can rebind its DNS name to 127.0.0.1, but its name stays in the Host
    header."""
    if not is_loopback(re.sub(r":\d+$", "", host)):
        return "Host"
    if origin is not None and origin.partition("://")[2] != host:
        return "Origin"
    return None
