"""The GPUs that jobs run on. This module waits until the GPUs are free, gets them for a job, and
measures the memory that the job left in use. A size is the number of bytes that all processes
together use on a device, as the driver reports it. Sizes are keyed by device UUID. A size is None
if the driver gives no answer.
"""

import time

from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.schema import Job
from tandem.system import processes
from tandem.system.gpus import STAYING_BYTES, Devices, beyond
from tandem.system.logs import Log
from tandem.system.processes import Process
from tandem.trainer.executor.shared_gpus import SharedGpus
from tandem.trainer.launch.launcher import Launcher
from tandem.trainer.stop import Stop

log = Log("runner")

RELEASE_SECONDS = 10.0
"""Seconds that a device's memory may take to be free after the device's last process is gone."""


class JobGpus:
    def __init__(
        self, settings: Settings, spool: Spool, launcher: Launcher, runner: str, stop: Stop
    ) -> None:
        """Raises InvalidInput when the settings name devices that don't exist.

        Args:
            runner: the runner's name, which is written into requests for shared GPUs.
        """
        self._launcher, self._stop = launcher, stop
        self._devices = Devices(settings, "trainer")
        self.names = ",".join(self._devices.uuids) or "cpu"
        # Processes that survived SIGKILL and may still use devices.
        self.survivors: list[Process] = []
        self.shared: SharedGpus | None = None  # None if vLLM does not share these GPUs
        if settings.gpu_mode == "shared":
            self.shared = SharedGpus(settings, spool, self._devices, runner, stop)
        self.vllm_bytes: dict[str, int] = {}  # bytes that the sleeping vLLM uses
        self.floor: dict[str, int] = {}  # bytes that may stay in use after a job
        self._kept: dict[str, int] = {}  # bytes of resident ranks after a job

    def wait_until_free(self) -> None:
        """Wait until a job can use the devices, or the runner has to stop."""
        if not self._launcher.holds_devices:
            self.floor = {}
        logged = ""
        while not self._stop.requested and (unavailable := self._unavailable()):
            reason, details = unavailable
            if reason != logged:
                log.warning(f"jobs wait: {reason}", **details)
                logged = reason
            self._stop.pause(2.0)
        if logged and not self._stop.requested:
            log.info("the devices are free again")

    def _unavailable(self) -> tuple[str, dict[str, object]] | None:
        """The reason why no job can use the devices now, and details for the log; None if a job can
        use them."""
        if self.shared is not None and (reason := self.shared.unavailable()) is not None:
            return reason, {}
        # Until vLLM sleeps, all memory in use on shared devices belongs to vLLM.
        busy = self._devices.busy(self.floor) if self.shared is None else {}
        self.survivors = [process for process in self.survivors if processes.alive(process)]
        if not busy and not self.survivors:
            return None
        pids = [process.pid for process in self.survivors]
        return "the devices are not free", {"bytes_in_use": busy or None, "processes": pids or None}

    def vllm_sleeps(self, devices: dict[str, int]) -> None:
        """Store `devices`, the bytes in use before the ranks of a job start. The bytes of resident
        ranks, which already run before the job, are not counted as vLLM's."""
        kept = self._kept if self._launcher.holds_devices else {}
        self.floor = devices
        self.vllm_bytes = {uuid: max(size - kept.get(uuid, 0), 0) for uuid, size in devices.items()}

    def measure_release(self, job: Job, survivors: list[Process]) -> dict[str, object]:
        """Wait until the devices are free, at most RELEASE_SECONDS, and measure the memory that the
        attempt left in use. Returns fields of the event `released`."""
        begin = time.monotonic()
        self.survivors = survivors
        if self.shared is not None:
            self.shared.beat("releasing")
            most = {uuid: size + STAYING_BYTES for uuid, size in self.vllm_bytes.items()}
            if self._launcher.holds_devices and (left := self._devices.busy(most)):
                log.error(
                    "the ranks keep too much for vLLM to wake beside them; ending them",
                    bytes_in_use=left,
                )
                self._launcher.close()
        if resident := self._launcher.holds_devices:
            # Resident ranks have freed all memory that they can free. The bytes that resident ranks
            # can't free may stay in use until the next job.
            used = self._devices.used()
            self.floor = {uuid: size for uuid, size in used.items() if size is not None}
        else:
            self.floor = self.vllm_bytes
            used = self._devices.wait_free(RELEASE_SECONDS, self.floor)
        left = self._devices.over(used, self.floor)
        if survivors or left:
            problem = (
                "the ranks are gone but memory is not free" if left else "processes survive SIGKILL"
            )
            pids = [process.pid for process in survivors]
            log.error(problem, job=job.spec.id, bytes_in_use=left or None, processes=pids or None)
        of_job = beyond(used, self.vllm_bytes)
        self._kept = {uuid: size or 0 for uuid, size in of_job.items()} if resident else {}
        return {
            "bytes": None if None in used.values() else sum(filter(None, of_job.values())),
            "devices": used,
            **({"floor": self.vllm_bytes} if self.vllm_bytes else {}),
            **({"resident": of_job} if resident else {}),
            "seconds": time.monotonic() - begin,
        }
