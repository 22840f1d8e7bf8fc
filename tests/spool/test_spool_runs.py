"""Runs, checkpoints, and whole weights on the volume."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import rmtree

import pytest

from spool.spool_tools import (
    add_run,
    run_spec,
    serve,
    stage,
    start,
    succeeded,
    train_one,
    write_adapter,
)
from spool.volume_tools import full_disk, refused, temporary_names, tree
from tandem.errors import (
    CheckpointDamaged,
    Conflict,
    InvalidInput,
    NotFound,
    RunDamaged,
    SpoolUnusable,
)
from tandem.spool import Spool, fs
from tandem.spool.recovery import recover
from tandem.spool.removal import delete_checkpoint, delete_run
from tandem.spool.schema import LoraShape, Manifest, Origin, Probe

PROBE = Probe(tokens=[[1, 2]], logprobs=[[-0.5]], previous=[[-0.6]], base=[[-0.7]])


def test_a_run_is_made_with_its_step_0(tmp_path):
    spool = Spool.create(tmp_path)
    spec = run_spec("my-run.1", seed=7, lora=LoraShape(rank=4))
    assert spool.runs.create(spec, write_adapter) == spec
    assert Spool(tmp_path).runs.get("my-run.1") == spec
    assert spool.runs.list() == [spec]
    assert spool.checkpoints.steps("my-run.1") == [0]
    assert spool.checkpoints.newest("my-run.1") == 0
    manifest = spool.checkpoints.verify("my-run.1", 0)
    assert manifest.job is None
    assert sorted(manifest.files) == ["adapter_config.json", "adapter_model.safetensors"]
    assert manifest.files["adapter_model.safetensors"].size == 700
    with refused(NotFound, "run", match=r"my-run\.1"):
        spool.runs.get("other")


def test_an_alpha_that_is_left_out_is_twice_the_rank_and_is_written_out(spool):
    assert LoraShape().alpha == 32
    for given, alpha in (
        ({"rank": 4}, 8.0),
        ({"rank": 64}, 128.0),
        ({"rank": 4, "alpha": 32}, 32.0),
    ):
        spec = run_spec(f"rank-{given['rank']}-{alpha:g}", lora=LoraShape.model_validate(given))
        spool.runs.create(spec, write_adapter)
        assert spool.runs.get(spec.name).lora.alpha == alpha
        assert f'"alpha": {alpha}' in (spool.root / "runs" / spec.name / "run.json").read_text()
    with pytest.raises(ValueError, match="rank"):
        LoraShape.model_validate({"rank": 0})


def test_a_run_that_cannot_be_made_leaves_no_trace(spool):
    before = tree(spool.root)

    def broken(directory):
        write_adapter(directory)
        raise RuntimeError("no")

    def link(directory):
        (directory / "link").symlink_to("/etc/passwd")

    with refused(Conflict, "name"):
        spool.runs.create(run_spec("r", seed=9), lambda directory: pytest.fail("must not be made"))
    with pytest.raises(RuntimeError):
        spool.runs.create(run_spec("new"), broken)
    with pytest.raises(SpoolUnusable, match="full"):
        spool.runs.create(run_spec("new"), full_disk)
    with pytest.raises(InvalidInput, match="not a plain file"):
        spool.runs.create(run_spec("new"), link)
    assert tree(spool.root) == before


def test_what_is_not_ours_is_not_listed(spool):
    for name in (
        "runs/lost+found",
        "runs/.nfs0001",
        "runs/r/checkpoints/tmp",
        "runs/r/checkpoints/0000001",
    ):
        (spool.root / name).mkdir()
    for name in (
        "jobs/live/.nfs1",
        "jobs/live/note.txt",
        "jobs/active/a b",
        "jobs/ended/0/a b",
    ):
        (spool.root / name).write_text("")
    assert spool.runs.names() == ["r"]
    assert spool.checkpoints.steps("r") == [0]
    assert spool.jobs.list() == recover(spool, "runner") == []
    assert spool.queue.claim("runner") is None


def test_a_step_that_is_made_while_its_rival_is_synced_is_a_conflict(spool, monkeypatch):
    staged = stage(spool, start(spool, "j"))
    sync, rival = fs.fsync_tree, spool.checkpoints.path("r", 0).with_name("00000001")
    monkeypatch.setattr(
        fs, "fsync_tree", lambda path: (sync(path), rival.mkdir(), (rival / "file").touch())
    )
    with refused(Conflict, "step", match="has a checkpoint 1 already"):
        spool.checkpoints.commit(staged, "r", 1, "j")
    assert staged.is_dir()


def test_commit_says_all_that_the_manifest_holds_and_makes_only_the_next_step(spool):
    staged = stage(spool, start(spool, "j"))
    before = tree(spool.root)
    for step in (0, 2):
        with refused(Conflict, "step", match="next is 1"):
            spool.checkpoints.commit(staged, "r", step, "j")
    assert tree(spool.root) == before
    manifest = spool.checkpoints.commit(
        staged,
        "r",
        1,
        "j",
        topology={"tp": 2},
        versions={"torch": "2"},
        metrics={"loss": 0.5},
        probe=PROBE,
    )
    assert not staged.exists()
    assert spool.checkpoints.path("r", 1) == spool.root / "runs/r/checkpoints/00000001"
    assert spool.checkpoints.manifest("r", 1) == spool.checkpoints.verify("r", 1) == manifest
    assert (manifest.job, manifest.topology, manifest.metrics, manifest.probe) == (
        "j",
        {"tp": 2},
        {"loss": 0.5},
        PROBE,
    )
    assert sorted(manifest.files) == ["adapter_model.safetensors", "optimizer/adam.safetensors"]


def test_a_step_that_is_not_there(spool):
    for step in (1, -1, 10**8, 10**400):
        for call in (spool.checkpoints.path, spool.checkpoints.manifest, spool.checkpoints.verify):
            with refused(NotFound, "step", match="0 to 0"):
                call("r", step)


def test_verify_names_each_damaged_file_and_how(spool):
    train_one(spool)
    directory, names = (
        spool.checkpoints.path("r", 1),
        ("adapter_model.safetensors", "optimizer/adam.safetensors"),
    )
    for name in names:
        good = (file := directory / name).read_bytes()
        for how, content in [
            ("missing", None),
            ("truncated", good[:-1]),
            ("truncated", b""),
            ("altered", good + b"x"),
            ("altered", bytes([good[0] ^ 1]) + good[1:]),
        ]:
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(CheckpointDamaged, match=f"{name} is {how}"):
                spool.checkpoints.verify("r", 1)
            file.write_bytes(good)
            spool.checkpoints.verify("r", 1)
    for name in names:
        (directory / name).write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"adapter_model.*truncated.*adam.*truncated"):
        spool.checkpoints.verify("r", 1)


def test_a_damaged_manifest(spool):
    train_one(spool)
    file = spool.checkpoints.path("r", 1) / "manifest.json"
    good = file.read_bytes()
    others = (good.replace(b'"step": 1', b'"step": 2'), good.replace(b'"run": "r"', b'"run": "q"'))
    for content in (good[:-20], b"", b"{}", *others):
        assert content != good
        file.write_bytes(content)
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json is (truncated or )?altered"):
            spool.checkpoints.verify("r", 1)
    file.unlink()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing"):
        spool.checkpoints.verify("r", 1)


def test_rollback_takes_the_newest_out_and_the_chain_goes_on(spool):
    for _ in range(3):
        train_one(spool)
    old = spool.checkpoints.verify("r", 2)
    assert spool.checkpoints.rollback("r", 1) == [3, 2]
    assert spool.checkpoints.steps("r") == [0, 1]
    assert spool.checkpoints.rollback("r", 1) == []
    with refused(NotFound, "step"):
        spool.checkpoints.rollback("r", 5)
    discarded = sorted(path.name[:9] for path in (spool.root / "runs/r/discarded").iterdir())
    assert discarded == ["00000002-", "00000003-"]
    job = train_one(spool)
    assert job.spec.base_step == 1
    assert spool.checkpoints.manifest("r", 2).job == job.spec.id != old.job
    assert spool.checkpoints.rollback("r", 1) == [2]  # each discarded step gets a new name
    assert len(list((spool.root / "runs/r/discarded").iterdir())) == 3


def test_fork_copies_adapter_and_optimizer_and_verifies(spool):
    job = start(spool, "j")
    spool.checkpoints.commit(stage(spool, job), "r", 1, "j", probe=PROBE, metrics={"loss": 1.0})
    spool.queue.finish(job, succeeded(job))
    source = tree(spool.checkpoints.path("r", 1))
    new = spool.checkpoints.fork("r", 1, run_spec("fork", seed=3))
    assert new.forked_from == Origin(run="r", step=1)
    assert spool.runs.get("fork") == new
    assert tree(spool.checkpoints.path("fork", 0)) | {"manifest.json": None} == source | {
        "manifest.json": None
    }
    manifest: Manifest = spool.checkpoints.verify("fork", 0)
    assert (manifest.run, manifest.step, manifest.job, manifest.origin) == (
        "fork",
        0,
        None,
        Origin(run="r", step=1),
    )
    assert manifest.probe == PROBE
    assert tree(spool.checkpoints.path("r", 1)) == source
    assert train_one(spool, "fork").spec.base_step == 0


def test_fork_refuses(spool):
    train_one(spool)
    before = tree(spool.root)
    for kind, field, step, spec in (
        (Conflict, "name", 1, run_spec("r")),
        (InvalidInput, "lora", 1, run_spec("n", lora=LoraShape(rank=3))),
        (InvalidInput, "base_model", 1, run_spec("n").model_copy(update={"base_model": "other"})),
        (NotFound, "step", 2, run_spec("n")),
    ):
        with refused(kind, field):
            spool.checkpoints.fork("r", step, spec)
    assert tree(spool.root) == before


@pytest.mark.parametrize("damaged", ["source", "copy"])
def test_fork_verifies_its_source_and_its_copy(spool, monkeypatch, damaged):
    if damaged == "copy":
        monkeypatch.setattr(
            "shutil.copyfileobj", lambda source, target, _: target.write(source.read()[::-1])
        )
    else:
        (spool.checkpoints.path("r", 0) / "adapter_model.safetensors").write_bytes(b"?")
    with pytest.raises(CheckpointDamaged, match="adapter_"):
        spool.checkpoints.fork("r", 0, run_spec("n"))
    assert [spec.name for spec in spool.runs.list()] == ["r"]
    assert temporary_names(spool.root) == []


@pytest.mark.parametrize(
    "remove",
    [
        lambda spool: spool.checkpoints.rollback("r", 0),
        lambda spool: rmtree(delete_checkpoint(spool, "r", 1)),
        lambda spool: rmtree(delete_run(spool, "r")),
    ],
)
def test_a_run_may_change_and_go_while_it_is_forked(spool, monkeypatch, remove):
    """Another thread removes the source when the copy of the first file begins."""
    for _ in range(2):
        train_one(spool)
    source, copyfileobj = tree(spool.checkpoints.path("r", 1)), shutil.copyfileobj
    waiting = iter([remove])

    def copy(*arguments):
        for action in waiting:
            ThreadPoolExecutor(1).submit(action, spool).result(10)
        copyfileobj(*arguments)

    monkeypatch.setattr("shutil.copyfileobj", copy)
    spool.checkpoints.fork("r", 1, run_spec("fork"))
    assert tree(spool.checkpoints.path("fork", 0)) | {"manifest.json": None} == source | {
        "manifest.json": None
    }
    spool.checkpoints.verify("fork", 0)
    with pytest.raises(NotFound):
        spool.checkpoints.manifest("r", 1)
    assert temporary_names(spool.root) == []


def test_a_damaged_run_is_left_out_and_named(spool):
    add_run(spool, "good")
    for name, damage in (
        ("empty", None),
        ("torn", "{"),
        ("other", run_spec("good").model_dump_json()),
    ):
        (directory := spool.root / "runs" / name).mkdir()
        if damage is not None:
            (directory / "run.json").write_text(damage)
        with refused(RunDamaged, "run", match=r"run\.json"):
            spool.runs.get(name)
    for name in ("A file", "a-file.json"):  # `a-file.json` could be a run's name
        (spool.root / "runs" / name).write_text("junk")
    add_run(spool, "bare")
    shutil.rmtree(spool.root / "runs/bare/checkpoints/00000000")
    assert [spec.name for spec in spool.runs.list()] == spool.runs.names() == ["bare", "good", "r"]
    assert sorted(spool.runs.damaged()) == [
        "A file",
        "a-file.json",
        "bare",
        "empty",
        "other",
        "torn",
    ]
    (spool.root / "runs/r/served.json").write_text("{")
    assert spool.served.get("r") is None  # the publisher writes the file anew


def test_rollback_of_many_steps_syncs_once(spool, monkeypatch):
    checkpoints = spool.root / "runs/r/checkpoints"
    for step in range(1, 301):
        shutil.copytree(checkpoints / "00000000", checkpoints / f"{step:08d}")
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or real(fd))
    assert spool.checkpoints.rollback("r", 100) == list(range(300, 100, -1))
    assert len(synced) == 2
    assert spool.checkpoints.steps("r") == list(range(101))


def of_step(step: int, job: str, created: float | None = None) -> Manifest:
    return Manifest(run="r", step=step, job=job, created=created or float(step), files={})


def write_merged(spool: Spool, manifest: Manifest) -> int:
    staged = spool.root / "jobs/whole"
    staged.mkdir()
    (staged / "model.safetensors").write_bytes(b"weights" * 100)
    return spool.merged.commit(staged, manifest)


def merged_steps(spool: Spool) -> list[str]:
    return sorted(path.name[:8] for path in (spool.root / "runs/r/merged").iterdir())


def test_merged_weights_of_the_two_newest_and_the_served_step_stay(spool: Spool) -> None:
    """vLLM may read the weights of the previous step, because the newest step is not served yet."""
    for step in (1, 2, 3, 4):
        assert write_merged(spool, of_step(step, f"job-{step}")) == 700
        if step == 1:
            serve(spool, 1)
    assert merged_steps(spool) == ["00000001", "00000003", "00000004"]
    serve(spool, 3)
    write_merged(spool, of_step(5, "job-5"))
    assert merged_steps(spool) == ["00000003", "00000004", "00000005"]
    write_merged(spool, of_step(4, "after a rollback to 3", created=6.0))
    assert merged_steps(spool) == ["00000003", "00000004"]


def test_merged_weights_belong_to_one_checkpoint(spool: Spool) -> None:
    first = of_step(1, "first")
    assert spool.merged.find(first) is None
    write_merged(spool, first)
    directory = spool.merged.find(first)
    assert directory is not None
    assert (directory / "model.safetensors").read_bytes() == b"weights" * 100
    again = of_step(1, "again", created=2.0)  # after a rollback
    assert spool.merged.find(again) is None
    write_merged(spool, again)
    assert spool.merged.find(again) not in (None, directory)
    assert spool.merged.find(first) is None


def test_late_merged_weights_take_no_newer_ones_away(spool: Spool) -> None:
    """An ended attempt may write its weights long after the next attempt has written its own."""
    late, newer = of_step(1, "discarded"), of_step(1, "in the chain", created=2.0)
    write_merged(spool, newer)
    before = spool.merged.find(newer)
    write_merged(spool, late)
    assert spool.merged.find(newer) == before
    write_merged(spool, newer)  # once more
    assert spool.merged.find(newer) == before is not None


def test_damage_of_merged_weights_is_found(spool: Spool) -> None:
    manifest = of_step(1, "job")
    write_merged(spool, manifest)
    directory = spool.merged.find(manifest)
    assert directory is not None
    (directory / "model.safetensors").write_bytes(b"wEights" * 100)
    with pytest.raises(CheckpointDamaged, match="altered"):
        spool.merged.find(manifest)
    (directory / "manifest.json").write_text("{")
    assert spool.merged.find(manifest) is None


def test_merged_weights_that_a_newer_step_removes_meanwhile_are_damaged(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = of_step(1, "job")
    write_merged(spool, manifest)
    real = fs.read_record

    def removed_after(path: Path, model: type[Manifest], *, sure: bool) -> Manifest | None:
        record = real(path, model, sure=sure)
        fs.remove_tree(path.parent)
        return record

    monkeypatch.setattr(fs, "read_record", removed_after)
    with pytest.raises(CheckpointDamaged, match="missing"):
        spool.merged.find(manifest)


def test_merged_weights_that_cannot_be_committed_leave_the_step_before(spool: Spool) -> None:
    manifest = of_step(1, "job")
    write_merged(spool, manifest)
    staged = spool.root / "jobs/whole"
    staged.mkdir()
    (staged / "link").symlink_to("/nowhere")
    with pytest.raises(Exception, match="plain file"):
        spool.merged.commit(staged, of_step(2, "next"))
    assert staged.is_dir()
    assert merged_steps(spool) == ["00000001"]
