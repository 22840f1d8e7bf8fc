"""Finds the address of this publisher's vLLM, to which ranks send whole weights."""

from urllib.parse import urlsplit

from tandem.config import Settings
from tandem.spool.schema import VllmPlace
from tandem.system.loopback import is_loopback
from tandem.system.network import network_name, reachable_address

_EVERY = ("0.0.0.0", "::")


def vllm_place(settings: Settings) -> VllmPlace:
    """The address of vLLM's host, for other machines. The address is the host in
    TANDEM_INFERENCE_URL, or this machine's own address if that host is loopback, `0.0.0.0` or
    `::`."""
    host = str(urlsplit(settings.resolved_inference_url).hostname)
    here = is_loopback(host) or host in _EVERY
    return VllmPlace(address=reachable_address() if here else host, network=network_name())
