"""If one file is damaged, the error names the file, and operations on other files succeed.
`tests/fuzz` damages more files in more ways."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spool.spool_tools import (
    add_run,
    commit,
    failed,
    job_path,
    run_spec,
    spool_with_run,
    start,
    submit,
    succeeded,
    train_one,
)
from tandem.controller.routes_checkpoints import archive_of
from tandem.errors import CheckpointDamaged, NotFound
from tandem.inference.publisher.transports import AdapterCopies
from tandem.inference.publisher.usage import Usage
from tandem.spool import Spool, fs, recovery
from tandem.spool.schema import TERMINAL


def make_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside").touch()


def make_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


def make_link(path: Path) -> None:
    """Moves the intact file to another name, and puts a link to it in its old place. So only the
    link is wrong."""
    target = path.with_name(f".tmp-{path.name}")
    if path.exists():
        path.rename(target)
    path.symlink_to(target)


def make_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def make_sparse(path: Path) -> None:
    """A sparse file of 2 GiB. A reader of the whole file fails."""
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 2**31)


NO_FILES = [make_directory, make_loop, make_link, make_fifo, make_sparse]
FILES = {
    "run.json": lambda spool: spool.root / "runs/r/run.json",
    "manifest": lambda spool: spool.checkpoints.path("r", 1) / "manifest.json",
    "served.json": lambda spool: spool.root / "runs/r/served.json",
    "job": lambda spool: job_path(spool, "lost"),
    "queued job": lambda spool: job_path(spool, "next"),
    "active": lambda spool: spool.paths.active_file(spool.jobs.find("lost")),
    "lease": lambda spool: spool.paths.lease_file("lost"),
    "cancel": lambda spool: spool.paths.cancel_file("lost"),
    "events": lambda spool: spool.paths.events_file("lost"),
    "hold": lambda spool: spool.paths.hold,
    "vllm.json": lambda spool: spool.paths.shared_vllm,
    "inference.json": lambda spool: spool.paths.inference,
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("damage", NO_FILES)
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
    assert (spool.inference.shared(), spool.inference.places()) == (None, [])
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


@pytest.mark.parametrize("damage", NO_FILES)
def test_what_is_no_file_in_place_of_an_adapter_is_damage(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    spool = spool_with_run(tmp_path / "spool")
    manifest, checkpoint = spool.checkpoints.manifest("r", 0), spool.checkpoints.path("r", 0)
    damage(checkpoint / "adapter_model.safetensors")
    with pytest.raises(CheckpointDamaged, match="adapter_model"):
        spool.checkpoints.verify("r", 0)
    with pytest.raises(CheckpointDamaged, match="adapter_model"):
        spool.checkpoints.fork("r", 0, run_spec("fork"))
    copies = AdapterCopies(tmp_path / "copies")
    with pytest.raises(CheckpointDamaged, match="adapter_model"):
        copies.copy(copies.path("r@0", manifest, spool.runs.get("r")), checkpoint, manifest)
    assert not list((tmp_path / "copies").iterdir())
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


def test_a_job_that_one_look_finds_cut_off_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FUSE mount that caches sizes can cut off the content of a recently replaced file."""
    spool = spool_with_run(tmp_path)
    job = start(spool)
    looks, read_bytes = list[Path](), fs.read_bytes

    def cut_off(path: Path, **how: Any) -> bytes | None:
        content = read_bytes(path, **how)
        looks.append(path)
        return content[:-5] if content is not None and len(looks) == 1 else content

    monkeypatch.setattr(fs, "read_bytes", cut_off)
    assert spool.jobs.get(job.spec.id) == ("running", job)
    assert looks == [spool.paths.job_file(job.spec.id)] * 2
    assert not [*spool.paths.damaged.iterdir()]


@pytest.mark.parametrize("state", ["queued", "running", "failed"])
def test_a_damaged_job_goes_with_its_data(tmp_path: Path, state: str) -> None:
    """A damaged job's data are removed without a runner. The data of another job stay."""
    spool = spool_with_run(tmp_path)
    job, other = submit(spool), submit(spool)
    if state != "queued":
        claimed = spool.queue.claim("runner")
        assert claimed is not None
        if state == "failed":
            spool.queue.finish(claimed, failed())
    directory = spool.paths.job_dir(job.spec.id)
    (directory / "job.json").write_text("{")
    with pytest.raises(NotFound, match="it was damaged, and its directory is"):
        spool.jobs.get(job.spec.id)
    assert not directory.exists()
    assert not list(spool.paths.active.iterdir())
    (aside,) = spool.paths.damaged.iterdir()
    assert {path.name for path in aside.iterdir()} <= {"job.json", "events.jsonl"}
    ends = [event for event in spool.events.read(job.spec.id) if event.type in TERMINAL]
    assert [end.type for end in ends] == ["failed"]
    assert spool.paths.data_dir(other.spec.id).is_dir()
    assert spool.queue.claim("runner").spec.id == other.spec.id


@pytest.mark.parametrize(
    "change",
    [
        {"state": "succeeded"},
        {"state": "running", "result": {"state": "failed", "finished": 1.0}},
        {"state": "failed", "result": {"state": "cancelled", "finished": 1.0}},
        None,
    ],
)
def test_a_job_that_contradicts_itself_is_damaged(tmp_path: Path, change: dict | None) -> None:
    spool = spool_with_run(tmp_path)
    submit(spool, "j")
    path = job_path(spool, "j")
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert spool.jobs.list() == []
    assert len(spool.damage()["job"]) == 1
