"""Checkpoints: list, look, download."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from tandem.controller.deployment import Deployment, Here
from tandem.controller.schemas import CheckpointInfo
from tandem.controller.streams import CheckpointTar
from tandem.errors import CheckpointDamaged
from tandem.spool.schema import Manifest, RunName

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"])
Step = Annotated[int, Path(ge=0)]


@router.get("")
def list_checkpoints(run: RunName, here: Here) -> list[CheckpointInfo]:
    """The run's chain, oldest first."""
    here.spool.runs.get(run)
    return [_info(here, run, step) for step in here.spool.checkpoints.steps(run)]


@router.get("/{step}")
def get_checkpoint(run: RunName, step: Step, here: Here) -> Manifest:
    """A checkpoint's manifest: its files with their SHA-256, where it came from, its metrics."""
    here.spool.runs.get(run)
    return here.spool.checkpoints.manifest(run, step)


@router.get(
    "/{step}/download",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The files under `<run>@<step>/`: PEFT's adapter, the optimizer's state, the manifest.",
            "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
def download_checkpoint(run: RunName, step: Step, here: Here) -> StreamingResponse:
    """A checkpoint as an uncompressed tar archive."""
    here.spool.runs.get(run)
    manifest = here.spool.checkpoints.manifest(run, step)
    archive = CheckpointTar(here.spool.checkpoints.path(run, step), manifest)
    return StreamingResponse(
        iter(archive),
        media_type="application/x-tar",
        headers={
            "Content-Length": str(archive.size),
            "Content-Disposition": f'attachment; filename="{archive.name}.tar"',
        },
    )


def _info(here: Deployment, run: str, step: int) -> CheckpointInfo:
    try:
        manifest = here.spool.checkpoints.manifest(run, step)
    except CheckpointDamaged as error:
        return CheckpointInfo(step=step, damage=error.message)
    return CheckpointInfo(
        step=step,
        job=manifest.job,
        created=manifest.created,
        size=sum(entry.size for entry in manifest.files.values()),
        metrics=manifest.metrics,
        origin=manifest.origin,
    )
