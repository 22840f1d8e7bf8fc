"""HTTP routes of OpenAI's files: upload, list, retrieve, content, delete."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.openai.errors import BadRequest
from tandem.controller.openai.lines import check_lines
from tandem.controller.openai.multipart import Form, receive_form
from tandem.controller.openai.schemas import file_object, page
from tandem.errors import NotFound
from tandem.spool.schema.tuning import Upload
from tandem.spool.tunings import new_id

# OpenAI's clients have their own types for OpenAI's API, so the API is not in the OpenAPI document.
router = APIRouter(prefix="/v1/files", tags=["openai"], include_in_schema=False)
MOST_LISTED = 10_000
_CHUNK_BYTES = 2**20
After = Annotated[str | None, Query(max_length=128)]


@router.post("")
async def upload_file(request: Request, deployment: CurrentDeployment) -> dict[str, Any]:
    """Receive a file of examples or pairs, and check its lines."""
    upload_id, stack = new_id("file"), ExitStack()
    receiving = deployment.spool.uploads.receiving()
    staged = await to_thread.run_sync(stack.enter_context, receiving)
    try:
        form = await receive_form(request, staged / f"{upload_id}.jsonl")
        return await to_thread.run_sync(
            _keep, deployment, staged, upload_id, form, limiter=deployment.packing_threads
        )
    finally:
        await to_thread.run_sync(stack.close)


def _keep(deployment: Deployment, staged: Path, upload_id: str, form: Form) -> dict[str, Any]:
    purpose = form.fields.pop("purpose", None)
    if purpose is None:
        code = "missing_required_parameter"
        raise BadRequest("is missing; send fine-tune", param="purpose", code=code)
    if purpose != "fine-tune":
        raise BadRequest(
            f"{purpose[:64]!r} is not served here; the only purpose is fine-tune", param="purpose"
        )
    for name in form.fields:
        param = name.partition("[")[0][:64]
        problem = "files here stay until they are deleted" if param == "expires_after" else ""
        raise BadRequest(f"{problem or 'no such field'}; leave it out", param=param)
    path = staged / f"{upload_id}.jsonl"
    method, lines = check_lines(path)
    upload = Upload(
        id=upload_id,
        filename=form.filename or "file",
        purpose="fine-tune",
        method=method,
        lines=lines,
        size=path.stat().st_size,
        created=time.time(),
    )
    deployment.spool.uploads.commit(staged, upload)
    return file_object(upload)


@router.get("")
def list_files(
    deployment: CurrentDeployment,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List files, by default newest first."""
    ids = deployment.spool.uploads.ids()
    if order == "asc":
        ids.reverse()
    found: list[dict[str, Any]] = []
    for upload_id in after_id(ids, after):
        with suppress(NotFound):  # the file was deleted meanwhile
            upload = deployment.spool.uploads.get(upload_id)
            if purpose in (None, upload.purpose):
                if len(found) == limit:
                    return page(found, has_more=True)
                found.append(file_object(upload))
    return page(found, has_more=False)


def after_id(ids: list[str], after: str | None) -> list[str]:
    """The ids that follow the id `after`. Raises BadRequest if `after` is not one of the ids."""
    if after is None:
        return ids
    if after not in ids:
        raise BadRequest(f"{after[:100]!r} is not an id of this list; leave it out", param="after")
    return ids[ids.index(after) + 1 :]


@router.get("/{file_id}")
def retrieve_file(file_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """One file."""
    return file_object(deployment.spool.uploads.get(file_id))


@router.get("/{file_id}/content", response_class=StreamingResponse)
def file_content(file_id: str, deployment: CurrentDeployment) -> StreamingResponse:
    """The file's bytes."""
    upload = deployment.spool.uploads.get(file_id)
    headers = {"Content-Length": str(upload.size)}
    return StreamingResponse(
        _parts(deployment.spool.uploads.reader(upload)),
        media_type="application/octet-stream",
        headers=headers,
    )


def _parts(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while part := file.read(_CHUNK_BYTES):
            yield part


@router.delete("/{file_id}")
def delete_file(file_id: str, deployment: CurrentDeployment) -> dict[str, Any]:
    """Delete a file, unless a job that has not ended needs it."""
    spool = deployment.spool
    with spool.tunings.lock():
        upload = spool.uploads.get(file_id)
        for tuning_id in spool.tunings.ids():
            with suppress(NotFound):
                tuning = spool.tunings.get(tuning_id)
                files = (tuning.training_file, tuning.validation_file)
                if tuning.end is None and file_id in files:
                    problem = f"{tuning_id} trains on it; cancel that job, or wait for its end"
                    raise BadRequest(problem, param="file_id", code="file_in_use")
        spool.uploads.remove(upload)
    return {"id": file_id, "object": "file", "deleted": True}
