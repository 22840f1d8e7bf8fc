"""Checks requests to a server that needs no API key. Such a server may answer only programs on this
machine. It must not answer a page of another web site, even if a browser on this machine has loaded
the page."""

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
    shows it. A web page can rebind its DNS name to 127.0.0.1, but the Host header still has this
    DNS name."""
    if not is_loopback(re.sub(r":\d+$", "", host)):
        return "Host"
    if origin is not None and origin.partition("://")[2] != host:
        return "Origin"
    return None
