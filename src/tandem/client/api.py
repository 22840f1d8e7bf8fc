"""The clients' methods, which `AsyncTandem` inherits and `Tandem` runs over blocking I/O."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

import httpx

from tandem.client.download import partial_directory, unpack
from tandem.client.http import (
    CONNECT_SECONDS,
    Backoff,
    Requests,
    events_of,
    raise_if_failed,
    whole_lines,
)
from tandem.client.memory import AttemptMemory, by_attempt
from tandem.client.types import DPOOptions, LogPart, OnEvent, RLOptions, SFTOptions, Wait
from tandem.controller.schemas import (
    LOG_OFFSET_HEADER,
    CheckpointInfo,
    JobStatus,
    RolledBack,
    RunStatus,
)
from tandem.data.examples import PreferencePair, Rendering, SFTExample
from tandem.data.inputs import Group
from tandem.errors import Conflict, NotServed, StepRefused, TandemError
from tandem.spool.fs import new_ulid
from tandem.spool.schema import TERMINAL, Event, JobState, LoraShape, Manifest, Served

JOB_SECONDS = 24 * 3600.0
SERVED_SECONDS = 600.0
DELETE_SECONDS = 120.0
# The controller answers a training request once it has packed its batch and all earlier batches.
_PACKING_SECONDS = 900.0
_FORK_SECONDS = 4 * 3600.0  # the controller copies and hashes the checkpoint before it answers
_SERVED_POLL_SECONDS = 0.25
_ENDED_POLL_SECONDS = 0.05
# The controller sends a keep-alive every 10 s; after 35 s without one, the connection is broken.
_SILENCE = httpx.Timeout(35.0, connect=CONNECT_SECONDS)
# Pause before reopening a stream that the controller ended, for example because it restarts.
_REOPEN_SECONDS = 0.5
_PAGE = 500


class Api(Requests):
    """The controller's API: the methods of both clients. A refusal of the controller is raised as a
    class of `tandem.errors`, with the offending `field`. Raises Unreachable when the controller
    has not answered for `patience` seconds."""

    async def create_run(
        self,
        name: str,
        *,
        base_model: str | None = None,
        trainable: Literal["lora", "full"] | None = None,
        lora: LoraShape | Mapping[str, Any] | None = None,
        weights: Literal["adapter", "merged"] | None = None,
        seed: int | None = None,
    ) -> RunStatus:
        """Create a run. Step 0 of the run equals the base model. Creating the same run again
        changes nothing. For an argument that is None, the controller uses its default.

        Args:
            trainable: "full": all weights are trained, and `lora` must be None.
            weights: "adapter": vLLM loads adapters; "merged": vLLM's own weights become the run's.
            seed: seeds step 0's adapter and the order of each job's rows; from 0 to 2^63 - 1.
        """
        if isinstance(lora, LoraShape):
            lora = lora.model_dump(exclude_unset=True)  # the controller chooses the default targets
        body = {
            "name": name,
            "base_model": base_model,
            "trainable": trainable,
            "weights": weights,
            "seed": seed,
        }
        return await self._call(RunStatus, "POST", "runs", body={**body, "lora": lora})

    async def get_run(self, run: str) -> RunStatus:
        """A run's specification, its newest step, its served step, its queued and running jobs."""
        return await self._call(RunStatus, "GET", "runs", run)

    async def list_runs(self) -> list[RunStatus]:
        """All runs, in the order of their names."""
        runs: list[RunStatus] = []
        params: dict[str, Any] = {"limit": _PAGE}
        while page := await self._call(list[RunStatus], "GET", "runs", params=params):
            runs += page
            params["after"] = runs[-1].spec.name
        return runs

    async def fork(self, run: str, step: int, name: str) -> RunStatus:
        """Create the run `name`, whose step 0 is checkpoint `step` of `run`, optimizer included."""
        body = {"step": step, "name": name}
        return await self._call(
            RunStatus, "POST", "runs", run, "fork", body=body, seconds=_FORK_SECONDS
        )

    async def delete_run(
        self, run: str, *, cancel_jobs: bool = False, timeout: float = DELETE_SECONDS
    ) -> None:
        """Delete a run with its checkpoints and ended jobs; vLLM unloads the run's steps. The
        deletion can't be undone.

        Raises Conflict while the run has queued or running jobs. `cancel_jobs`: first cancel the
        run's jobs, and wait up to `timeout` seconds until the jobs have ended. A request that may
        have arrived is not repeated: after Unreachable, check whether the run still exists.
        """
        until = time.monotonic() + timeout
        params = {"cancel_jobs": cancel_jobs}
        while True:
            try:
                await self._request("DELETE", "runs", run, params=params, idempotent=False)
                return
            except Conflict:
                if not cancel_jobs or time.monotonic() >= until:
                    raise
            await self._http.sleep(_SERVED_POLL_SECONDS)

    async def pin(self, run: str, step: int) -> None:
        """Keep a checkpoint, whatever TANDEM_KEEP_CHECKPOINTS says."""
        await self._request("PUT", "runs", run, "checkpoints", str(step), "pin")

    async def unpin(self, run: str, step: int) -> None:
        """Undo `pin`. A step that is not pinned stays as it is."""
        await self._request("DELETE", "runs", run, "checkpoints", str(step), "pin")

    async def delete_checkpoint(self, run: str, step: int) -> None:
        """Delete a checkpoint; a request that may have arrived is not repeated. Raises Conflict for
        step 0, the newest step, and a step that is pinned, served or needed by a job."""
        await self._request("DELETE", "runs", run, "checkpoints", str(step), idempotent=False)

    async def rollback(self, run: str, step: int) -> RolledBack:
        """Make `step` the newest step; a request that may have arrived is not repeated."""
        return await self._call(
            RolledBack, "POST", "runs", run, "rollback", body={"step": step}, idempotent=False
        )

    async def wait_served(self, run: str, step: int, timeout: float = SERVED_SECONDS) -> Served:
        """Wait until vLLM serves a step that the publisher has verified: `step` or a later step.

        Raises StepRefused if the publisher refused the step, and NotServed after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            status = await self.get_run(run)
            served = status.served
            # After a rollback, `served` names a discarded step until vLLM loads another step.
            if served is not None and served.step >= step and status.served_in_chain:
                return served
            # The publisher refused all steps after the served step, up to step `no.step`.
            if (no := status.refused_step()) and step <= no.step <= status.newest_step:
                reason = f"the publisher refused {run}@{no.step}: {no.reason}"
                raise StepRefused(reason, served=served.step if served else None)
            if time.monotonic() >= until:
                now = (
                    f"vLLM serves {run}@{served.step}"
                    if served
                    else "vLLM serves no step of this run"
                )
                raise NotServed(
                    f"{run}@{step} was not served within {timeout:g} s ({now}; the newest step is "
                    f"{status.newest_step}); check that vLLM and the publisher run"
                )
            await self._http.sleep(_SERVED_POLL_SECONDS)

    async def train_rl(
        self,
        run: str,
        groups: Sequence[Group | Mapping[str, Any]],
        *,
        wait: Wait | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[RLOptions],
    ) -> JobStatus:
        """Queue an RL job. Raises NothingToLearn if no group has any variance in its rewards. If
        `wait` is given, also raises JobFailed, NotServed and TimeoutError.

        Args:
            wait: "job": return when the job has succeeded. "served": return when the job's
                checkpoint is served. None: return as soon as the job is queued.
            timeout: TimeoutError is raised after this many seconds of waiting for the job.
            on_event: called with each event of the job while this method waits for it.
        """
        request = {"kind": "rl", "groups": groups, **options}
        return await self._train(run, request, wait, timeout, on_event)

    async def train_sft(
        self,
        run: str,
        examples: Sequence[SFTExample | Mapping[str, Any]],
        *,
        wait: Wait | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[SFTOptions],
    ) -> JobStatus:
        """Queue an SFT job; the other arguments are those of `train_rl`."""
        request = {"kind": "sft", "examples": examples, **options}
        return await self._train(run, request, wait, timeout, on_event)

    async def train_dpo(
        self,
        run: str,
        pairs: Sequence[PreferencePair | Mapping[str, Any]],
        *,
        wait: Wait | None = None,
        timeout: float = JOB_SECONDS,
        on_event: OnEvent | None = None,
        **options: Unpack[DPOOptions],
    ) -> JobStatus:
        """Queue a job of preference pairs; the other arguments are those of `train_rl`."""
        request = {"kind": "dpo", "pairs": pairs, **options}
        return await self._train(run, request, wait, timeout, on_event)

    async def _train(
        self,
        run: str,
        request: Mapping[str, Any],
        wait: Wait | None,
        timeout: float,
        on_event: OnEvent | None,
    ) -> JobStatus:
        job = await self.train(run, request)
        if wait is not None:
            job = await self.wait_job(job.id, timeout, on_event)
        if wait == "served":
            await self.wait_served(run, job.spec.base_step + 1)
        return job

    async def train(self, run: str, request: Mapping[str, Any]) -> JobStatus:
        """Queue a job. `request`: the request's whole body, in the form of the HTTP API (`kind` is
        "rl", "sft" or "dpo")."""
        # A request that is repeated after a lost answer has the same id, so it makes no second job.
        body = {**request, "id": request.get("id") or new_ulid()}
        return await self._call(
            JobStatus, "POST", "runs", run, "train", body=body, seconds=_PACKING_SECONDS
        )

    async def render(
        self, examples: Sequence[SFTExample] = (), pairs: Sequence[PreferencePair] = ()
    ) -> list[Rendering]:
        """How each example, and then each pair, would be trained; at most 1000 of each kind."""
        body = {
            name: [one.model_dump(exclude_none=True) for one in ones]
            for name, ones in (("examples", examples), ("pairs", pairs))
        }
        return await self._call(
            list[Rendering], "POST", "data", "render", body=body, seconds=_PACKING_SECONDS
        )

    async def get_job(self, job: str) -> JobStatus:
        """A job's present state."""
        return await self._call(JobStatus, "GET", "jobs", job)

    async def list_jobs(
        self,
        run: str | None = None,
        states: Sequence[JobState] = (),
        limit: int = 200,
        before: str | None = None,
    ) -> list[JobStatus]:
        """The newest `limit` jobs (at most 1000), sorted from the oldest to the newest. `run` and
        `states` filter the jobs. `before` is the id of a job: only older jobs are listed."""
        params = {"run": run, "state": list(states), "limit": limit, "before": before}
        return await self._call(list[JobStatus], "GET", "jobs", params=params)

    async def cancel(self, job: str) -> JobStatus:
        """Ask the controller to stop a job. A job that has ended stays as it is."""
        return await self._call(JobStatus, "POST", "jobs", job, "cancel")

    async def wait_job(
        self, job: str, timeout: float = JOB_SECONDS, on_event: OnEvent | None = None
    ) -> JobStatus:
        """Wait until a job has succeeded. Raises JobFailed, with the reason and the end of the
        job's log, or TimeoutError."""
        until = time.monotonic() + timeout
        async for event in self.events(job, timeout=timeout):
            if on_event is not None:
                on_event(event)
        # The terminal event comes a moment before the terminal state.
        while (status := await self.get_job(job)).state not in TERMINAL:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"job {job} is still {status.state} after {timeout:g} s; it goes on"
                )
            await self._http.sleep(_ENDED_POLL_SECONDS)
        raise_if_failed(status)
        return status

    async def events(
        self, job: str, after: int = -1, timeout: float = JOB_SECONDS
    ) -> AsyncGenerator[Event, None]:
        """Yields a job's events up to the terminal event. Reconnects if a connection breaks.

        Args:
            after: only events with a higher `seq` are returned; -1: all events.
            timeout: seconds after which TimeoutError is raised.
        """
        until, backoff, ended = time.monotonic() + timeout, Backoff(self._patience), False
        while not ended:
            pause = _REOPEN_SECONDS
            try:
                async with self._stream(
                    "jobs", job, "events", params={"after": after}, timeout=_SILENCE
                ) as chunks:
                    async for content in whole_lines(chunks):
                        backoff.reset()
                        for event in events_of(content):
                            after, ended = event.seq, ended or event.type in TERMINAL
                            yield event
                        if not ended and time.monotonic() > until:
                            break  # The check also runs after keep-alives.
                # The writer of the events was killed before it wrote the terminal event.
                if not ended and (await self.get_job(job)).state in TERMINAL:
                    ended = True
                    for event in await self.job_events(job, after):
                        yield event
            except TandemError as error:
                if not error.retriable:
                    raise
                pause = backoff.next(error)
            if not ended:
                if time.monotonic() > until:
                    raise TimeoutError(f"job {job} did not end within {timeout:g} s; it goes on")
                await self._http.sleep(pause)

    async def job_events(self, job: str, after: int = -1) -> list[Event]:
        """The job's events so far, including `served`, which comes after the terminal event."""
        response = await self._request(
            "GET", "jobs", job, "events", params={"wait": False, "after": after}
        )
        return events_of(response.content)

    async def memory(self, job: str) -> list[AttemptMemory]:
        """Each attempt's memory per rank and phase, and the memory left in use on the devices."""
        return by_attempt(await self.job_events(job))

    async def logs(self, job: str) -> str:
        """The whole output of the job's ranks."""
        data = b""
        while (part := await self.log_part(job, len(data))).data:
            data += part.data
        return data.decode(errors="replace")

    async def log_part(self, job: str, offset: int = 0, tail: int | None = None) -> LogPart:
        """The job's log from byte `offset` on, or its last `tail` bytes; at most 1 MiB."""
        response = await self._request(
            "GET", "jobs", job, "log", params={"offset": offset, "tail": tail}
        )
        return LogPart(response.content, int(response.headers[LOG_OFFSET_HEADER]))

    async def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """The run's checkpoints, oldest first."""
        found: list[CheckpointInfo] = []
        params = {"limit": _PAGE}
        while page := await self._call(
            list[CheckpointInfo], "GET", "runs", run, "checkpoints", params=params
        ):
            found = page + found
            params["before"] = found[0].step
        return found

    async def checkpoint(self, run: str, step: int) -> Manifest:
        """A checkpoint's manifest."""
        return await self._call(Manifest, "GET", "runs", run, "checkpoints", str(step))

    async def download(
        self, run: str, step: int, dest: Path | str, *, weights_only: bool = False
    ) -> Manifest:
        """Fetch a checkpoint into the new directory `dest`. PEFT can load the directory; if the run
        trains all weights, transformers can load it. Checks each file's SHA-256. `weights_only`:
        without the optimizer's state."""
        backoff, target, most = Backoff(self._patience), Path(dest), 0
        parts, params = (
            ("runs", run, "checkpoints", str(step), "download"),
            {"weights_only": weights_only},
        )
        with partial_directory(target) as directory:
            archive = Path(directory, "archive.tar")
            while True:
                try:
                    async with self._stream(*parts, params=params) as chunks:
                        with archive.open("wb") as file:
                            async for chunk in chunks:
                                file.write(chunk)
                                if file.tell() > most:  # more than any earlier attempt received
                                    most = file.tell()
                                    backoff.reset()
                    return await self._http.offload(lambda: unpack(archive, target))
                except TandemError as error:
                    if not error.retriable:
                        raise
                    pause = backoff.next(error)
                await self._http.sleep(pause)
