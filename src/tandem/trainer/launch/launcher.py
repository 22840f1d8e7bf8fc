"""Starts ranks for the runner, in the way that TANDEM_LAUNCH selects."""

import hashlib
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import tandem
from tandem.config import Settings
from tandem.system.environment import (
    compiler_caches,
    empty_directory,
    omp_waiting,
    scratch_directory,
)
from tandem.system.logs import Log
from tandem.trainer.launch import Launch
from tandem.trainer.launch.forkserver import ForkServer
from tandem.trainer.launch.torchrun import ResidentRanks, Torchrun

log = Log("runner")

SECRETS = {
    f"TANDEM_{name}{suffix}" for name in ("API_KEY", "ADMIN_TOKEN") for suffix in ("", "_FILE")
}
"""Variables that ranks don't inherit, because a rank contacts no server that requires a key."""

Handle = Torchrun | ForkServer
"""The processes of one attempt."""


class Launcher:
    """Starts the ranks of jobs. The fork server and resident ranks are started before the first
    job. The fork server and resident ranks stay between jobs. Fork server and resident ranks are
    replaced when they have ended or when the source code has changed."""

    def __init__(
        self,
        settings: Settings,
        entry: str,
        marker: tuple[str, str],
        defaults: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Stores the options. Starts no process.

        Args:
            entry: the module whose `main` runs a rank.
            marker: an environment variable and its value, for every process that this launcher
                starts. With the marker, a later runner finds processes that outlived this runner.
            defaults: the argument `own_defaults` of `rank_environment`.
        """
        self._settings, self._entry = settings, entry
        self._environment = rank_environment(settings, defaults) | dict([marker])
        # The ranks have their own directory for temporary files, because ranks are often killed,
        # and a killed process leaves its temporary files behind.
        self.scratch = scratch_directory(
            f"ranks-{hashlib.sha256(marker[1].encode()).hexdigest()[:12]}"
        )
        self._environment["TMPDIR"] = str(self.scratch)
        self._standby: ForkServer | ResidentRanks | None = None
        self._code_version: set[tuple[Path, int, int]] = set()

    def prepare(self) -> None:
        """Start the processes that can start before a job. Doesn't block."""
        if self._settings.launch == "torchrun":
            return
        current = code_version(self._entry)
        if self._standby is not None:
            if self._standby.alive and self._code_version == current:
                return
            reason = "the code changed" if self._standby.alive else "it ended"
            log.info(f"replacing the {self._standby.name}", reason=reason)
            self.close()
        entry, device = self._entry, self._settings.device
        if self._settings.launch == "fork":
            self._standby = ForkServer(entry, device, self._environment)
        else:
            ranks = self._settings.trainer_ranks
            self._standby = ResidentRanks(ranks, entry, device, self._environment)
        self._code_version = current

    def launch(self, launch: Launch, listener: socket.socket | None = None) -> Handle:
        """Start the ranks without waiting for them. Raises OSError if a process can't be started.
        `listener`: see `ForkServer.launch`. If there are several hosts, TANDEM_LAUNCH must be
        `fork`."""
        if not self.holds_devices:
            # The system may have removed `scratch` from /tmp while the runner was idle.
            self.scratch.mkdir(mode=0o700, exist_ok=True)
            empty_directory(self.scratch)  # removes the files of the previous attempt

        # The cache directories are checked again, because other users may have created them since
        # the runner's start.
        compiler_caches(os.environ)
        self.prepare()
        if isinstance(self._standby, ForkServer):
            return self._standby.launch(launch, listener)
        if self._standby is not None:
            return self._standby.launch(launch)
        return Torchrun(launch.work, launch.ranks, [launch.model_dump_json()], self._environment)

    @property
    def holds_devices(self) -> bool:
        """Whether ranks keep memory on the devices between jobs."""
        return isinstance(self._standby, ResidentRanks) and self._standby.alive

    def close(self) -> None:
        """End the processes that stay between jobs."""
        if self._standby is not None:
            self._standby.close()
            self._standby = None


def rank_environment(
    settings: Settings, own_defaults: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The environment variables with which every launcher starts ranks. `own_defaults` replace the
    defaults that apply if all ranks are on this host."""
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(settings)),
        # If OpenBLAS may use more than one thread, importing numpy starts OpenBLAS's threads. The
        # fork server must have no second thread.
        "OPENBLAS_NUM_THREADS": "1",
        # A rank compiles only a few kernels, once, so starting a pool of compiler processes takes
        # longer than it saves.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # All ranks are on this host, so Gloo uses loopback. To choose an interface itself, Gloo
        # would resolve the host's name, which may fail in a container.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if settings.way != "nccl":  # with "nccl", ranks choose the interface by vLLM's address
        defaults["NCCL_SOCKET_IFNAME"] = "lo"  # NCCL accepts no connections from other hosts
    if settings.launch == "resident":
        # With MALLOC_ARENA_MAX=1, all threads share one heap. If each thread had its own heap, the
        # threads of every job would leave fragments, and the heaps would grow.
        defaults["MALLOC_ARENA_MAX"] = "1"
    # If the ranks send weights over NCCL, vLLM's workers would need the same NCCL_CUMEM_ENABLE.
    if settings.trainer_ranks == 2 and settings.way != "nccl":
        # NCCL needs cuMem memory only for NVLS, which has no benefit with two GPUs. Two GPUs
        # connect 0.3 s faster without cuMem memory (H100, NCCL 2.28).
        defaults["NCCL_CUMEM_ENABLE"] = "0"
    inherited = {name: value for name, value in os.environ.items() if name not in SECRETS}
    environment = (
        defaults
        | dict(own_defaults)
        | inherited
        | omp_waiting(os.environ)
        | {"PYTHONUNBUFFERED": "1"}
    )
    # Compiler caches must be outside TMPDIR (torch's default), because a rank's TMPDIR is removed.
    environment |= compiler_caches(os.environ)
    # CUDA has to number the GPUs in NVML's order, in which the runner finds and measures the
    # devices.
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if settings.trainer_devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(settings.trainer_devices)
    return environment


def threads_per_rank(settings: Settings) -> int:
    """The number of threads of each rank: OMP_NUM_THREADS, or by default this machine's cores
    divided by this machine's ranks. The number of threads affects the order of floating-point sums,
    so each library gets this number instead of choosing a number itself.
    """
    with suppress(ValueError):
        return max(1, int(os.environ.get("OMP_NUM_THREADS", "")))
    return max(1, len(os.sched_getaffinity(0)) // settings.ranks_per_host)


def code_version(entry: str) -> set[tuple[Path, int, int]]:
    """(path, modification time, size) of each of Tandem's source files, and of the entry module's
    file."""
    spec = find_spec(entry)
    assert spec is not None
    files = [*Path(tandem.__file__).parent.rglob("*.py"), Path(str(spec.origin))]
    return {(file, status.st_mtime_ns, status.st_size) for file in files if (status := file.stat())}
