"""`python -m tandem.metrics.exporter`: what Prometheus scrapes of the trainer's and the inference container.

It is no part of what it watches: no torch, no CUDA, nothing written but the write probe. What to collect follows from
TANDEM_ROLE (trainer, inference; else everything). It waits for what is not there yet, and tells so in
`tandem_collector_success`. Exits 0 on SIGTERM, 2 on wrong settings, 1 where its address is taken.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

import tandem
from tandem.config import Settings, load_settings
from tandem.errors import TandemError
from tandem.metrics.catalogue import BOTH, Exporter
from tandem.metrics.collector import Collector, Loop, Scrape
from tandem.metrics.demo import pages as demo_pages
from tandem.metrics.host import BuildCollector, SupervisorCollector, VolumesCollector, local_places
from tandem.metrics.jobs import JobsCollector
from tandem.metrics.nvml import NvmlCollector
from tandem.metrics.policy import CheckpointsCollector, PolicyCollector, PublishCollector
from tandem.metrics.ranks import RanksCollector
from tandem.metrics.server import MetricsServer
from tandem.spool import Spool
from tandem.system.logs import Log, configure
from tandem.system.role import current_role

log = Log("exporter")


class SpoolOpener:
    """The spool as each collection needs it: there, with its volume. Shared by the collectors' threads."""

    def __init__(self, settings: Settings) -> None:
        self._root = settings.root

    def __call__(self) -> Spool:
        """Raises SpoolUnusable while the spool is not there. A full or read-only volume can be read."""
        return Spool(self._root, writable=False)


def roles() -> tuple[Exporter, ...]:
    """Whose metrics this process tells."""
    role = current_role()
    return BOTH if role == "all" else (role,)


def make_collectors(settings: Settings, sides: tuple[Exporter, ...]) -> list[Collector]:
    """The collectors of these roles."""
    spool = SpoolOpener(settings)
    devices = {"trainer": settings.trainer_devices, "inference": settings.inference_devices}
    # One role's container may see the other's devices too; who is both tells about all.
    selected: Sequence[str] = devices[sides[0]] if len(sides) == 1 else ()
    collectors: list[Collector] = [
        BuildCollector(),
        NvmlCollector(settings.device, selected),
        PolicyCollector(spool, sides),
        SupervisorCollector(settings),
        VolumesCollector(spool, local_places()),
    ]
    if "trainer" in sides:
        collectors += [RanksCollector(spool, settings.trainer_ranks), JobsCollector(spool), CheckpointsCollector(spool)]
    if "inference" in sides:
        collectors.append(PublishCollector(spool))
    return collectors


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; the exit status."""
    configure()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load_settings()
        sides, demo = roles(), settings.metrics_backend == "demo"
    except TandemError as error:
        log.error(f"the exporter can't start: {error}")
        return 2
    loops = [] if demo else [Loop(collector) for collector in make_collectors(settings, sides)]
    about = {"what": "Tandem's exporter", "version": tandem.__version__, "role": " and ".join(sides)}
    about["collectors"] = "none: everything is made up" if demo else ", ".join(loop.collector.name for loop in loops)
    try:
        pages = demo_pages() if demo else {"/metrics": Scrape(loops)}
        server = MetricsServer(settings.metrics_host, settings.metrics_port, pages, about)
    except OSError as error:
        log.error(f"can't listen on {settings.metrics_host}:{settings.metrics_port}: {error}; set TANDEM_METRICS_PORT")
        return 1
    for loop in loops:
        loop.start()
    server.serve_in_background()
    log.info("exporter is up", address=f"{settings.metrics_host}:{server.port}", collectors=about["collectors"])
    stop.wait()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a collector may hang in a driver or on a volume: nobody waits for it
