"""One damaged file: it is named, and everything else goes on. `tests/fuzz` looks for more of
these."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spool.spool_tools import (
    add_run,
    commit,
    job_path,
    spool_with_run,
    start,
    submit,
    succeeded,
    train_one,
)
from tandem.controller.routes_checkpoints import archive_of
from tandem.errors import CheckpointDamaged
from tandem.inference.publisher.transports import AdapterCopies
from tandem.inference.publisher.usage import Usage
from tandem.spool import Spool, recovery
from tandem.spool.schema import TERMINAL


def make_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside").touch()


def make_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


FILES = {
    "run.json": lambda spool: spool.root / "runs/r/run.json",
    "manifest": lambda spool: spool.checkpoints.path("r", 1) / "manifest.json",
    "served.json": lambda spool: spool.root / "runs/r/served.json",
    "job": lambda spool: job_path(spool, "running", "lost"),
    "queued job": lambda spool: job_path(spool, "queued", "next"),
    "id": lambda spool: spool.paths.id_file("lost"),
    "lease": lambda spool: spool.paths.lease_file("lost"),
    "cancel": lambda spool: spool.paths.cancel_file("lost"),
    "events": lambda spool: spool.paths.events_file("lost"),
    "hold": lambda spool: spool.paths.hold,
}


@pytest.mark.parametrize("damage", [make_directory, make_loop])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_keeps_no_other_job_waiting(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    spool = spool_with_run(tmp_path)
    train_one(spool)
    start(spool, "lost")
    submit(spool, "next")
    add_run(spool, "other")
    submit(spool, "good", "other")
    damage(FILES[name](spool))
    spool = Spool(tmp_path)
    recovery.recover(spool, "new")
    spool.hold.live()
    ended = []
    while (job := spool.queue.claim("new")) is not None:
        if spool.checkpoints.steps(job.spec.run)[-1] == job.spec.base_step:
            commit(spool, job)
        spool.queue.finish(job, succeeded(job))
        ended.append(job.spec.id)
    assert "good" in ended
    for job_id in ended:
        assert spool.jobs.get(job_id)[0] in TERMINAL
        assert spool.events.ended(job_id)
    assert spool.damage()
    assert not name.endswith("job") or len(spool.damage()["job"]) == 1
    assert "other" in spool.runs.names()


LONG = {"tokens": [1, 2, 3], "positions": [2, 1], "logprobs": [-1.0, -1.0]}
PROBE = {
    "tokens": [[1, 2]],
    "logprobs": [[-1.0]],
    "previous": [[-1.0]],
    "base": [[-1.0]],
    "long": LONG,
}
ENTRY = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "change",
    [
        {"probe": PROBE},
        {"probe": PROBE | {"long": LONG | {"positions": [3], "logprobs": [-1.0]}}},
        {"files": {"adapter_model.safetensors": ENTRY | {"size": 10**400}}},
        *(
            {"files": {name: ENTRY}}
            for name in ("/etc/passwd", "../../../spool.json", "a\0b", "y" * 300)
        ),
    ],
)
def test_a_manifest_that_no_trainer_writes_is_damaged(tmp_path: Path, change: dict) -> None:
    spool = spool_with_run(tmp_path)
    path = spool.checkpoints.path("r", 0) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is truncated or altered"):
        spool.checkpoints.verify("r", 0)


def test_a_directory_in_place_of_an_adapter_is_damage(tmp_path: Path) -> None:
    spool = spool_with_run(tmp_path / "spool")
    manifest, checkpoint = spool.checkpoints.manifest("r", 0), spool.checkpoints.path("r", 0)
    make_directory(checkpoint / "adapter_model.safetensors")
    copies = AdapterCopies(tmp_path / "copies")
    with pytest.raises(CheckpointDamaged, match="adapter_model"):
        copies.copy(copies.path("r@0", manifest, spool.runs.get("r")), checkpoint, manifest)
    with pytest.raises(CheckpointDamaged, match="adapter_model"):
        archive_of(checkpoint, manifest)
    assert spool.checkpoints.size("r") > 0


@pytest.mark.parametrize(
    "content", ['{"r": []}', '{"r": 1' + 400 * "0" + "}", "[" * 100_000, '{"r": NaN}', "[1]", ""]
)
def test_a_damaged_record_of_what_was_sampled_is_forgotten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "used.json"
    file.write_text(content)
    assert Usage(None, file).last("r") == 0


def test_links_that_lead_nowhere_have_no_size(tmp_path: Path) -> None:
    spool = spool_with_run(tmp_path)
    before = spool.checkpoints.size("r")
    train_one(spool)
    shutil.rmtree(spool.checkpoints.path("r", 1) / "optimizer")
    make_loop(spool.checkpoints.path("r", 1) / "optimizer")
    make_loop(spool.checkpoints.path("r", 1) / "adapter_model.safetensors")
    assert spool.checkpoints.size("r") > before
