"""Removes one of several inference servers from the proxy before the server is stopped (`python -m
tandem.supervise.drain SECONDS`). The program waits up to SECONDS until the server's requests have
ended.

The drain program writes a file that orders the server to leave the proxy. The server's publisher
reads the file, and withdraws vLLM's permission to answer. The proxy then sends no more requests to
this server, and running requests continue. The drain program never fails, because the server is
stopped in any case.
"""

import sys
import time

from tandem.config import Settings, load_settings
from tandem.errors import TandemError
from tandem.system.environment import leaving_file
from tandem.system.logs import Log, configure
from tandem.vllm_client.client import InferenceGone, VllmClient

log = Log("drain")

CHECKED_SECONDS = 1.5
"""Seconds after which the proxy has certainly noticed that a server is not ready. The proxy needs
two checks, 0.5 s apart."""


def drain(settings: Settings, seconds: float) -> bool:
    """Waits until the server has no request left. Returns False if requests are left after
    `seconds`."""
    end = time.monotonic() + seconds
    # The file survives a restart of this container. The file has a time limit, so that it does not
    # keep the next server out of service.
    leaving_file(settings.root).write_text(str(time.time() + seconds))
    client = VllmClient(settings, timeout=5.0)
    quiet_since = None
    while time.monotonic() < end:
        busy = True
        try:
            busy = client.is_ready() or client.has_requests()
        except InferenceGone:
            return True
        except TandemError as error:
            log.warning("vLLM does not say what it does", error=error)
        quiet_since = None if busy else quiet_since or time.monotonic()
        if quiet_since is not None and time.monotonic() > quiet_since + CHECKED_SECONDS:
            return True
        time.sleep(0.2)
    return False


def main() -> None:
    configure()
    try:
        if not drain(load_settings(), float(sys.argv[1])):
            log.warning("requests still run, and are cut off", seconds=float(sys.argv[1]))
    except (TandemError, OSError, ValueError, IndexError) as error:
        log.error(f"the server is stopped without waiting for its requests: {error}")


if __name__ == "__main__":
    main()
