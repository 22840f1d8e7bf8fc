"""GPUs that the trainer shares with vLLM: putting vLLM to sleep for a job and waking it afterwards.

docs/architecture.md has the cycle of a job. The hold is written before vLLM is checked, and a vLLM
that starts looks for a hold first: so a vLLM that is about to take the memory is either noticed
here or waits there.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError, Unauthorized
from tandem.spool import Spool
from tandem.spool.locks import LockHeldError
from tandem.spool.schema import Hold, HoldPhase, Job, JobError
from tandem.system import liveness
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.trainer.stop import Stop
from tandem.vllm_client.client import InferenceRefused, InferenceUnavailable, VllmClient
from tandem.vllm_client.wake import ensure_awake, is_awake

log = Log("runner")

SLEEP_SECONDS = 180.0  # for the publisher to finish its load and for vLLM to fall asleep
FREED_SECONDS = 10.0  # for the memory of a sleeping vLLM to be free
WAKE_SECONDS = 60.0
# Once the runner was asked to stop; after that the publisher wakes vLLM.
STOPPING_WAKE_SECONDS = 15.0
STOP_SECONDS = STOPPING_WAKE_SECONDS + 10.0
"""The most that this file adds to the time the runner needs to stop: two requests to vLLM take 5 s
each."""
KEPT_SHARE = 0.5
"""A sleeping vLLM keeps its CUDA context, graphs and communicators, 1 to 8 GB. One that keeps more
than this share of what it used while awake did not free its memory."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Asleep:
    """vLLM sleeps or has died, and the GPUs are the job's. Fields of the event `slept`; bytes in
    use by device UUID."""

    before: dict[str, int | None]  # while vLLM was awake
    devices: dict[str, int]  # before any rank runs
    seconds: float


class SharedGpus:
    def __init__(
        self, settings: Settings, spool: Spool, devices: Devices, runner: str, stop: Stop
    ) -> None:
        """Raises InvalidInput without a GPU."""
        if not devices.uuids:
            raise InvalidInput(
                "there is no GPU to share; give the container one", field="TANDEM_GPU_MODE"
            )
        self._spool, self._devices, self._runner, self._stop = spool, devices, runner, stop
        self._vllm = VllmClient(settings, timeout=5.0, work_timeout=SLEEP_SECONDS)
        self._heartbeat = settings.heartbeat_seconds
        # Several beats long, because none is written while the runner waits for killed ranks or for
        # the driver.
        self._lease = max(settings.lease_seconds, 10 * settings.heartbeat_seconds)
        self._hold: Hold | None = None

    def recover(self) -> None:
        """Wake a vLLM that a killed runner left asleep. Call it between jobs: a hold is another
        runner's then."""
        if self._spool.hold.get() is not None:
            self.unavailable()

    def unavailable(self) -> str | None:
        """Why no job can have the GPUs now, or None. Wakes a vLLM that sleeps without reason."""
        wake = partial(
            self._request, WAKE_SECONDS, self._vllm.wake_up, lambda: self._stop.requested
        )
        try:
            with self._lock(lambda: self._stop.requested) as locked:
                if not locked:
                    return f"the publisher did not release vLLM within {SLEEP_SECONDS:.0f} s"
                reason = ensure_awake(self._spool, self._vllm, self._devices, wake)
            return reason or (
                None if self._vllm.healthy() else "vLLM is not ready: its engine is dead"
            )
        except InferenceUnavailable as error:
            return f"vLLM is not ready: {error}"
        except (InferenceRefused, Unauthorized) as error:
            return f"vLLM refused a request: {error}"

    def put_vllm_to_sleep(self, job: Job, interrupted: Callable[[], object]) -> Asleep | JobError:
        """Get the GPUs for a job; the error says why that failed. Either way, call `wake_vllm`
        afterwards.

        Gives up when `interrupted` is true. Raises SpoolUnusable, and may then be called again.
        """
        begin = time.monotonic()
        before = self._devices.used()
        if not self._write_hold(job, interrupted):
            return _unavailable(f"the publisher did not release vLLM within {SLEEP_SECONDS:.0f} s")
        if not is_awake(self._vllm):
            return _unavailable("vLLM stopped being ready")
        failure: TandemError | None = None  # to sleep, which may mean that vLLM died
        try:
            self._request(SLEEP_SECONDS, self._vllm.sleep, interrupted)
            if not self._vllm.is_sleeping():
                failure = InferenceUnavailable(
                    "it answered that it sleeps, and then that it is awake"
                )
        except TandemError as error:
            failure = error
        if failure is not None and self._vllm.healthy():
            return _unavailable(f"vLLM does not sleep: {failure}")
        used, kept = self._wait_until_freed(before, interrupted)
        if kept:
            state = "sleeps" if failure is None else f"died ({failure})"
            message = (
                f"vLLM {state}, but its memory is not free: {kept} bytes are in use, before it was"
                f" {before}"
            )
            return JobError(type="gpus_not_freed", message=message, retriable=True)
        if failure is not None:
            log.warning("vLLM died while it fell asleep; its memory is free", error=failure)
        assert self._hold is not None
        floor = {uuid: size or 0 for uuid, size in used.items()}
        self._hold = self._hold.model_copy(update={"floor": floor})
        self.beat("training")
        return Asleep(before, floor, time.monotonic() - begin)

    def _write_hold(self, job: Job, interrupted: Callable[[], object]) -> bool:
        """Write the hold as soon as the publisher does not use vLLM; False if it does for
        SLEEP_SECONDS."""
        now = time.time()
        hold = Hold(
            runner=self._runner,
            job=job.spec.id,
            attempt=job.attempt,
            phase="sleeping",
            since=now,
            beat=now,
            lease=self._lease,
            deadline=now + job.spec.deadline_seconds + SLEEP_SECONDS + WAKE_SECONDS,
        )
        with self._lock(interrupted) as locked:
            if locked:
                self._spool.hold.put(hold)
                self._hold = hold
        return locked

    @contextmanager
    def _lock(self, interrupted: Callable[[], object]) -> Iterator[bool]:
        """Hold the lock of the GPUs. The value is False if the publisher has it for SLEEP_SECONDS,
        or if interrupted.

        Never waits in the lock itself, because SIGTERM would not end that, and no heartbeat would
        be written.
        """
        end = time.monotonic() + SLEEP_SECONDS
        while time.monotonic() < end and not interrupted():
            try:
                with self._spool.hold.lock(blocking=False):
                    yield True
                    return
            except LockHeldError:
                time.sleep(0.02)
                self.beat()
        yield False

    def _wait_until_freed(
        self, before: Mapping[str, int | None], interrupted: Callable[[], object]
    ) -> tuple[dict[str, int | None], dict[str, int | None]]:
        """Wait until vLLM has freed its memory and the bytes in use don't change, or FREED_SECONDS.
        Returns the bytes in use by device UUID, and the same of devices where vLLM kept its
        memory."""
        most = {
            uuid: max(int(KEPT_SHARE * (size or 0)) - self._devices.free_bytes, 0)
            for uuid, size in before.items()
        }
        end = time.monotonic() + FREED_SECONDS
        last: dict[str, int | None] = {}
        while True:
            used = self._devices.used()
            kept = self._devices.over(used, most)
            if time.monotonic() > end or (interrupted() if kept else used == last):
                return used, kept
            last = used
            self.beat()
            time.sleep(_POLL_SECONDS)

    def beat(self, phase: HoldPhase | None = None) -> None:
        """Renew the hold if that is due or `phase` is new. Never raises."""
        liveness.beat("runner")
        hold = self._hold
        if hold is None or (
            phase in (None, hold.phase) and abs(time.time() - hold.beat) < self._heartbeat
        ):
            return
        self._hold = hold.model_copy(update={"phase": phase or hold.phase, "beat": time.time()})
        with suppress(TandemError, OSError):
            self._spool.hold.put(self._hold)

    def renew(self) -> JobError | None:
        """Renew the hold before the ranks start. Returns an error where that may be too late: once
        its lease is over, the publisher clears it and wakes vLLM. Raises SpoolUnusable, and may
        then be called again.
        """
        assert self._hold is not None
        found, now = self._spool.hold.get(), time.time()
        ours = found is not None and (found.runner, found.job) == (
            self._hold.runner,
            self._hold.job,
        )
        if found is None or not ours or abs(now - found.beat) > self._lease / 2:
            return _unavailable(
                "the hold of the GPUs could not be renewed in time, so vLLM may be awake again"
            )
        self._hold = self._hold.model_copy(update={"beat": now})
        self._spool.hold.put(self._hold)
        return None

    def wake_vllm(self, floor: Mapping[str, int]) -> dict[str, object] | None:
        """Wake vLLM once no more than `floor` (bytes by device UUID) is in use, and remove the
        hold.

        Returns the fields of the event `woken`: bytes in use and seconds; None if there was no vLLM
        to wake. Raises SpoolUnusable, and must then be called again.
        """
        hold = self._hold
        if hold is None:
            return None
        if hold.floor and not self._wait_until_released(hold, floor):
            # The hold stays: whoever finds it after this runner has ended waits for the memory
            # before it wakes vLLM.
            self._hold = None
            return None
        self.beat("waking")
        begin = time.monotonic()
        woken = self._wake()
        event = {"devices": self._devices.used(), "seconds": time.monotonic() - begin}
        self._spool.hold.clear()
        self._hold = None
        return event if woken else None

    def _wait_until_released(self, hold: Hold, floor: Mapping[str, int]) -> bool:
        """Wait until no more than `floor` is in use, or the hold's deadline; False if the runner
        has to stop first."""
        logged = False
        while left := self._devices.busy(floor):
            if time.time() > hold.deadline:
                log.error(
                    "memory is not free and the deadline is over: waking vLLM nevertheless",
                    bytes_in_use=left,
                )
                return True
            if is_awake(self._vllm):
                # Somebody started or woke one in spite of the hold, because it was not renewed in
                # time.
                log.warning(
                    "vLLM is awake already, and the memory in use is its own", bytes_in_use=left
                )
                return True
            if self._stop.requested:
                return False
            if not logged:
                log.error(
                    "vLLM sleeps until the memory is free", bytes_in_use=left, floor=dict(floor)
                )
                logged = True
            self.beat("releasing")
            time.sleep(_POLL_SECONDS)
        return True

    def _wake(self) -> bool:
        """Wake vLLM, with retries; False if it is gone or does not wake in time."""
        deadline = time.monotonic() + WAKE_SECONDS

        def late() -> bool:
            nonlocal deadline
            if self._stop.requested:
                deadline = min(deadline, time.monotonic() + STOPPING_WAKE_SECONDS)
            return time.monotonic() > deadline

        logged = False
        while True:
            try:
                self._request(WAKE_SECONDS, self._vllm.wake_up, late)
                if is_awake(self._vllm):
                    return True
                failure = "it answers that it sleeps"
            except TandemError as error:
                failure = str(error)
            if not self._vllm.healthy():
                log.warning("vLLM is gone; the GPUs are free for the next one", error=failure)
                return False
            if late():
                log.error("vLLM can't be woken; the publisher goes on trying", error=failure)
                return False
            if not logged:
                log.error("vLLM does not wake; trying again", error=failure)
                logged = True
            time.sleep(1.0)

    def _request(
        self, seconds: float, request: Callable[[], None], interrupted: Callable[[], object]
    ) -> None:
        """Run `request` in a thread and renew the hold meanwhile. Raises what `request` raises, and
        InferenceUnavailable after `seconds` or when interrupted."""
        end = time.monotonic() + seconds

        def beat() -> None:
            if time.monotonic() > end or interrupted():
                raise InferenceUnavailable(
                    f"vLLM did not answer within {seconds:.0f} s or until the runner gave up"
                )
            self.beat()

        liveness.in_thread(request, beat, _POLL_SECONDS)


def _unavailable(message: str) -> JobError:
    return JobError(type="inference_unavailable", message=message, retriable=True)
