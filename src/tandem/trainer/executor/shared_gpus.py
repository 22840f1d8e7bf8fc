"""Gets the GPUs that the trainer shares with vLLM, and gives the GPUs back after a job.

The runner sends no request to vLLM. The runner asks for the GPUs by writing a hold, the record
`jobs/hold.json`. The publisher puts vLLM to sleep and answers in a record, and the runner measures
the memory. For each job, the runner and the publisher take these steps:

1. The publisher writes vLLM's state to `jobs/vllm.json`, twice a second. The runner claims no job
   until `jobs/vllm.json` says that vLLM is awake. After the runner has claimed a job, it writes the
   hold.
2. If the publisher is loading a step into vLLM, the publisher finishes the loading before it looks
   for a hold. When the publisher sees the hold, it checks once more that vLLM answers, calls `POST
   /sleep?level=1&mode=keep` and answers the hold. Sleep level 2 would lose the base model under
   LoRA. With `mode=keep`, running requests return to vLLM's queue and continue after the wake.
3. The runner does not trust the publisher's answer that vLLM sleeps (vLLM issue 47654). The runner
   reads each device's bytes in use until they no longer change. The bytes in use must also be fewer
   than half of the bytes that were in use while vLLM was awake. The last measured number of bytes
   is called the floor. If more than 256 MiB beyond the floor are in use, another program uses the
   GPU. The ranks start only after the runner has measured the floor.
4. When the ranks have ended and the memory is measured to be back at the floor, the runner removes
   the hold. The publisher wakes vLLM and reports in `jobs/vllm.json` that vLLM is awake. Once vLLM
   is reported awake, the job gets its terminal state. If vLLM does not wake, the job gets its
   terminal state after 60 s.

The hold is written before the publisher looks at vLLM, and a starting vLLM looks for a hold first.
So either the publisher sees the starting vLLM, or the starting vLLM sees the hold and waits.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tandem.config import Settings
from tandem.errors import InvalidInput, TandemError
from tandem.spool import Spool
from tandem.spool.inference import same_attempt
from tandem.spool.schema import Hold, HoldAnswer, HoldPhase, Job, JobError
from tandem.system import liveness
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.trainer.stop import Stop

log = Log("runner")

SLEEP_SECONDS = 180.0  # limit for loading a step, and for vLLM to fall asleep
FREED_SECONDS = 10.0  # limit for a sleeping vLLM to free its memory
WAKE_SECONDS = 60.0
# STOPPING_WAKE_SECONDS replaces WAKE_SECONDS once the runner was asked to stop. The publisher wakes
# vLLM without the runner's help.
STOPPING_WAKE_SECONDS = 15.0
STOP_SECONDS = STOPPING_WAKE_SECONDS + 10.0
"""The most seconds that this module adds to the time that the runner needs to stop."""
SILENT_SECONDS = 10.0
"""If the publisher's record is older than SILENT_SECONDS, the publisher is busy with loading
weights, or has died."""
KEPT_SHARE = 0.5
"""A sleeping vLLM keeps its CUDA context, graphs and communicators, 1 to 8 GB. A vLLM that keeps
more than this share of the bytes that it used while awake has not freed its memory."""
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 0.02  # seconds between two reads of the publisher's answer


@dataclass(frozen=True)
class Asleep:
    """The state in which vLLM sleeps or has died, and the job can use the GPUs. The attributes are
    the fields of the event `slept`. `before` and `devices` are bytes in use by device UUID."""

    before: dict[str, int | None]  # bytes in use while vLLM was awake
    devices: dict[str, int]  # bytes in use before any rank runs
    seconds: float


class SharedGpus:
    def __init__(
        self, settings: Settings, spool: Spool, devices: Devices, runner: str, stop: Stop
    ) -> None:
        """Raises InvalidInput if there is no GPU.

        Args:
            devices: the GPUs that vLLM and the trainer share.
            runner: this runner's name, for its holds.
            stop: says whether the runner has to stop.
        """
        if not devices.uuids:
            raise InvalidInput(
                "there is no GPU to share; give the container one", field="TANDEM_GPU_MODE"
            )
        self._spool, self._devices, self._runner, self._stop = spool, devices, runner, stop
        self._heartbeat = settings.heartbeat_seconds
        # The lease spans several beats, because the runner writes no beat while it waits for killed
        # ranks or for the driver.
        self._lease = max(settings.lease_seconds, 10 * settings.heartbeat_seconds)
        self._hold: Hold | None = None

    def unavailable(self) -> str | None:
        """The reason why no job can have the GPUs now; None if a job can have them."""
        if (hold := self._spool.hold.get()) is not None:
            return f"the publisher has not settled yet what job {hold.job} left"
        state = self._vllm()
        return None if state == "awake" else self._not_ready(state)

    def _vllm(self, since: float = 0.0) -> str | None:
        """vLLM's state, if the publisher looked at vLLM after `since`. None if the publisher has
        not looked at vLLM after `since`, or has written nothing for SILENT_SECONDS."""
        found, now = self._spool.inference.shared(), time.monotonic()
        if found is None or found.looked <= since or not 0 <= now - found.beat < SILENT_SECONDS:
            return None
        return found.state

    def _not_ready(self, state: str | None) -> str:
        if state is None:
            return "the publisher does not say how vLLM is"
        found = self._spool.inference.shared()
        return f"vLLM is not ready: {found.why if found and found.why else state}"

    def put_vllm_to_sleep(self, job: Job, interrupted: Callable[[], object]) -> Asleep | JobError:
        """Get the GPUs for a job. Returns a JobError with the reason if the job can't have the
        GPUs. The caller has to call `wake_vllm` afterwards, even after a JobError. Gives up when
        `interrupted()` is true. Raises SpoolUnusable; after this error, the caller may call the
        method again.
        """
        begin = time.monotonic()
        before = self._devices.used()
        hold = self._write_hold(job)
        answer = self._answer(hold, interrupted)
        if answer is None:
            return _unavailable(
                f"the publisher did not put vLLM to sleep within {SLEEP_SECONDS:.0f} s, or before"
                " the runner gave up"
            )
        if answer.outcome == "refused":
            return _unavailable(answer.why)
        used, kept = self._wait_until_freed(before, interrupted)
        if kept:
            state = "sleeps" if answer.outcome == "asleep" else f"died ({answer.why})"
            message = (
                f"vLLM {state}, but its memory is not free: {kept} bytes are in use, before it was"
                f" {before}"
            )
            return JobError(type="gpus_not_freed", message=message, retriable=True)
        if answer.outcome == "gone":
            log.warning("vLLM died while it fell asleep; its memory is free", error=answer.why)
        assert self._hold is not None
        floor = {uuid: size or 0 for uuid, size in used.items()}
        self._hold = self._hold.model_copy(update={"floor": floor})
        self.beat("training")
        return Asleep(before, floor, time.monotonic() - begin)

    def _write_hold(self, job: Job) -> Hold:
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
        self._spool.hold.put(hold)
        self._hold = hold
        return hold

    def _answer(self, hold: Hold, interrupted: Callable[[], object]) -> HoldAnswer | None:
        """The publisher's answer to this hold; None if there is no answer within SLEEP_SECONDS, or
        if `interrupted()` is true."""
        end = time.monotonic() + SLEEP_SECONDS
        while time.monotonic() < end and not interrupted():
            found = self._spool.inference.shared()
            if found is not None and same_attempt(found.answer, hold):
                return found.answer
            self.beat()
            time.sleep(_ANSWER_SECONDS)
        return None

    def _wait_until_freed(
        self, before: Mapping[str, int | None], interrupted: Callable[[], object]
    ) -> tuple[dict[str, int | None], dict[str, int | None]]:
        """Wait, at most FREED_SECONDS, until vLLM has freed its memory and the bytes in use don't
        change. Returns two dicts from device UUIDs to bytes in use. The first dict has all devices.
        The second dict has the devices on which vLLM has not freed its memory."""
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
        """Write the hold again if its last beat is older than the heartbeat interval, or if `phase`
        is a new phase. Never raises an error."""
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
        """Renew the hold's beat before the ranks start. Returns an error if the renewal may come
        too late. When the hold's lease ends, the publisher clears the hold and wakes vLLM. Raises
        SpoolUnusable; after this error, the caller may call the method again.
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
        """Remove the hold once no more than `floor` (bytes by device UUID) is in use, and wait
        until the publisher has woken vLLM.

        Returns the fields of the event `woken`: bytes in use and seconds; None if there was no vLLM
        to wake. Raises SpoolUnusable; after this error, the caller must call `wake_vllm` again.
        """
        hold = self._hold
        if hold is None:
            return None
        if hold.floor and not self._wait_until_released(hold, floor):
            # The hold stays. After this runner has ended, the publisher waits until the memory is
            # free and then wakes vLLM.
            self._hold = None
            return None
        begin = time.monotonic()
        self._spool.hold.clear()
        self._hold = None
        woken = self._wait_until_awake(begin)
        event = {"devices": self._devices.used(), "seconds": time.monotonic() - begin}
        return event if woken else None

    def _wait_until_released(self, hold: Hold, floor: Mapping[str, int]) -> bool:
        """Wait until no more than `floor` is in use, or until the hold's deadline. Returns False if
        the runner has to stop before the end of this wait."""
        logged = False
        while left := self._devices.busy(floor):
            if time.time() > hold.deadline:
                log.error(
                    "memory is not free and the deadline is over: waking vLLM nevertheless",
                    bytes_in_use=left,
                )
                return True
            if self._vllm() == "awake":
                # A vLLM was started or woken in spite of the hold, because the hold was not renewed
                # in time.
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

    def _wait_until_awake(self, since: float) -> bool:
        """Wait until the publisher reports that vLLM is awake. Returns False if vLLM has died or
        does not wake in time."""
        end, logged = since + WAKE_SECONDS, False
        while (state := self._vllm(since)) != "awake":
            if state == "gone":
                log.warning("the GPUs are free for the next vLLM", error=self._not_ready(state))
                return False
            if self._stop.requested:
                end = min(end, time.monotonic() + STOPPING_WAKE_SECONDS)
            failure = self._not_ready(state)
            if time.monotonic() > end:
                log.error("vLLM can't be woken; the publisher goes on trying", error=failure)
                return False
            if state == "asleep" and not logged:
                log.error("vLLM does not wake; the publisher tries again", error=failure)
                logged = True
            liveness.beat("runner")
            time.sleep(_ANSWER_SECONDS)
        return True


def _unavailable(message: str) -> JobError:
    return JobError(type="inference_unavailable", message=message, retriable=True)
