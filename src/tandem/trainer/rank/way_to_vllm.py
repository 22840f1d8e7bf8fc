"""The network between ranks and vLLM's workers, by the place of vLLM that its publisher has written
to the volume."""

import os

from tandem.spool import Spool
from tandem.system.network import LOOPBACK, own_address, same_network
from tandem.trainer.launch import RankSettings


def address_for_vllm(spool: Spool) -> str:
    """This machine's address for vLLM's workers. RuntimeError where no publisher has said where its
    vLLM is; OSError where there is no way to it."""
    if (place := spool.inference.place()) is None:
        raise RuntimeError(
            f"no publisher has written to {spool.root} where its vLLM is; start inference with"
            " TANDEM_TRANSPORT=nccl, too"
        )
    return LOOPBACK if same_network(place.network) else own_address(place.address)


def choose_interface(spool: Spool, settings: RankSettings) -> None:
    """NCCL's sockets listen beyond this host only if vLLM is elsewhere. Call it before NCCL
    starts."""
    place = spool.inference.place() if settings.way == "nccl" else None
    if place is not None and same_network(place.network):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
