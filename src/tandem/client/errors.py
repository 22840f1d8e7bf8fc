"""Refused requests and failed jobs as exceptions."""

import httpx
from pydantic import ValidationError

from tandem import errors
from tandem.controller.schemas import ErrorBody, JobStatus
from tandem.errors import JobFailed, TandemError, Unreachable

# The controller, or a proxy before it, cannot answer now but may soon.
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)]
# Base classes come first in the module: of several classes with one code the base is raised.
_KINDS = {kind.code: kind for kind in reversed(_CLASSES)}


def unreachable(error: httpx.TransportError) -> Unreachable:
    """The error for a controller that did not answer."""
    return Unreachable(
        f"the controller did not answer ({type(error).__name__}: {error}); check that it runs and that TANDEM_URL is "
        "its address"
    )


def error_of(response: httpx.Response) -> TandemError:
    """The exception that the controller raised, from a response whose body has been read."""
    try:
        detail = ErrorBody.model_validate_json(response.content).error
    except ValidationError:  # a proxy's page, for example
        return TandemError(f"HTTP {response.status_code} from {response.url}: {response.text[:500]}")
    error = _KINDS.get(detail.type, TandemError)(detail.message, field=detail.field)
    error.code = detail.type
    return error


def stream_error(response: httpx.Response) -> TandemError | httpx.TransportError:
    """Why a stream did not open; a transport error where another attempt may help."""
    if response.status_code in RETRIED_STATUSES:
        return httpx.RemoteProtocolError(f"HTTP {response.status_code}: {response.text[:200]}")
    return error_of(response)


def raise_if_failed(job: JobStatus) -> None:
    """Raises JobFailed, with the reason and the end of the log, for a job that ended without success."""
    if job.state == "succeeded":
        return
    reason = job.error.type if job.error else job.state
    message = f"job {job.id} {job.state} in attempt {job.attempt}: {reason}"
    if job.error:
        message += f": {job.error.message}"
        if job.error.log_tail:
            message += f"\n--- end of its log ---\n{job.error.log_tail.rstrip()}"
    raise JobFailed(message, job_id=job.id, reason=reason)
