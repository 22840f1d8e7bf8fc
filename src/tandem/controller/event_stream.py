"""A job's events as Server-Sent Events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import anyio
from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent

from tandem.controller.deployment import Deployment
from tandem.spool import Spool
from tandem.spool.schema import TERMINAL, Event

POLL_SECONDS = 0.2
KEEP_ALIVE_SECONDS = 10.0
# How often the state of a job without new events is read.
STATE_SECONDS = 2.0
RETRY_MILLISECONDS = 1000
# Time for a stream to end by itself when the process stops; it needs one poll.
STOP_SECONDS = 5.0


def event_stream(deployment: Deployment, job: str, after: int, wait: bool) -> EventSourceResponse:
    """The job's events after seq `after`, until its terminal event; without `wait`, those written so far.

    The stream also ends when the controller stops, or when the job ended without a terminal event because its writer
    died: clients then reconnect, or read the job. An event's `id` is its seq, which clients send as Last-Event-ID.
    """
    stopping = anyio.Event()
    return EventSourceResponse(
        _follow(deployment, job, after, wait, stopping),
        sep="\n",
        ping=KEEP_ALIVE_SECONDS,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        shutdown_event=stopping,
        shutdown_grace_period=STOP_SECONDS,
    )


async def _follow(
    deployment: Deployment, job: str, after: int, wait: bool, stopping: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    yield ServerSentEvent(retry=RETRY_MILLISECONDS, sep="\n")
    reader = NewEvents(deployment.spool, job)
    while not stopping.is_set():
        events, ended = await to_thread.run_sync(reader.read, limiter=deployment.event_threads)
        for event in events:
            if event.seq > after:
                yield ServerSentEvent(event.model_dump_json(), id=str(event.seq), event=event.type, sep="\n")
        if ended or not wait:
            return
        await anyio.sleep(POLL_SECONDS)


class NewEvents:
    """Reads a job's new events."""

    def __init__(self, spool: Spool, job: str) -> None:
        self._spool, self._job = spool, job
        self._offset = 0
        self._state_read = time.monotonic()

    def read(self) -> tuple[list[Event], bool]:
        """The events since the last call, and whether the job has ended."""
        ended = False
        if time.monotonic() - self._state_read >= STATE_SECONDS:
            # Read before the events: a job that has ended by now has written all of them.
            self._state_read = time.monotonic()
            ended = self._spool.jobs.get(self._job)[0] in TERMINAL
        events, self._offset = self._spool.events.since(self._job, self._offset)
        return events, ended or any(event.type in TERMINAL for event in events)
