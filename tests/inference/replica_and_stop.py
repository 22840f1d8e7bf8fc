"""`python replica_and_stop.py PHASE GO`: the publisher of a replica. The publisher kills itself
when its next publication reaches the phase PHASE. `PHASES` are the phases of an adapter's
publication. `publish_and_stop.PHASES` are the phases of a publication of merged weights. The
program writes the file GO.ready when its replica is ready. The publication begins when the file GO
exists."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference import publish_and_stop
from tandem.config import load_settings
from tandem.inference.publisher.publisher import Publisher
from tandem.spool.replicas import Replicas
from tandem.vllm_client.client import VllmClient

TESTS = str(Path(__file__).parent.parent)
"""The program's PYTHONPATH."""
PHASES: dict[str, tuple[type, str, str]] = {
    "before the load": (VllmClient, "load_lora", "before"),
    "between load and verification": (VllmClient, "load_lora", "after"),
    "between verification and record": (Replicas, "put_serves", "before"),
    "between record and announcement": (Replicas, "put_serves", "after"),
    "after the announcement": (Replicas, "announce", "after"),
}


def main(phase: str, go: Path) -> None:
    settings = load_settings()
    publisher = Publisher(settings, VllmClient(settings))
    while not publisher.once() or not publisher._spool.replicas.all()[str(settings.replica)].ready:
        time.sleep(0.1)
    go.with_suffix(".ready").touch()
    while not go.exists():
        time.sleep(0.01)
    owner, name, when = PHASES.get(phase) or (VllmClient, *publish_and_stop.PHASES[phase])
    call: Callable[..., Any] = getattr(owner, name)

    def call_and_stop(*args: Any, **kwargs: Any) -> None:
        if when == "during":
            threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if when != "before":
            call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call_and_stop)
    publisher.once()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
