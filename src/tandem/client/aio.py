"""The client for asyncio; what its methods do is said in `tandem.client.sync`, method by method."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import httpx

from tandem.client import calls
from tandem.client.calls import JOB_SECONDS, SERVED_SECONDS, LogPart, RLOptions, SFTOptions
from tandem.client.follow import Download, EventCursor
from tandem.client.memory import AttemptMemory, by_attempt
from tandem.client.sync import OnEvent
from tandem.client.wire import Call, Pauses, Reply, Steps, connection, refusal, send, unreachable
from tandem.controller.schemas import CheckpointInfo, JobStatus, RolledBack, RunStatus
from tandem.data.trajectories import Group, SFTExample
from tandem.spool.schema import TERMINAL, Event, JobState, LoraShape, Manifest, Served


class AsyncTandem:
    """As `tandem.client.Tandem`, with coroutines; use it in one event loop."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, *, patience: float = 30.0) -> None:
        self._http = httpx.AsyncClient(**connection(base_url, api_key))
        self._patience = patience

    @property
    def url(self) -> str:
        return str(self._http.base_url)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ runs

    async def create_run(
        self,
        name: str,
        *,
        base_model: str | None = None,
        lora: LoraShape | Mapping[str, Any] | None = None,
        weights: Literal["lora", "merged"] | None = None,
        seed: int | None = None,
    ) -> RunStatus:
        return await self._call(calls.create_run(name, base_model, lora, weights, seed))

    async def get_run(self, run: str) -> RunStatus:
        return await self._call(calls.get_run(run))

    async def list_runs(self) -> list[RunStatus]:
        return await self._call(calls.list_runs())

    async def fork(self, run: str, step: int, name: str) -> RunStatus:
        return await self._call(calls.fork(run, step, name))

    async def rollback(self, run: str, step: int) -> RolledBack:
        return await self._call(calls.rollback(run, step))

    async def wait_served(self, run: str, step: int, timeout: float = SERVED_SECONDS) -> Served:
        return await self._drive(calls.wait_served(run, step, timeout, self._patience))

    # ------------------------------------------------------------ training

    async def train_rl(
        self,
        run: str,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        wait: Literal["job", "served"] | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[RLOptions],
    ) -> JobStatus:
        return await self._finish(await self._call(calls.train_rl(run, groups, options)), wait, timeout, on_event)

    async def train_sft(
        self,
        run: str,
        examples: Sequence[SFTExample | Mapping[str, Any]],
        *,
        wait: Literal["job", "served"] | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[SFTOptions],
    ) -> JobStatus:
        return await self._finish(await self._call(calls.train_sft(run, examples, options)), wait, timeout, on_event)

    async def train(self, run: str, request: Mapping[str, Any]) -> JobStatus:
        return await self._call(calls.train(run, request))

    # ------------------------------------------------------------ jobs

    async def get_job(self, job: str) -> JobStatus:
        return await self._call(calls.get_job(job))

    async def list_jobs(
        self, run: str | None = None, states: Sequence[JobState] = (), limit: int = 200
    ) -> list[JobStatus]:
        return await self._call(calls.list_jobs(run, states, limit))

    async def cancel(self, job: str) -> JobStatus:
        return await self._call(calls.cancel(job))

    async def wait_job(self, job: str, timeout: float = JOB_SECONDS, on_event: OnEvent | None = None) -> JobStatus:
        until = time.monotonic() + timeout
        async for event in self.events(job, timeout=timeout):
            if on_event is not None:
                on_event(event)
        return calls.outcome(await self._drive(calls.ended(job, until, self._patience)))

    def events(self, job: str, after: int = -1, timeout: float = JOB_SECONDS) -> AsyncIterator[Event]:
        return self._events(EventCursor(job, after, True, timeout, self._patience))

    async def job_events(self, job: str, after: int = -1) -> list[Event]:
        return [e async for e in self._events(EventCursor(job, after, False, JOB_SECONDS, self._patience))]

    async def memory(self, job: str) -> list[AttemptMemory]:
        return by_attempt(await self.job_events(job))

    async def logs(self, job: str) -> str:
        return await self._drive(calls.log(job, self._patience))

    async def log_part(self, job: str, offset: int = 0, tail: int | None = None) -> LogPart:
        return await self._call(calls.log_part(job, offset, tail))

    # ------------------------------------------------------------ checkpoints

    async def checkpoints(self, run: str) -> list[CheckpointInfo]:
        return await self._call(calls.checkpoints(run))

    async def checkpoint(self, run: str, step: int) -> Manifest:
        return await self._call(calls.checkpoint(run, step))

    async def download(self, run: str, step: int, dest: Path | str) -> Manifest:
        pauses = Pauses(self._patience)
        with Download(Path(dest)) as download:
            while True:
                try:
                    path = calls.run_path(run, "checkpoints", str(step), "download")
                    async with self._http.stream("GET", path) as response:
                        if not response.is_success:
                            await response.aread()
                            raise refusal(response)
                        async for data in response.aiter_bytes():
                            download.write(data)
                    return await asyncio.to_thread(download.finish)
                except httpx.TransportError as error:
                    if (pause := pauses.next()) is None:
                        raise unreachable(error) from error
                await asyncio.sleep(pause)
                download.restart()

    # ------------------------------------------------------------ drivers

    async def _call[T](self, call: Call[T]) -> T:
        return await self._drive(send(call, self._patience))

    async def _drive[T](self, steps: Steps[T]) -> T:
        reply: Reply = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Call):
                try:
                    reply = await self._http.request(**step.request())
                except httpx.TransportError as error:
                    reply = error
            else:
                await asyncio.sleep(step)
                reply = None

    async def _events(self, cursor: EventCursor) -> AsyncIterator[Event]:
        while True:
            failure: httpx.TransportError | None = None
            try:
                async with self._http.stream(**cursor.request()) as response:
                    if not response.is_success:
                        await response.aread()
                        raise refusal(response)
                    async for data in response.aiter_bytes():
                        for event in cursor.feed(data):
                            yield event
                if cursor.done:
                    return
                if (await self.get_job(cursor.job)).state in TERMINAL:
                    cursor.drain()
                    continue
            except httpx.TransportError as error:
                failure = error
            await asyncio.sleep(cursor.pause_after(failure))

    async def _finish(
        self, status: JobStatus, wait: Literal["job", "served"] | None, timeout: float, on_event: OnEvent | None
    ) -> JobStatus:
        if wait is None:
            return status
        status = await self.wait_job(status.id, timeout, on_event)
        if wait == "served":
            await self.wait_served(status.run, status.spec.base_step + 1)
        return status
