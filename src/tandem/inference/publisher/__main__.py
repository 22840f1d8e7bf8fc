"""The publisher's program (`python -m tandem.inference.publisher`): publishes checkpoints to the
vLLM server on the same machine until SIGTERM."""

import os
import signal
import sys
import time
from contextlib import AbstractContextManager, ExitStack

from pydantic import ValidationError

from tandem.config import load_settings
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.inference.publisher.publisher import Publisher
from tandem.spool import Spool
from tandem.spool.locks import is_locked
from tandem.system import liveness
from tandem.system.logs import Log, configure
from tandem.vllm_client.client import VllmClient

log = Log("publisher")

POLL_SECONDS = 0.5


def main() -> None:
    """Waits for the spool and for vLLM, in either order, and then publishes until SIGTERM. Exits
    with status 2 if the settings are wrong."""
    configure()
    # The handler exits immediately, because the publisher may die at any point without harm.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        settings = load_settings()
        client = VllmClient(settings)
    except (InvalidInput, OSError) as error:
        log.error(f"the publisher can't start: {error}")
        sys.exit(2)
    log.info("started", pid=os.getpid(), root=settings.root, vllm=client.url)
    publisher: Publisher | None = None
    trouble, held = "", ExitStack()
    while True:
        liveness.beat("publisher")
        try:
            if publisher is None:
                # Two publishers on one spool would unload each other's adapters and overwrite
                # served.json.
                held.close()
                held.enter_context(_publisher_lock(Spool(settings.root), settings.replica))
                publisher = Publisher(settings, client)
            publisher.once()
            trouble = ""
        except (TandemError, ValidationError, OSError) as error:
            if str(error) != trouble:
                log.error(f"trying again: {error}")
            trouble = str(error)
        if publisher is None:
            time.sleep(POLL_SECONDS)
        else:
            publisher.wait(POLL_SECONDS)


def _publisher_lock(spool: Spool, replica: str | None) -> AbstractContextManager[None]:
    """The lock of the spool's only publisher; with `replica`, the lock of this replica's publisher.
    Raises SpoolUnusable if one publisher of the spool has a replica name and another publisher has
    none, because each would overwrite the announcements of the other."""
    if replica is None:
        if others := ", ".join(spool.replicas.fresh()):
            raise SpoolUnusable(
                f"{spool.root} has inference servers with names: {others}; give this one a"
                " TANDEM_REPLICA, or stop those and wait 30 s"
            )
        return spool.publisher_lock()
    if is_locked(spool.paths.publisher_lock):
        raise SpoolUnusable(
            f"{spool.root} has a publisher without TANDEM_REPLICA, beside replica {replica}; stop"
            " that one, or give it a TANDEM_REPLICA"
        )
    return spool.replicas.publisher_lock(replica)


if __name__ == "__main__":
    main()
