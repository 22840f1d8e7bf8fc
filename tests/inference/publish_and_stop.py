"""`python publish_and_stop.py PHASE SIGNAL`: a publisher that sends itself the signal SIGNAL when
its publication reaches the phase PHASE."""

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from tandem.config import load_settings
from tandem.inference.publisher.publisher import Publisher
from tandem.vllm_client.client import VllmClient

# Maps each phase to a call of the publisher's client, and to the time of the signal: before, during
# or after this call.
PHASES = {
    "ordered": ("swap_merged", "during"),
    "swapped": ("swap_merged", "after"),
    "checked": ("merged_rows", "after"),
    "verified": ("announce_merged", "before"),
    "announced": ("announce_merged", "after"),
}


def main(phase: str, signal: int) -> None:
    name, when = PHASES[phase]
    call: Callable[..., Any] = getattr(VllmClient, name)

    def stop() -> None:
        os.kill(os.getpid(), signal)

    def call_and_stop(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            stop()
        if when == "during":
            threading.Timer(0.005, stop).start()
        result = call(*args, **kwargs)
        if when == "after":
            stop()
        return result

    setattr(VllmClient, name, call_and_stop)
    settings = load_settings()
    Publisher(settings, VllmClient(settings)).once()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
