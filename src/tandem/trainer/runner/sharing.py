"""Whose the GPUs are: the runner's side of GPUs that trainer and vLLM share, over vLLM's HTTP and the spool alone.

One job: write the hold -> vLLM is healthy still -> it sleeps -> its memory is measured to be free -> ranks run and go
-> memory is measured to be back -> vLLM wakes -> the hold goes. The hold is written before vLLM is asked again, and a
vLLM that starts looks for a hold first (`wait_for_gpu`): so one that is about to take the memory is either seen here
or waits there. Without torch; on GPUs of its own a runner has `Alone`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tandem.config import Settings
from tandem.errors import InvalidInput, SpoolUnusable, TandemError
from tandem.spool import Spool
from tandem.spool.locks import LockHeldError
from tandem.spool.schema import Hold, HoldPhase, Job, JobError
from tandem.system import liveness
from tandem.system.gpus import FREE_BYTES, Devices, over
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceUnavailable, VllmClient
from tandem.vllm_client.wake import ensure_awake, is_awake

log = Log("runner")

SLEEP_SECONDS = 180.0
"""For the publisher to finish what it loads, and for vLLM to fall asleep: 9 s for 16 GB of weights, the first time."""
FREED_SECONDS = 10.0
"""For the memory of a vLLM that says it sleeps to be free."""
WAKE_SECONDS = 60.0
STOPPING_WAKE_SECONDS = 15.0
"""The same once the runner was asked to stop; after that the publisher is left to do it."""
STOP_SECONDS = STOPPING_WAKE_SECONDS + 10.0
"""Most that sharing adds to the runner's end: two questions to vLLM take 5 s each."""
KEPT_SHARE = 0.5
"""A sleeping vLLM keeps its CUDA context, graphs and communicators, 1 to 8 GB. One that keeps more than this share of
what it had in use while awake did not give its memory back, whatever it says."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Taken:
    """vLLM sleeps (or is gone), and the devices are the job's."""

    floor: dict[str, int]  # bytes in use per device UUID before any rank runs
    before: dict[str, int | None]  # while vLLM was awake
    seconds: float


@dataclass(frozen=True)
class Woken:
    devices: dict[str, int | None]
    seconds: float


class Alone:
    """The devices are the trainer's own, always."""

    def tidy(self) -> None:
        """Once, at the start: what a killed runner left."""

    def blocked(self) -> str | None:
        """Why no job can have the devices now, in words."""
        return None

    def take(self, job: Job, leave: Callable[[], bool]) -> Taken | JobError | None:  # noqa: ARG002
        """Get the devices for a job, or why not; None where there is nothing to get. `leave`: no longer wanted. After
        it, whatever came of it, `give_back`. Raises SpoolUnusable, and may be tried again then."""
        return None

    def beat(self, phase: HoldPhase | None = None) -> None:
        """A sign of life, and what the job is about if that changed. Never raises."""

    def give_back(self, floor: Mapping[str, int]) -> Woken | None:  # noqa: ARG002
        """Have vLLM awake again, once no more than `floor` is in use; None where there was none to wake. Raises
        SpoolUnusable, and is to be tried again then."""
        return None


class Shared(Alone):
    def __init__(
        self, settings: Settings, spool: Spool, devices: Devices, name: str, stopping: Callable[[], bool]
    ) -> None:
        """`name`: the runner's. Raises InvalidInput without a GPU."""
        if not devices.uuids:
            raise InvalidInput("there is no GPU to share; give the container one", field="TANDEM_GPU_MODE")
        self._spool, self._devices, self._name, self._stopping = spool, devices, name, stopping
        self._admin = VllmClient(settings, timeout=5.0, work_timeout=SLEEP_SECONDS)
        self._heartbeat = settings.heartbeat_seconds
        # Several beats long: none comes while killed ranks are waited for, or NVML answers late.
        self._lease = max(settings.lease_seconds, 10 * settings.heartbeat_seconds)
        self._hold: Hold | None = None
        self._tidy = False

    def tidy(self) -> None:
        if not self._tidy:
            self.blocked()
            self._tidy = self._spool.hold.get() is None

    def blocked(self) -> str | None:
        def wake() -> None:
            self._within(WAKE_SECONDS, self._admin.wake_up, self._stopping)

        try:
            why = ensure_awake(self._spool, self._admin, self._devices, wake)
            return why or (None if self._admin.healthy() else "vLLM is not ready: its engine is dead")
        except InferenceUnavailable as error:
            return f"vLLM is not ready: {error}"
        except SpoolUnusable:
            raise
        except TandemError as error:
            return f"vLLM does not do what it must: {error}"

    def take(self, job: Job, leave: Callable[[], bool]) -> Taken | JobError | None:
        begin = time.monotonic()
        now = time.time()
        hold = Hold(
            runner=self._name, job=job.spec.id, attempt=job.attempt, phase="sleeping", since=now, beat=now,
            lease=self._lease,
            deadline=now + job.spec.deadline_seconds + SLEEP_SECONDS + WAKE_SECONDS,
        )  # fmt: skip
        before = self._devices.used()
        try:
            if not self._put(hold, begin + SLEEP_SECONDS, leave):
                return _unavailable(f"the publisher was not done with vLLM within {SLEEP_SECONDS:.0f} s")
            if not self._admin.healthy() or self._admin.is_sleeping():
                return _unavailable("vLLM was ready and is not any more")
            trouble: TandemError | None = None
            try:
                self._within(SLEEP_SECONDS, self._admin.sleep, leave)
                if not self._admin.is_sleeping():
                    return _unavailable("vLLM says that it fell asleep, and then that it is awake")
            except TandemError as error:
                trouble = error
        except SpoolUnusable:
            raise
        except TandemError as error:
            return _unavailable(str(error))
        if trouble is not None and self._admin.healthy():
            return _unavailable(f"vLLM does not sleep: {trouble}")
        used = self._measured(before, leave)
        if isinstance(used, str):
            why = f"vLLM is gone ({trouble})" if trouble is not None else "vLLM sleeps"
            return JobError(type="gpus_not_freed", message=f"{why}, but {used}", retriable=True)
        if trouble is not None:
            log.warning("vLLM died while it fell asleep; its memory is free", error=trouble)
        self._hold = hold.model_copy(update={"floor": used})
        self.beat("training")
        return Taken(used, before, time.monotonic() - begin)

    def beat(self, phase: HoldPhase | None = None) -> None:
        liveness.beat("runner")
        hold = self._hold
        if hold is None or (phase in (None, hold.phase) and abs(time.time() - hold.beat) < self._heartbeat):
            return
        self._hold = hold.model_copy(update={"phase": phase or hold.phase, "beat": time.time()})
        with suppress(TandemError, OSError):
            self._spool.hold.put(self._hold)

    def give_back(self, floor: Mapping[str, int]) -> Woken | None:
        hold = self._hold
        if hold is None:
            return None
        if hold.floor and not self._emptied(hold, floor):
            # Stopping: the record stays, and who finds it when we are gone waits for the memory first.
            self._hold = None
            return None
        self.beat("waking")
        begin = time.monotonic()
        woken = self._wake(begin)
        seconds = time.monotonic() - begin
        self._spool.hold.clear()
        self._hold = None
        return Woken(self._devices.used(), seconds) if woken else None

    def _put(self, hold: Hold, end: float, leave: Callable[[], bool]) -> bool:
        """Write the hold while the publisher is not at work; False if it is all the time."""
        while time.monotonic() < end and not leave():
            try:
                with self._spool.hold.lock(blocking=False):
                    self._spool.hold.put(hold)
                    self._hold = hold
                    return True
            except LockHeldError:
                time.sleep(0.02)
        return False

    def _measured(self, before: Mapping[str, int | None], leave: Callable[[], bool]) -> dict[str, int] | str:
        """Bytes in use once they are few and don't change; in words what isn't free after FREED_SECONDS."""
        end = time.monotonic() + FREED_SECONDS
        last: dict[str, int | None] = {}
        while True:
            used = self._devices.used()
            kept = {uuid: int(KEPT_SHARE * (size or 0)) - FREE_BYTES for uuid, size in before.items()}
            left = over(used, {uuid: max(size, 0) for uuid, size in kept.items()})
            if not left and (used == last or time.monotonic() > end):
                return {uuid: size or 0 for uuid, size in used.items()}
            if left and (time.monotonic() > end or leave()):
                return f"its memory is not free: {left} bytes are in use, before it was {dict(before)}"
            last = used
            self.beat()
            time.sleep(_POLL_SECONDS)

    def _emptied(self, hold: Hold, floor: Mapping[str, int]) -> bool:
        """Wait until no more than `floor` is in use, or the hold's deadline; False if asked to stop meanwhile."""
        said = False
        while left := self._devices.busy(floor):
            if time.time() > hold.deadline:
                log.error("memory is not back and the deadline is over: waking vLLM all the same", bytes_in_use=left)
                return True
            if is_awake(self._admin):
                # Another one started, or somebody woke it, though we held the GPUs: our beats did not get through.
                log.warning("vLLM is awake already, and what is in use is its own", bytes_in_use=left)
                return True
            if self._stopping():
                return False
            if not said:
                log.error("vLLM sleeps on until the memory is back", bytes_in_use=left, floor=dict(floor))
                said = True
            self.beat("releasing")
            time.sleep(_POLL_SECONDS)
        return True

    def _wake(self, begin: float) -> bool:
        said = False
        while True:
            bound = STOPPING_WAKE_SECONDS if self._stopping() else WAKE_SECONDS
            try:
                self._within(bound, self._admin.wake_up, self._stopping_for(STOPPING_WAKE_SECONDS))
                if not self._admin.is_sleeping() and self._admin.healthy():
                    return True
                trouble: object = "it says that it sleeps"
            except TandemError as error:
                trouble = error
            if not self._admin.healthy():
                log.warning("vLLM is gone; the GPUs are free for the next one", error=trouble)
                return False
            if time.monotonic() - begin > bound:
                log.error("vLLM can't be woken; left to the publisher", error=trouble, seconds=bound)
                return False
            if not said:
                log.error("vLLM does not wake; trying again", error=trouble)
                said = True
            time.sleep(1.0)

    def _stopping_for(self, seconds: float) -> Callable[[], bool]:
        """Whether the runner has been asked to stop for so long."""
        since: list[float] = []

        def check() -> bool:
            if self._stopping() and not since:
                since.append(time.monotonic())
            return bool(since) and time.monotonic() - since[0] > seconds

        return check

    def _within(self, seconds: float, call: Callable[[], None], leave: Callable[[], bool] = lambda: False) -> None:
        """`call` in a thread, while the hold is beaten here. InferenceUnavailable when it takes longer."""
        errors: list[TandemError] = []

        def run() -> None:
            try:
                call()
            except TandemError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="vllm", daemon=True)
        thread.start()
        end = time.monotonic() + seconds
        while thread.is_alive():
            if time.monotonic() > end or leave():
                raise InferenceUnavailable(f"vLLM did not answer within {seconds:.0f} s, or nobody waits any more")
            thread.join(_POLL_SECONDS)
            self.beat()
        if errors:
            raise errors[0]


def _unavailable(message: str) -> JobError:
    return JobError(type="inference_unavailable", message=message, retriable=True)


def sharing(settings: Settings, spool: Spool, devices: Devices, name: str, stopping: Callable[[], bool]) -> Alone:
    return Shared(settings, spool, devices, name, stopping) if settings.gpu_mode == "shared" else Alone()
