"""Chooses the network between ranks and vLLM's workers. The choice depends on vLLM's address, which
vLLM's publisher has written to the volume."""

import os

from tandem.spool import Spool
from tandem.system.network import LOOPBACK, own_address, same_network
from tandem.trainer.launch import RankSettings


def address_for_vllm(spool: Spool) -> str:
    """The address at which vLLM's workers can reach this machine. Raises RuntimeError if no
    publisher has written vLLM's address. Raises OSError if there is no route to vLLM."""
    if not (places := spool.inference.places()):
        raise RuntimeError(
            f"no publisher has written to {spool.root} where its vLLM is; start inference with"
            " TANDEM_TRANSPORT=nccl, too"
        )
    elsewhere = [place for place in places if not same_network(place.network)]
    return own_address(elsewhere[0].address) if elsewhere else LOOPBACK


def choose_interface(spool: Spool, settings: RankSettings) -> None:
    """Restricts NCCL's sockets to loopback if every known vLLM is on this host. Call the function
    before NCCL starts."""
    places = spool.inference.places() if settings.way == "nccl" else []
    if places and all(same_network(place.network) for place in places):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
