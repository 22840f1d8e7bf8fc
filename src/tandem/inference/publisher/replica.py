"""The publisher's records for one of several vLLM servers, and the permission with which this vLLM
answers requests.

A replica is *ready* when it serves every announced step. The replica's vLLM answers requests only
while the replica is ready (`inference.server.middleware.readiness`). A step is announced only after
every ready replica has verified this step or, with merged weights, a newer step. One lock protects
three actions: a replica becomes ready, a replica stops being ready, and a step is announced. A
ready replica therefore has every announced step that a client may ask for. With merged weights, no
client gets an answer from a step older than the announced step.

vLLM's permission to answer requests expires before the other replicas consider this replica dead.
If a publisher stops or loses the volume, its vLLM therefore stops answering requests.
"""

import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from pydantic import ValidationError

from tandem.config import Settings
from tandem.errors import TandemError
from tandem.inference.publisher.checkpoint_loader import ServedCheckpoint
from tandem.inference.publisher.records import tell_job
from tandem.spool import Spool
from tandem.spool.replicas import DEAD_SECONDS
from tandem.spool.schema import Refused, Replica, ReplicaServed, Served, VllmPlace
from tandem.system.environment import leaving_file
from tandem.system.logs import Log
from tandem.vllm_client.client import InferenceGone, VllmClient
from tandem.vllm_client.names import READY_MARGIN_SECONDS

log = Log("publisher")

BEAT_SECONDS = 2.0
"""Seconds between two renewals of a living replica's record, and between two reads of the other
replicas' records."""
LEASE_SECONDS = DEAD_SECONDS / 2
"""Seconds for which vLLM answers requests after the last renewal of its permission."""
DRAIN_SECONDS = READY_MARGIN_SECONDS
"""Seconds for which vLLM still answers requests after the proxy was told to send it no more
requests."""


class Member:
    """The records of one of several vLLM servers. A thread renews this replica's record, even while
    vLLM loads a step.

    Args:
        client: the client of this replica's vLLM.
        settings: the settings of this replica; `replica` must be set.
        place: the address to which ranks send whole weights for this vLLM; None: ranks send no
        weights.
    """

    def __init__(
        self, spool: Spool, client: VllmClient, settings: Settings, place: VllmPlace | None = None
    ) -> None:
        assert settings.replica is not None
        self._spool, self._replicas, self._client = spool, spool.replicas, client
        self._id, self._seconds = settings.replica, settings.publish_seconds
        self._weights = settings.weights
        self._record = Replica(
            replica=self._id,
            url=client.url,
            host=socket.gethostname(),
            place=place,
            pid=os.getpid(),
            started=time.time(),
            beat=time.time(),
            why="it starts",
        )
        # The time of the record's last write and the end of vLLM's permission, on this machine's
        # monotonic clock. The vLLM on the same machine uses the same clock.
        self._beaten = self._lease = 0.0
        # The ids of two vLLM processes: the process that answered last, and the process that became
        # ready.
        self._asked = self._joined = ""
        # Run -> step -> a monotonic time, for the newer steps that only other replicas serve. The
        # stored time is the time at which this replica first saw that it lacks the step.
        self._behind: dict[str, dict[int, float]] = {}
        # For each run, the verified steps for which the event `served` was written to the step's
        # job.
        self._told: dict[str, set[tuple[int, str]]] = {}
        self._trouble = ""
        with self._replicas.lock():
            self._write()
            self._drop("it starts")
        self._ended = threading.Event()
        threading.Thread(target=self._beat_forever, name="replica", daemon=True).start()

    def stop(self) -> None:
        """Stop renewing this replica's record, as if this process had died."""
        self._ended.set()

    def served(self, run: str) -> Served | None:
        return next(iter(self._replicas.serves(run, self._id).steps), None)

    def put(self, run: str, serves: Sequence[Served], refused: Refused | None) -> None:
        record = ReplicaServed(steps=tuple(serves), refused=refused)
        with self._replicas.lock():
            self._replicas.put_serves(run, self._id, record)
            self._announce(run)

    def tell(self, run: str, served: ServedCheckpoint) -> None:
        """Does nothing, because the replica that announces a step writes the event `served` to the
        step's job."""

    def keep(self, run: str) -> set[str]:
        announced = self._spool.served.get(run)
        return {announced.model} if announced is not None else set()

    def unload(self, run: str, name: str) -> bool:
        with self._replicas.lock():
            announced, own = self._spool.served.get(run), self._replicas.serves(run, self._id)
            if (
                announced is not None
                and announced.model == name
                and self._spool.checkpoints.has(run, announced)
            ):
                return False
            left = tuple(served for served in own.steps if served.model != name)
            self._replicas.put_serves(run, self._id, own.model_copy(update={"steps": left}))
        return True

    def withdraw(self, listed: Collection[str]) -> None:
        with self._replicas.lock():
            if not listed:
                self._drop("its vLLM has nothing loaded")
            for run in self._spool.runs.names():
                own = self._replicas.serves(run, self._id)
                left = tuple(served for served in own.steps if served.model in listed)
                if left != own.steps:
                    names = ", ".join(served.model for served in own.steps)
                    log.warning("vLLM does not have all steps any more that it served", had=names)
                    record = own.model_copy(update={"steps": left})
                    self._replicas.put_serves(run, self._id, record)
                self._announce(run)
            self._replicas.withdraw_unserved(listed)

    def turn_begins(self) -> None:
        self._asked = self._client.ready_instance()
        if self._record.ready and self._asked != self._joined:
            with self._replicas.lock():
                self._drop("its vLLM has started again")

    def turn_done(self, runs: Collection[str]) -> None:
        """Mark this replica as ready if it serves the announced steps."""
        if self._record.ready:
            return
        with self._replicas.lock():
            why = self._leaves() or self._lag() or next(filter(None, map(self._missing, runs)), "")
            if not why:
                self._record = self._record.model_copy(update={"ready": True})
                self._joined = self._asked
                self._write()
                if not self._renew():
                    why = "its vLLM does not answer"
            self._set(ready=not why, why=why)
            for run in runs:
                self._announce(run)

    def _missing(self, run: str) -> str:
        """The reason why this replica does not serve all announced steps; empty if it serves
        them."""
        announced = self._spool.served.get(run)
        if announced is None or not self._spool.checkpoints.has(run, announced):
            return ""
        own = self._replicas.serves(run, self._id)
        if self._weights == "merged":
            has = announced.step <= self._newest(run, own)
        else:
            key = announced.step, announced.checkpoint
            has = key in [(served.step, served.checkpoint) for served in own.steps]
        refused = own.refused
        why = f": it refused {run}@{refused.step}: {refused.reason}" if refused else ""
        return "" if has else f"it does not serve {announced.model}, which is announced{why}"

    def _beat_forever(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.beat()
                self._trouble = ""
            except (TandemError, ValidationError, OSError) as error:
                if str(error) != self._trouble:
                    log.error(f"the replica's record can't be renewed: {error}")
                self._trouble = str(error)

    def beat(self) -> None:
        """Renew this replica's record. Mark the replica as not ready if its server is about to be
        stopped, or if the replica lags behind the other replicas. Announce, for each run, the steps
        on which the ready replicas agree."""
        self._spool.check()
        with self._replicas.lock():
            if self._record.ready and time.monotonic() - self._beaten > DEAD_SECONDS - 5:
                self._leave("its record was not renewed, and the others went on without it")
            lag = self._leaves() or self._lag()
            if self._record.ready and lag:
                self._leave(lag)
            self._write()
            if self._record.ready and not lag and not self._renew():
                self._set(ready=False, why="its vLLM does not answer")
            for run in self._spool.runs.names():
                self._announce(run)
            self._replicas.forget_dead()

    def _leaves(self) -> str:
        """The reason to stop answering requests if the server is about to be stopped
        (`supervise.drain`), or an empty string."""
        with suppress(OSError, ValueError):
            if time.time() < float(leaving_file(self._spool.root).read_text()):
                return "it is about to be stopped"
        return ""

    def _lag(self) -> str:
        """The reason why the other replicas should continue without this replica; empty if there is
        no such reason."""
        others = [
            name
            for name, record in self._replicas.living().items()
            if record.ready and name != self._id
        ]
        for run in self._spool.runs.names():
            own = self._replicas.serves(run, self._id)
            theirs = {name: self._newest(run, self._replicas.serves(run, name)) for name in others}
            ahead, newest = max(theirs.values(), default=-1), self._newest(run, own)
            known, now = self._behind.get(run, {}), time.monotonic()
            if ahead <= newest:
                self._behind.pop(run, None)
                continue
            self._behind[run] = known = {
                step: since for step, since in known.items() if newest < step <= ahead
            } | ({} if ahead in known else {ahead: now})
            if own.refused is not None and own.refused.step == ahead:
                return f"it refused {run}@{ahead}, which others serve: {own.refused.reason}"
            if (late := now - min(known.values())) > self._seconds:
                return (
                    f"it has no {run}@{min(known)} {late:.0f} s after others had"
                    f" (TANDEM_PUBLISH_SECONDS={self._seconds:g})"
                )
        return ""

    def _newest(self, run: str, record: ReplicaServed) -> int:
        """The newest step in `record` that no rollback has discarded; -1 if there is none."""
        has = self._spool.checkpoints.has
        return max((served.step for served in record.steps if has(run, served)), default=-1)

    def _leave(self, why: str) -> None:
        """Take this replica out of service: first inform the proxy, then make vLLM refuse requests,
        and finally record that this replica is not ready. The other replicas don't wait for a
        replica that is not ready."""
        self._tell_vllm(min(self._lease, time.monotonic() + DRAIN_SECONDS))
        if time.monotonic() >= self._lease:
            self._set(ready=False, why=why)

    def _drop(self, why: str) -> None:
        """Mark this replica as not ready immediately, because vLLM has nothing loaded."""
        self._tell_vllm(0.0)
        self._set(ready=False, why=why)

    def _set(self, *, ready: bool, why: str) -> None:
        if (self._record.ready, self._record.why) == (ready, why):
            return
        log.info("ready" if ready else f"not ready: {why}", replica=self._id)
        self._record = self._record.model_copy(update={"ready": ready, "why": why})
        self._write()

    def _write(self) -> None:
        self._beaten = time.monotonic()
        self._record = self._record.model_copy(update={"beat": time.time()})
        self._replicas.put(self._record)

    def _renew(self) -> bool:
        """Let vLLM answer requests until LEASE_SECONDS after the last write of the record. Returns
        False if vLLM can't be reached, or if another vLLM process has replaced the process that
        became ready."""
        return self._tell_vllm(self._beaten + LEASE_SECONDS, self._joined)

    def _tell_vllm(self, until: float, instance: str | None = None) -> bool:
        try:
            known = self._client.set_ready(until, instance)
        except InferenceGone:
            self._lease = 0.0
            return False
        except TandemError as error:
            log.warning("vLLM was not told until when it is ready", error=error)
            return time.monotonic() < self._lease
        self._lease = until if known else 0.0
        return known

    def _announce(self, run: str) -> None:
        try:
            one_step = self._spool.runs.get(run).weights == "merged"
            found = self._replicas.announce(run, one_step=one_step)
            told = self._told.setdefault(run, set())
            for served in found.verified:
                if (key := (served.step, served.checkpoint)) not in told:
                    job = self._spool.checkpoints.manifest(run, served.step).job
                    if job is not None:
                        tell_job(self._spool, job, served)
                    told.add(key)
            told &= {(served.step, served.checkpoint) for served in found.verified}
        except (TandemError, ValidationError) as error:
            log.warning("a step can't be announced", run=run, error=error)
