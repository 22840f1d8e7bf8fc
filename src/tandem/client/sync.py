"""The client for ordinary code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import httpx

from tandem.client import calls
from tandem.client.calls import JOB_SECONDS, SERVED_SECONDS, LogPart, RLOptions, SFTOptions
from tandem.client.follow import Download, EventCursor
from tandem.client.memory import AttemptMemory, by_attempt
from tandem.client.wire import Call, Pauses, Reply, Steps, connection, refusal, send, unreachable
from tandem.controller.schemas import CheckpointInfo, JobStatus, RolledBack, RunStatus
from tandem.data.trajectories import Group, SFTExample
from tandem.spool.schema import TERMINAL, Event, JobState, LoraShape, Manifest, Served

OnEvent = Callable[[Event], object]


class Tandem:
    """Talks to a controller; may be used by several threads.

    `base_url` and `api_key` default to TANDEM_URL (else http://127.0.0.1:8080) and TANDEM_API_KEY or the file that
    TANDEM_API_KEY_FILE names. `patience`: for how many seconds a controller that doesn't answer is asked again.
    Refusals are raised as the classes of `tandem.errors`, with the offending `field`; Unreachable when patience ends.
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, patience: float = 30.0) -> None:
        self._http = httpx.Client(**connection(base_url, api_key))
        self._patience = patience

    @property
    def url(self) -> str:
        """Where the controller is looked for."""
        return str(self._http.base_url)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ runs

    def create_run(
        self,
        name: str,
        *,
        base_model: str | None = None,
        lora: LoraShape | Mapping[str, Any] | None = None,
        weights: Literal["lora", "merged"] | None = None,
        seed: int | None = None,
    ) -> RunStatus:
        """Create a run; the same again is the same run. Its step 0 equals the base model."""
        return self._call(calls.create_run(name, base_model, lora, weights, seed))

    def get_run(self, run: str) -> RunStatus:
        """A run's specification, newest step, what is served, and the ids of its jobs under way."""
        return self._call(calls.get_run(run))

    def list_runs(self) -> list[RunStatus]:
        """Every run."""
        return self._call(calls.list_runs())

    def fork(self, run: str, step: int, name: str) -> RunStatus:
        """A new run whose step 0 is a checkpoint of `run`, optimizer state included."""
        return self._call(calls.fork(run, step, name))

    def rollback(self, run: str, step: int) -> RolledBack:
        """Make `step` the newest again. Not sent twice: after Unreachable, look before you ask again."""
        return self._call(calls.rollback(run, step))

    def wait_served(self, run: str, step: int, timeout: float = SERVED_SECONDS) -> Served:
        """Wait until vLLM serves `<run>@<step>`, or a later step, verified; raises NotServed."""
        return self._drive(calls.wait_served(run, step, timeout, self._patience))

    # ------------------------------------------------------------ training

    def train_rl(
        self,
        run: str,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        wait: Literal["job", "served"] | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[RLOptions],
    ) -> JobStatus:
        """Queue an RL job. `wait`: return when it has succeeded ("job"), or when its checkpoint is served ("served").

        Raises NothingToLearn where no group has any variance in its rewards, JobFailed, NotServed, TimeoutError after
        `timeout` seconds of waiting for the job.
        """
        return self._finish(self._call(calls.train_rl(run, groups, options)), wait, timeout, on_event)

    def train_sft(
        self,
        run: str,
        examples: Sequence[SFTExample | Mapping[str, Any]],
        *,
        wait: Literal["job", "served"] | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[SFTOptions],
    ) -> JobStatus:
        """Queue an SFT job; otherwise as `train_rl`."""
        return self._finish(self._call(calls.train_sft(run, examples, options)), wait, timeout, on_event)

    def train(self, run: str, request: Mapping[str, Any]) -> JobStatus:
        """Queue the job of a whole request, as it would be sent by HTTP (`kind` says which)."""
        return self._call(calls.train(run, request))

    # ------------------------------------------------------------ jobs

    def get_job(self, job: str) -> JobStatus:
        """A job as it is now."""
        return self._call(calls.get_job(job))

    def list_jobs(self, run: str | None = None, states: Sequence[JobState] = (), limit: int = 200) -> list[JobStatus]:
        """The newest `limit` jobs, oldest first; of one run, in some states."""
        return self._call(calls.list_jobs(run, states, limit))

    def cancel(self, job: str) -> JobStatus:
        """Ask for a job to be stopped; one that has ended stays as it is."""
        return self._call(calls.cancel(job))

    def wait_job(self, job: str, timeout: float = JOB_SECONDS, on_event: OnEvent | None = None) -> JobStatus:
        """Wait until a job has ended; raises JobFailed with the reason and the end of its log, TimeoutError."""
        until = time.monotonic() + timeout
        for event in self.events(job, timeout=timeout):
            if on_event is not None:
                on_event(event)
        return calls.outcome(self._drive(calls.ended(job, until, self._patience)))

    def events(self, job: str, after: int = -1, timeout: float = JOB_SECONDS) -> Iterator[Event]:
        """A job's events from the beginning (or after a seq) to its end, as they happen; reconnects where it must."""
        return self._events(EventCursor(job, after, True, timeout, self._patience))

    def job_events(self, job: str, after: int = -1) -> list[Event]:
        """The events that there are now, `served` included."""
        return list(self._events(EventCursor(job, after, False, JOB_SECONDS, self._patience)))

    def memory(self, job: str) -> list[AttemptMemory]:
        """What each rank held after each phase and what was left on the devices, by attempt, as far as it is known."""
        return by_attempt(self.job_events(job))

    def logs(self, job: str) -> str:
        """What the job's ranks printed so far."""
        return self._drive(calls.log(job, self._patience))

    def log_part(self, job: str, offset: int = 0, tail: int | None = None) -> LogPart:
        """The log from a byte on, or its last `tail` bytes; at most 1 MiB."""
        return self._call(calls.log_part(job, offset, tail))

    # ------------------------------------------------------------ checkpoints

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """The run's chain, oldest first."""
        return self._call(calls.checkpoints(run))

    def checkpoint(self, run: str, step: int) -> Manifest:
        """A checkpoint's manifest."""
        return self._call(calls.checkpoint(run, step))

    def download(self, run: str, step: int, dest: Path | str) -> Manifest:
        """Fetch a checkpoint into the new directory `dest` (PEFT loads it); every file's SHA-256 is checked."""
        pauses = Pauses(self._patience)
        with Download(Path(dest)) as download:
            while True:
                try:
                    path = calls.run_path(run, "checkpoints", str(step), "download")
                    with self._http.stream("GET", path) as response:
                        if not response.is_success:
                            response.read()
                            raise refusal(response)
                        for data in response.iter_bytes():
                            download.write(data)
                    return download.finish()
                except httpx.TransportError as error:
                    if (pause := pauses.next()) is None:
                        raise unreachable(error) from error
                time.sleep(pause)
                download.restart()

    # ------------------------------------------------------------ drivers

    def _call[T](self, call: Call[T]) -> T:
        return self._drive(send(call, self._patience))

    def _drive[T](self, steps: Steps[T]) -> T:
        reply: Reply = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Call):
                try:
                    reply = self._http.request(**step.request())
                except httpx.TransportError as error:
                    reply = error
            else:
                time.sleep(step)
                reply = None

    def _events(self, cursor: EventCursor) -> Iterator[Event]:
        while True:
            failure: httpx.TransportError | None = None
            try:
                with self._http.stream(**cursor.request()) as response:
                    if not response.is_success:
                        response.read()
                        raise refusal(response)
                    for data in response.iter_bytes():
                        yield from cursor.feed(data)
                if cursor.done:
                    return
                if self.get_job(cursor.job).state in TERMINAL:
                    cursor.drain()
                    continue
            except httpx.TransportError as error:
                failure = error
            time.sleep(cursor.pause_after(failure))

    def _finish(
        self, status: JobStatus, wait: Literal["job", "served"] | None, timeout: float, on_event: OnEvent | None
    ) -> JobStatus:
        if wait is None:
            return status
        status = self.wait_job(status.id, timeout, on_event)
        if wait == "served":
            self.wait_served(status.run, status.spec.base_step + 1)
        return status
