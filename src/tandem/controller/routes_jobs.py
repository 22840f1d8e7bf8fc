"""HTTP routes of jobs: list, state, events as Server-Sent Events, log, cancel."""

import os
from contextlib import suppress
from typing import Annotated, get_args

import anyio
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.schemas import LOG_OFFSET_HEADER, JobStatus
from tandem.spool.schema import Job, JobId, JobState, RunName
from tandem.system.plain_files import NotPlainError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
LOG_PART_BYTES = 2**20
KEEP_ALIVE_SECONDS = 10.0
# After a stop signal, the process waits at most this many seconds for the end of its streams. After
# the stop, a stream checks its file at most once more and then ends.
STOP_SECONDS = 5.0
_EVENT_FIELDS = {name: {"type": "string"} for name in ("id", "event", "data")}
_EVENTS = {
    "description": "Server-Sent Events; `data` is an Event, `id` its seq, `event` its type.",
    "content": {
        "text/event-stream": {
            "schema": {"type": "object", "required": ["data"], "properties": _EVENT_FIELDS}
        }
    },
}
_LOG = {
    "description": (
        f"At most {LOG_PART_BYTES} bytes; the header {LOG_OFFSET_HEADER} is the offset of the next"
        " ones."
    ),
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


def job_status(deployment: Deployment, state: JobState, job: Job) -> JobStatus:
    """A job in state `state`, in the form of the API."""
    spool, job_id = deployment.spool, job.spec.id
    lease = spool.leases.get(job_id) if state == "running" else None
    return JobStatus(
        id=job.spec.id,
        run=job.spec.run,
        kind=job.spec.kind,
        state=state,
        attempt=job.attempt,
        phase=lease.phase if lease else None,
        cancel_requested=state == "running" and spool.jobs.cancel_requested(job_id),
        step=job.result.step if job.result else None,
        error=job.result.error if job.result else None,
        last_error=job.last_error,
        finished=job.result.finished if job.result else None,
        spec=job.spec,
    )


@router.get("")
def list_jobs(
    deployment: CurrentDeployment,
    run: Annotated[RunName | None, Query(description="only jobs of this run")] = None,
    state: Annotated[
        list[JobState] | None,
        Query(
            description="only jobs in this state; repeatable", max_length=len(get_args(JobState))
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="only this many, the newest")] = 200,
    before: Annotated[
        JobId | None, Query(description="only jobs older than this one: the page before it")
    ] = None,
) -> list[JobStatus]:
    """Jobs, oldest first."""
    if run is not None:
        deployment.spool.runs.get(run)
    jobs = deployment.spool.jobs.list(run, state or None, limit=limit, before=before)
    return [job_status(deployment, *found) for found in jobs]


@router.get("/{job}")
def get_job(job: JobId, deployment: CurrentDeployment) -> JobStatus:
    """One job."""
    return job_status(deployment, *deployment.spool.jobs.get(job))


@router.get("/{job}/events", response_class=StreamingResponse, responses={200: _EVENTS})
async def follow_events(
    job: JobId,
    deployment: CurrentDeployment,
    after: Annotated[int, Query(ge=-1, description="only events with a higher seq")] = -1,
    wait: Annotated[bool, Query(description="false: only the events written so far")] = True,
    last_event_id: Annotated[
        int | None, Header(ge=-1, description="as `after`; reconnecting clients send it")
    ] = None,
) -> Response:
    """Follow a job to its terminal event (succeeded, failed, cancelled); `served` may come
    later."""
    await deployment.event_streams.check(job)
    stopping = anyio.Event()
    after = after if last_event_id is None else last_event_id
    return EventSourceResponse(
        deployment.event_streams.follow(job, after, wait=wait, stopping=stopping),
        sep="\n",
        ping=KEEP_ALIVE_SECONDS,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
        shutdown_event=stopping,
        shutdown_grace_period=STOP_SECONDS,
    )


@router.get("/{job}/log", response_class=Response, responses={200: _LOG})
def get_log(
    job: JobId,
    deployment: CurrentDeployment,
    offset: Annotated[int, Query(ge=0, lt=2**63 - LOG_PART_BYTES, description="first byte")] = 0,
    tail: Annotated[
        int | None, Query(ge=1, le=LOG_PART_BYTES, description="only this many bytes, the last")
    ] = None,
) -> Response:
    """The output of the job's ranks in all attempts; empty if nothing has been printed."""
    deployment.spool.jobs.get(job)
    data = b""
    paths = deployment.spool.paths
    # Ranks write the log, and could replace the log by a symbolic link to one of the controller's
    # files. Symbolic links are therefore not followed.
    with (
        suppress(FileNotFoundError, NotPlainError),
        paths.open_file(paths.log_file, job) as file,
    ):
        size = os.fstat(file.fileno()).st_size
        if tail is not None:
            offset = max(0, size - tail)
        if offset < size:  # file systems refuse to seek very far
            file.seek(offset)
            data = file.read(LOG_PART_BYTES)
    headers = {LOG_OFFSET_HEADER: str(offset + len(data))}
    return Response(data, media_type="text/plain; charset=utf-8", headers=headers)


@router.post("/{job}/cancel", status_code=202)
def cancel_job(job: JobId, deployment: CurrentDeployment) -> JobStatus:
    """Stop a job: a queued job ends at once, and a running job ends soon; an ended job is not
    changed."""
    deployment.spool.queue.cancel(job)
    return job_status(deployment, *deployment.spool.jobs.get(job))
