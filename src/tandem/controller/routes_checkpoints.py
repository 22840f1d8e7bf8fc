"""HTTP routes of checkpoints: list, manifest, delete, pin, download as a tar archive."""

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, BackgroundTasks, Query
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.schemas import CheckpointInfo
from tandem.errors import CheckpointDamaged, NotFound
from tandem.spool import removal
from tandem.spool.schema import STEPS, Manifest, RunName
from tandem.system.plain_files import NotPlainError, open_plain

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"])
_CHUNK_BYTES = 2**20
_END = bytes(2 * tarfile.BLOCKSIZE)
Step = Annotated[int, PathParameter(ge=0, lt=STEPS)]
_TAR = {
    "description": (
        "The files under `<run>@<step>/`: PEFT's adapter, the optimizer's state, the manifest."
    ),
    "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
}


@router.get("")
def list_checkpoints(
    run: RunName,
    deployment: CurrentDeployment,
    limit: Annotated[int, Query(ge=1, le=1000, description="only this many, the newest")] = 200,
    before: Annotated[
        int | None, Query(ge=0, description="only lower steps: the page before it")
    ] = None,
) -> list[CheckpointInfo]:
    """The run's checkpoints, oldest first."""
    deployment.spool.runs.get(run)
    steps = [
        step for step in deployment.spool.checkpoints.steps(run) if before is None or step < before
    ]
    pinned = set(deployment.spool.checkpoints.pinned(run))
    found = []
    for step in steps[-limit:]:
        with suppress(NotFound):  # the checkpoint was removed meanwhile
            found.append(_info(deployment, run, step, step in pinned))
    return found


@router.get("/{step}")
def get_checkpoint(run: RunName, step: Step, deployment: CurrentDeployment) -> Manifest:
    """A checkpoint's manifest: its files with their SHA-256, its origin, its metrics."""
    deployment.spool.runs.get(run)
    return deployment.spool.checkpoints.manifest(run, step)


@router.delete("/{step}", status_code=204)
def delete_checkpoint(
    run: RunName, step: Step, deployment: CurrentDeployment, tasks: BackgroundTasks
) -> None:
    """Delete a checkpoint; refused for step 0, for the newest step, and for a step that is pinned,
    served or needed by a job."""
    doomed = removal.delete_checkpoint(deployment.spool, run, step)
    tasks.add_task(shutil.rmtree, doomed, ignore_errors=True)


@router.put("/{step}/pin", status_code=204)
def pin_checkpoint(run: RunName, step: Step, deployment: CurrentDeployment) -> None:
    """Keep a checkpoint, whatever TANDEM_KEEP_CHECKPOINTS says. A rollback that discards the
    checkpoint ends the pin."""
    deployment.spool.checkpoints.pin(run, step)


@router.delete("/{step}/pin", status_code=204)
def unpin_checkpoint(run: RunName, step: Step, deployment: CurrentDeployment) -> None:
    """End the pin of a checkpoint; a step that is not pinned stays as it is."""
    deployment.spool.checkpoints.unpin(run, step)


@router.get("/{step}/download", response_class=StreamingResponse, responses={200: _TAR})
def download_checkpoint(
    run: RunName,
    step: Step,
    deployment: CurrentDeployment,
    weights_only: Annotated[bool, Query(description="without the optimizer's state")] = False,
) -> StreamingResponse:
    """A checkpoint as an uncompressed tar archive."""
    deployment.spool.runs.get(run)
    manifest = deployment.spool.checkpoints.manifest(run, step)
    if weights_only:
        files = {
            name: entry
            for name, entry in manifest.files.items()
            if not name.startswith("optimizer/")
        }
        manifest = manifest.model_copy(update={"files": files})
    size, parts = archive_of(deployment.spool.checkpoints.path(run, step), manifest)
    disposition = f'attachment; filename="{run}@{step}.tar"'
    headers = {"Content-Length": str(size), "Content-Disposition": disposition}
    return StreamingResponse(parts, media_type="application/x-tar", headers=headers)


def _info(deployment: Deployment, run: str, step: int, pinned: bool) -> CheckpointInfo:
    try:
        manifest = deployment.spool.checkpoints.manifest(run, step)
    except CheckpointDamaged as error:
        return CheckpointInfo(step=step, pinned=pinned, damage=error.message)
    size = sum(entry.size for entry in manifest.files.values())
    fields = manifest.model_dump(include={"job", "created", "metrics", "origin"})
    return CheckpointInfo(step=step, size=size, pinned=pinned, **fields)


def archive_of(directory: Path, manifest: Manifest) -> tuple[int, Iterator[bytes]]:
    """The size in bytes and the parts of an uncompressed tar archive. The archive has a
    checkpoint's files under `<run>@<step>/`, and the manifest as its last file.

    All files are opened first, so that a rollback that moves them does not disturb the download.
    Raises CheckpointDamaged if a file is missing or has another size.
    """
    text = (manifest.model_dump_json(indent=1) + "\n").encode()
    with ExitStack() as stack:
        files = [
            (name, stack.enter_context(_open(directory / name, entry.size)), entry.size)
            for name, entry in sorted(manifest.files.items())
        ]
        opened = stack.pop_all()
    entries = []
    for name, file, size in [*files, ("manifest.json", io.BytesIO(text), len(text))]:
        info = tarfile.TarInfo(f"{manifest.run}@{manifest.step}/{name}")
        info.size, info.mtime, info.mode = size, int(manifest.created), 0o644
        entries.append((info.tobuf(tarfile.PAX_FORMAT), file, size))
    total = sum(
        len(header) + size + -size % tarfile.BLOCKSIZE for header, _, size in entries
    ) + len(_END)
    return total, _parts(opened, entries)


def _parts(opened: ExitStack, entries: list[tuple[bytes, BinaryIO, int]]) -> Iterator[bytes]:
    with opened:
        for header, file, size in entries:
            yield header
            left = size
            while left:
                data = file.read(min(left, _CHUNK_BYTES))
                # If a file is too short, the client receives fewer bytes than the Content-Length,
                # so the client notices the error.
                if not data:
                    raise CheckpointDamaged(f"a file ended {left} bytes early")
                left -= len(data)
                yield data
            yield bytes(-size % tarfile.BLOCKSIZE)
        yield _END


def _open(path: Path, size: int) -> BinaryIO:
    try:
        file = open_plain(path)
    except (FileNotFoundError, NotPlainError) as error:
        raise CheckpointDamaged(
            f"{path.name} of checkpoint {path.parent} is missing, or not a regular file"
        ) from error
    actual = os.fstat(file.fileno()).st_size
    if actual != size:
        file.close()
        raise CheckpointDamaged(
            f"{path.name} of checkpoint {path.parent} has {actual} bytes; its manifest says {size}"
        )
    return file
