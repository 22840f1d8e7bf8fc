"""`python -m tandem.inference.publisher`: publishes checkpoints to the vLLM server beside it until
SIGTERM."""

import os
import signal
import sys
import time

from pydantic import ValidationError

from tandem.config import load_settings
from tandem.errors import InvalidInput, TandemError
from tandem.inference.publisher.publisher import Publisher
from tandem.system import liveness
from tandem.system.logs import Log, configure
from tandem.vllm_client.client import VllmClient

log = Log("publisher")

POLL_SECONDS = 0.5


def main() -> None:
    """Waits for the spool and for vLLM, whichever comes later. Exits 2 on wrong settings."""
    configure()
    # At once: the publisher may die at any point.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        settings = load_settings()
        client = VllmClient(settings)
    except (InvalidInput, OSError) as error:
        log.error(f"the publisher can't start: {error}")
        sys.exit(2)
    log.info("started", pid=os.getpid(), root=settings.root, vllm=client.url)
    publisher: Publisher | None = None
    trouble = ""
    while True:
        liveness.beat("publisher")
        try:
            publisher = publisher or Publisher(settings, client)
            publisher.once()
            trouble = ""
        except (TandemError, ValidationError, OSError) as error:
            if str(error) != trouble:
                log.error(f"trying again: {error}")
            trouble = str(error)
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
