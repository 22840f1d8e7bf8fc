"""Controls a vLLM that shares its GPUs with the trainer. The vLLM sleeps while a trainer holds the
GPUs, and is awake at all other times.

Only the publisher puts vLLM to sleep and wakes it. The runner asks for the GPUs by writing a hold,
the record `jobs/hold.json`, with the phase `sleeping`. The runner gives the GPUs back by removing
the hold; a removal works even on a full volume. The publisher answers the runner in the record
`SharedVllm`. The publisher looks for a hold only between two passes of its loop, never while it
loads a step. The load of an adapter into a sleeping vLLM would crash the engine, so vLLM is never
put to sleep during a load.

A hold is live if its runner has the runner lock and has renewed the hold within
`TANDEM_LEASE_SECONDS` (`spool/locks.py`). A restarted runner has a new name, so the hold of the
previous runner is not live. While a hold is live, no program wakes vLLM, starts vLLM or loads an
adapter. The publisher wakes a sleeping vLLM if no hold is live. Before the publisher wakes vLLM,
the publisher waits until the GPU memory in use has fallen to the hold's `floor`, or until the
hold's deadline has passed. The `floor` is the number of bytes in use while vLLM sleeps and no rank
runs. If vLLM is already awake, the publisher removes the hold of a lost runner immediately, because
vLLM itself uses the memory. A restarted publisher continues from the hold and from the previous
publisher's answer. If vLLM still sleeps `TANDEM_VLLM_STALL_SECONDS` after the last hold,
`tandem up` restarts vLLM, because the publisher could not wake it.
"""

import time
from contextlib import suppress
from typing import Literal

from tandem.errors import SpoolUnusable, TandemError
from tandem.spool import Spool
from tandem.spool.inference import same_attempt
from tandem.spool.schema import Hold, HoldAnswer, SharedVllm
from tandem.system.gpus import Devices
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceUnavailable, VllmClient

log = Log("publisher")

_POLL_SECONDS = 0.05
_State = Literal["awake", "asleep", "gone"]


class LentGpus:
    def __init__(self, spool: Spool, client: VllmClient, devices: Devices) -> None:
        self._spool, self._client, self._devices = spool, client, devices
        # A publisher that was killed may already have answered the runner's request for the GPUs.
        before = spool.inference.shared()
        self._answer = before.answer if before is not None else None
        self._seen: Hold | None = None  # the hold that the last call of `turn` found
        self._trouble = ""

    def turn(self) -> str:
        """Put vLLM to sleep if a live hold asks for the GPUs; wake vLLM if no hold is live. Record
        vLLM's state. Returns why vLLM is not awake; empty if vLLM is awake and stays awake until
        the next call.

        Raises the errors of VllmClient if vLLM can't be woken.
        """
        looked = time.monotonic()
        self._seen = self._spool.hold.get()
        if (hold := self._spool.hold.live()) is not None:
            self._answer_hold(hold)
            self._say(looked, *self._state())
            return f"the trainer has the GPUs ({hold.phase}, job {hold.job})"
        self._answer = None
        try:
            why = self._ensure_awake(self._seen)
        except TandemError as error:
            gone = isinstance(error, InferenceUnavailable)
            self._say(looked, "gone" if gone else "asleep", str(error))
            raise
        if why:
            self._say(looked, "asleep", why)
        else:
            self._say(looked, *self._state())
        return why

    def wait(self, seconds: float) -> None:
        """Waits `seconds`, or until a runner asks for the GPUs or gives them back."""
        end = time.monotonic() + seconds
        with suppress(TandemError, OSError):  # the next call of `turn` reports the error
            while time.monotonic() < end and same_attempt(self._spool.hold.get(), self._seen):
                time.sleep(_POLL_SECONDS)
            return
        time.sleep(seconds)

    def _answer_hold(self, hold: Hold) -> None:
        """Puts vLLM to sleep if `hold` asks for the GPUs, and stores the answer to the runner. Each
        hold is answered only once: if vLLM dies after the answer, the vLLM that starts afterwards
        is not put to sleep."""
        if same_attempt(self._answer, hold):
            return
        self._answer = None
        if hold.phase == "sleeping":
            outcome, why = self._put_to_sleep()
            of = hold.model_dump(include={"runner", "job", "attempt"})
            self._answer = HoldAnswer(**of, outcome=outcome, why=why)
            log.info(f"a job asked for the GPUs: {outcome}", job=hold.job, why=why or None)

    def _put_to_sleep(self) -> tuple[Literal["asleep", "gone", "refused"], str]:
        """The outcome of the attempt to put vLLM to sleep, and the reason if vLLM does not
        sleep."""
        # A vLLM that is still starting has not seen this hold, and would be awake while the job has
        # the GPUs.
        if not self._client.healthy():
            return "refused", "vLLM stopped being ready"
        try:
            # vLLM may sleep already, because a killed publisher put it to sleep
            if not self._client.is_sleeping():
                self._client.sleep()
            if self._client.is_sleeping():
                return "asleep", ""
            failure = "it answered that it sleeps, and then that it is awake"
        except TandemError as error:
            failure = str(error)
        if self._client.healthy():
            return "refused", f"vLLM does not sleep: {failure}"
        return "gone", failure

    def _ensure_awake(self, hold: Hold | None) -> str:
        """Remove a hold on the GPUs that is not live, and wake vLLM. Returns the reason if vLLM
        can't be woken yet, and an empty string if vLLM is awake.

        The method wakes vLLM only if the GPU memory in use has fallen to the hold's `floor`, or if
        the hold's deadline has passed. If vLLM is already awake, the method does not wait, because
        vLLM itself uses the memory.
        """
        if hold is not None:
            # A hold without a `floor` was written before any rank had started, so no rank's memory
            # can be in use.
            late = time.time() > hold.deadline
            busy = self._devices.busy(hold.floor) if hold.floor and not late else {}
            if busy and self._state()[0] != "awake":
                return (
                    f"{hold.runner}, which held the GPUs for job {hold.job}, is lost, and {busy}"
                    " bytes are in use"
                )
            # The hold is removed before vLLM is woken. If vLLM can't be woken, the watchdog
            # restarts vLLM, but only while there is no hold. The publisher wakes vLLM even if the
            # volume refuses the removal of the hold.
            with suppress(SpoolUnusable):
                self._spool.hold.clear()
        if self._client.is_sleeping():
            told = hold.model_dump(include={"runner", "job", "phase"}) if hold is not None else {}
            log.info("no trainer holds the GPUs: waking vLLM", **told)
            self._client.wake_up()
            log.info("vLLM is awake")
        return ""

    def _state(self) -> tuple[_State, str]:
        """vLLM's state, and the reason if the state is `gone`."""
        try:
            if not self._client.healthy():
                return "gone", "it does not answer, or its engine is dead"
            return "asleep" if self._client.is_sleeping() else "awake", ""
        except TandemError as error:
            return "gone", str(error)

    def _say(self, looked: float, state: _State, why: str) -> None:
        now = time.monotonic()
        record = SharedVllm(state=state, why=why, looked=looked, beat=now, answer=self._answer)
        try:
            self._spool.inference.put_shared(record)
            self._trouble = ""
        except (TandemError, OSError) as error:
            if str(error) != self._trouble:
                log.error(f"the runner can't be told how vLLM is: {error}")
            self._trouble = str(error)
