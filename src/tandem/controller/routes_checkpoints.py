"""HTTP routes of checkpoints: list, manifest, download."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import StreamingResponse

from tandem.controller.checkpoint_archive import CheckpointArchive
from tandem.controller.deployment import CurrentDeployment, Deployment
from tandem.controller.schemas import CheckpointInfo
from tandem.errors import CheckpointDamaged
from tandem.spool.schema import Manifest, RunName

router = APIRouter(prefix="/v1/runs/{run}/checkpoints", tags=["checkpoints"])
Step = Annotated[int, Path(ge=0)]
_TAR = {
    "description": "The files under `<run>@<step>/`: PEFT's adapter, the optimizer's state, the manifest.",
    "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
}


@router.get("")
def list_checkpoints(run: RunName, deployment: CurrentDeployment) -> list[CheckpointInfo]:
    """The run's checkpoints, oldest first."""
    deployment.spool.runs.get(run)
    return [_info(deployment, run, step) for step in deployment.spool.checkpoints.steps(run)]


@router.get("/{step}")
def get_checkpoint(run: RunName, step: Step, deployment: CurrentDeployment) -> Manifest:
    """A checkpoint's manifest: its files with their SHA-256, its origin, its metrics."""
    deployment.spool.runs.get(run)
    return deployment.spool.checkpoints.manifest(run, step)


@router.get("/{step}/download", response_class=StreamingResponse, responses={200: _TAR})
def download_checkpoint(run: RunName, step: Step, deployment: CurrentDeployment) -> StreamingResponse:
    """A checkpoint as an uncompressed tar archive."""
    deployment.spool.runs.get(run)
    manifest = deployment.spool.checkpoints.manifest(run, step)
    archive = CheckpointArchive(deployment.spool.checkpoints.path(run, step), manifest)
    headers = {
        "Content-Length": str(archive.size),
        "Content-Disposition": f'attachment; filename="{archive.name}.tar"',
    }
    return StreamingResponse(iter(archive), media_type="application/x-tar", headers=headers)


def _info(deployment: Deployment, run: str, step: int) -> CheckpointInfo:
    try:
        manifest = deployment.spool.checkpoints.manifest(run, step)
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
