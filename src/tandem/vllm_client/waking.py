"""The second waker: vLLM sleeps, and no trainer that lives holds its GPUs.

Whoever lets vLLM sleep wakes it again; this is for when that one died, or could not. The publisher asks twice a second,
a runner before it claims anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.spool import Spool
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.vllm_client.admin import AdminClient

log = Log("waking")


def settle(spool: Spool, admin: AdminClient, devices: Devices, wake: Callable[[], None] | None = None) -> str | None:
    """Have vLLM awake, and no hold on the volume; the caller knows that no hold is live. Why not yet in words, or None.

    The memory of a lost trainer is waited for, down to what was in use while vLLM slept, or until the hold's deadline.
    Not where vLLM is awake: then it is its own, and it had woken, or was started again, before the record could go.
    Raises what AdminClient does. `wake`: instead of `admin.wake_up`.
    """
    with spool.hold.lock():
        hold = spool.hold.get()
        if hold is not None:
            # Without a floor nothing had been started yet that could hold memory.
            left = devices.busy(hold.floor) if hold.floor and time.time() < hold.deadline else {}
            if left and not awake(admin):
                return f"{hold.runner}, which had the GPUs for job {hold.job}, is lost, and {left} bytes are in use yet"
            # First: with a hold that stays, nobody would notice a vLLM that can't be woken.
            spool.hold.clear()
        if admin.is_sleeping():
            log.warning(
                "vLLM sleeps and no trainer holds its GPUs: waking it",
                **({"runner": hold.runner, "job": hold.job, "phase": hold.phase} if hold is not None else {}),
            )
            (wake or admin.wake_up)()
            log.info("vLLM is awake")
    return None


def awake(admin: AdminClient) -> bool:
    """Whether vLLM says so; False where it says nothing."""
    with suppress(TandemError):
        return admin.healthy() and not admin.is_sleeping()
    return False


class Turns:
    """When the publisher may use vLLM. Alone on its GPUs: always."""

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Inside it vLLM is awake and stays so, where the words are empty; else they say why it isn't."""
        yield ""


class SharedTurns(Turns):
    """On GPUs that a trainer uses too: while no hold is live, and none can be taken inside a turn."""

    def __init__(self, settings: Settings, spool: Spool, admin: AdminClient) -> None:
        self._spool, self._admin = spool, admin
        self._devices = Devices(settings, "inference")

    @contextmanager
    def turn(self) -> Iterator[str]:
        with self._spool.hold.lock():
            hold = self._spool.hold.live()
            if hold is not None:
                yield f"the trainer has the GPUs ({hold.phase}, job {hold.job})"
            else:
                yield settle(self._spool, self._admin, self._devices) or ""


def turns(settings: Settings, spool: Spool, admin: AdminClient) -> Turns:
    return SharedTurns(settings, spool, admin) if settings.gpu_mode == "shared" else Turns()
