"""Whole weights on the volume: which stay, and whose they are."""

from pathlib import Path

import pytest

from spool.spool_tools import serve
from tandem.errors import CheckpointDamaged
from tandem.spool import Spool, fs
from tandem.spool.schema import Manifest


def checkpoint(step: int, job: str) -> Manifest:
    return Manifest(run="r", step=step, job=job, created=float(step), files={})


def write(spool: Spool, manifest: Manifest) -> int:
    staged = spool.root / "jobs/work/whole"
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"weights" * 100)
    return spool.merged.commit(staged, manifest)


def kept(spool: Spool) -> list[str]:
    return sorted(path.name for path in (spool.root / "runs/r/merged").iterdir())


def test_the_newest_and_the_served_step_stay(spool: Spool) -> None:
    for step in (1, 2, 3):
        assert write(spool, checkpoint(step, f"job-{step}")) == 700
        if step == 1:
            serve(spool, 1)
    assert kept(spool) == ["00000001", "00000003"]
    serve(spool, 3)
    write(spool, checkpoint(4, "job-4"))
    assert kept(spool) == ["00000003", "00000004"]


def test_files_belong_to_one_checkpoint(spool: Spool) -> None:
    first = checkpoint(1, "first")
    assert spool.merged.find(first) is None
    write(spool, first)
    directory = spool.merged.find(first)
    assert directory is not None
    assert (directory / "model.safetensors").read_bytes() == b"weights" * 100
    again = checkpoint(1, "again")  # after a rollback
    assert spool.merged.find(again) is None
    write(spool, again)
    assert spool.merged.find(again) == directory
    assert spool.merged.find(first) is None


def test_damage_is_found(spool: Spool) -> None:
    manifest = checkpoint(1, "job")
    write(spool, manifest)
    directory = spool.merged.find(manifest)
    assert directory is not None
    (directory / "model.safetensors").write_bytes(b"wEights" * 100)
    with pytest.raises(CheckpointDamaged, match="altered"):
        spool.merged.find(manifest)
    (directory / "manifest.json").write_text("{")
    assert spool.merged.find(manifest) is None


def test_weights_that_a_newer_step_removes_meanwhile_are_damaged(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = checkpoint(1, "job")
    write(spool, manifest)
    real = fs.read_record

    def removed_after(path: Path, model: type[Manifest], *, sure: bool) -> Manifest | None:
        record = real(path, model, sure=sure)
        fs.remove_tree(path.parent)
        return record

    monkeypatch.setattr(fs, "read_record", removed_after)
    with pytest.raises(CheckpointDamaged, match="missing"):
        spool.merged.find(manifest)


def test_what_cannot_be_committed_leaves_the_step_before(spool: Spool) -> None:
    manifest = checkpoint(1, "job")
    write(spool, manifest)
    staged = spool.root / "jobs/work/whole"
    staged.mkdir()
    (staged / "link").symlink_to("/nowhere")
    with pytest.raises(Exception, match="plain file"):
        spool.merged.commit(staged, checkpoint(2, "next"))
    assert staged.is_dir()
    assert kept(spool) == ["00000001"]
