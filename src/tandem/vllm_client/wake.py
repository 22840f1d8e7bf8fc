"""Wakes a vLLM that sleeps although the runner that let it sleep has died or could not wake it. The
publisher calls this twice a second, and a runner before it claims a job."""

import time
from collections.abc import Callable
from contextlib import suppress

from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.vllm_client.client import VllmClient

log = Log("waking")


def ensure_awake(
    spool: Spool, client: VllmClient, devices: Devices, wake: Callable[[], None] | None = None
) -> str | None:
    """Clear a stale hold and wake vLLM. The caller has checked that no hold is live. Returns why it
    can't be done yet.

    Before it wakes vLLM it waits, over several calls, until the lost trainer's memory is back at
    the hold's floor, or until the hold's deadline. If vLLM is already awake, the memory in use is
    vLLM's own. `wake` replaces `client.wake_up`. Raises what VllmClient raises.
    """
    with spool.hold.lock():
        hold = spool.hold.get()
        if hold is not None:
            # A hold without a floor was written before any rank started.
            busy = devices.busy(hold.floor) if hold.floor and time.time() < hold.deadline else {}
            if busy and not is_awake(client):
                return (
                    f"{hold.runner}, which held the GPUs for job {hold.job}, is lost, and {busy}"
                    " bytes are in use"
                )
            # Before the wake: the watchdog restarts a vLLM that can't wake only where there is no
            # hold.
            spool.hold.clear()
        if client.is_sleeping():
            told = hold.model_dump(include={"runner", "job", "phase"}) if hold is not None else {}
            log.warning("vLLM sleeps and no trainer holds its GPUs: waking it", **told)
            (wake or client.wake_up)()
            log.info("vLLM is awake")
    return None


def is_awake(client: VllmClient) -> bool:
    """Whether vLLM is healthy and says that it does not sleep. False where it does not answer."""
    with suppress(TandemError):
        return client.healthy() and not client.is_sleeping()
    return False
