"""Jobs: look, follow, read the log, cancel."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from tandem.controller.deployment import Deployment, Here
from tandem.controller.schemas import LOG_OFFSET_HEADER, JobStatus
from tandem.controller.streams import follow
from tandem.spool.schema import JobId, JobState, RunName

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])
LOG_CHUNK = 2**20


def job_status(here: Deployment, job_id: str) -> JobStatus:
    """The job as the spool shows it now; raises NotFound."""
    state, job = here.spool.jobs.get(job_id)
    lease = here.spool.leases.get(job_id) if state == "running" else None
    return JobStatus(
        id=job.spec.id,
        run=job.spec.run,
        kind=job.spec.kind,
        state=state,
        attempt=job.attempt,
        phase=lease.phase if lease else None,
        cancel_requested=state == "running" and here.spool.jobs.cancel_requested(job_id),
        step=job.result.step if job.result else None,
        error=job.result.error if job.result else None,
        last_error=job.last_error,
        finished=job.result.finished if job.result else None,
        spec=job.spec,
    )


@router.get("")
def list_jobs(
    here: Here,
    run: Annotated[RunName | None, Query(description="only this run's")] = None,
    state: Annotated[list[JobState] | None, Query(description="only in these states; may be repeated")] = None,
    limit: Annotated[int, Query(ge=1, le=10000, description="the newest this many")] = 200,
) -> list[JobStatus]:
    """Jobs, oldest first."""
    if run is not None:
        here.spool.runs.get(run)
    jobs = here.spool.jobs.list(run=run, states=tuple(state) if state else None)
    return [job_status(here, job.spec.id) for _, job in jobs[-limit:]]


@router.get("/{job}")
def get_job(job: JobId, here: Here) -> JobStatus:
    """One job."""
    return job_status(here, job)


@router.get(
    "/{job}/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Server-Sent Events; `data` is an Event, `id` its seq, `event` its type.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def follow_events(
    job: JobId,
    here: Here,
    after: Annotated[int, Query(ge=-1, description="only events with a higher seq")] = -1,
    wait: Annotated[bool, Query(description="false: only what is there now")] = True,
    last_event_id: Annotated[int | None, Header(ge=-1, description="as `after`, sent by reconnecting clients")] = None,
) -> StreamingResponse:
    """Follow a job. It ends after the terminal event (succeeded, failed, cancelled); `served` may come later."""
    await to_thread.run_sync(here.spool.jobs.get, job, limiter=here.watching)
    start = after if last_event_id is None else last_event_id
    return StreamingResponse(
        follow(here, job, start, wait),
        media_type="text/event-stream",
        # A proxy must neither keep nor gather the events.
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


@router.get(
    "/{job}/log",
    response_class=Response,
    responses={
        200: {
            "description": f"At most {LOG_CHUNK} bytes; the header {LOG_OFFSET_HEADER} says where the next ones begin.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
def get_log(
    job: JobId,
    here: Here,
    offset: Annotated[int, Query(ge=0, description="first byte")] = 0,
    tail: Annotated[int | None, Query(ge=1, le=LOG_CHUNK, description="only the last this many bytes")] = None,
) -> Response:
    """What the job's ranks printed, all attempts; empty where nothing has been printed."""
    here.spool.jobs.get(job)
    data = b""
    path = here.spool.paths.log_file(job)
    if path.exists():
        with path.open("rb") as file:
            if tail is not None:
                offset = max(0, path.stat().st_size - tail)
            file.seek(offset)
            data = file.read(LOG_CHUNK)
    return Response(data, media_type="text/plain; charset=utf-8", headers={LOG_OFFSET_HEADER: str(offset + len(data))})


@router.post("/{job}/cancel", status_code=202)
def cancel_job(job: JobId, here: Here) -> JobStatus:
    """Stop a job: a queued one at once, a running one soon; one that has ended stays as it is."""
    here.spool.queue.cancel(job)
    return job_status(here, job)
