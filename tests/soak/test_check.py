"""The soak's checker: it finds nothing on a good spool, and each broken promise on a spool that breaks it."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench.soak.check import Ledger, leftovers, violations
from safetensors.numpy import save

from spool import spool_tools
from tandem.spool import Spool
from tandem.spool.schema import JobError, JobResult, Served

STEPS = 3
ADAPTER, ADAM = "adapter_model.safetensors", "optimizer/adam.safetensors"
TWO = "runs/r/checkpoints/00000002"
ALL = slice(None)


def write_adapter(directory: Path, value: float = 0.0) -> None:
    (directory / ADAPTER).write_bytes(save({"a": np.full((2, 3), value, np.float32)}))
    (directory / "adapter_config.json").write_text("{}")


def attempt(spool: Spool, *, steps: int = STEPS) -> object:
    """A claimed job, the events of its ranks and, after all steps, its checkpoint."""
    job = spool.queue.claim("runner")
    assert job is not None
    spec = job.spec
    spool.events.append(spec.id, "started", attempt=job.attempt, pids=[1])
    spool.events.append(spec.id, "loaded", attempt=job.attempt, seconds={})
    for step in range(1, steps + 1):
        metrics = {"loss": 1 / step, "grad_norm": 2.0 + spec.base_step}
        spool.events.append(spec.id, "step", attempt=job.attempt, step=step, steps=STEPS, metrics=metrics)
    if steps < STEPS:
        return job
    staged = spool.paths.work_dir(spec.id, job.attempt) / "checkpoint"
    (staged / "optimizer").mkdir(parents=True)
    write_adapter(staged, 1.0 + spec.base_step)
    (staged / ADAM).write_bytes(save({"step": np.array(STEPS * (spec.base_step + 1))}))
    manifest = spool.checkpoints.commit(staged, spec.run, spec.base_step + 1, spec.id, metrics=metrics)
    sha256 = manifest.files[ADAPTER].sha256
    spool.events.append(spec.id, "checkpoint", attempt=job.attempt, step=manifest.step, sha256=sha256)
    spool.queue.finish(job, JobResult(state="succeeded", step=manifest.step, finished=time.time()))
    return job


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool with two jobs that succeeded, the second after a lost attempt, one that failed and one cancelled."""
    root = tmp_path_factory.mktemp("good")
    spool = Spool.create(root / "spool")
    spool.runs.create(spool_tools.run_spec("r"), write_adapter)
    lines = [{"kind": "run", "run": "r"}, {"kind": "strike"}]
    for job_id in ("one", "two", "bad", "gone"):
        spool_tools.submit(spool, job_id)
        lines += [{"kind": "asked", "id": job_id, "run": "r"}, {"kind": "accepted", "id": job_id}]
    attempt(spool)
    spool.queue.requeue(attempt(spool, steps=2), JobError(type="runner_lost", message="gone", retriable=True))
    attempt(spool)
    spool.queue.requeue(attempt(spool, steps=1), JobError(type="oom", message="no memory"))
    spool.queue.cancel("gone")
    sha256 = spool.checkpoints.manifest("r", 2).files[ADAPTER].sha256
    spool.served.put("r", Served(step=2, model="r@2", checkpoint=sha256, verified=time.time(),
                                 mean_abs_logprob_error=1e-4, tokens_checked=9))  # fmt: skip
    spool.events.append("two", "served", step=2)
    (root / "ledger").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def file_of(spool: Path, job_id: str) -> Path:
    (path,) = spool.glob(f"jobs/*/*/*,{job_id}.json")
    return path


def edit(path: Path, old: str, new: str, count: int = 1) -> None:
    text = path.read_text()
    assert re.search(old, text), f"{path} has no {old}"
    path.write_text(re.sub(old, new, text, count=count))


def lines_of(spool: Path, job_id: str, change: Callable[[list[str]], object]) -> None:
    path = spool / "jobs" / "events" / f"{job_id}.jsonl"
    lines = path.read_text().splitlines()
    change(lines)
    path.write_text("".join(line + "\n" for line in lines))


def queued_again(spool: Path) -> None:
    directory = spool / "jobs/queued/r/00000"
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(file_of(spool, "one"), directory)


def doubled_step(lines: list[str]) -> None:
    lines.insert(4, lines[4])
    number(lines)


def lost_event(lines: list[str]) -> None:
    """As a writer that went on after half a line of another would lose it."""
    assert '"loaded"' in lines.pop(2)
    number(lines)


def number(lines: list[str]) -> None:
    for seq, line in enumerate(lines):
        lines[seq] = re.sub(r'"seq": ?\d+', f'"seq": {seq}', line)


def later_checkpoint(spool: Path) -> None:
    shutil.copytree(spool / TWO, spool / "runs/r/checkpoints/00000003")
    edit(spool / "runs/r/checkpoints/00000003/manifest.json", '"step": 2', '"step": 3')


def forged(spool: Path, file: str, content: bytes) -> None:
    """Another file, with a manifest that says so."""
    (spool / TWO / file).write_bytes(content)
    path = spool / TWO / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][file] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def events(name: str, change: Callable[[list[str]], object]) -> Callable[[Path], object]:
    return lambda spool: lines_of(spool, name, change)


def replaced(lines: list[str], index: int | slice, old: str, new: str) -> None:
    chosen = range(len(lines))[index] if isinstance(index, slice) else [index]
    assert any(old in lines[i] for i in chosen), f"{old} is not in {lines}"
    for i in chosen:
        lines[i] = lines[i].replace(old, new)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a job is lost": (lambda s: file_of(s, "gone").unlink(), "gone: was accepted, and is lost"),
    "a job is in two states": (queued_again, r"one: is in \['queued', 'succeeded'\]"),
    "a job waits for ever": (
        lambda s: file_of(s, "gone").rename(s / "jobs/running" / file_of(s, "gone").name),
        r"gone: is in \['running'\]",
    ),
    "a job is set aside": (
        lambda s: file_of(s, "gone").rename(s / "jobs/damaged" / f"queued,{file_of(s, 'gone').name}.ULID"),
        "gone.json.ULID is set aside, and nobody damaged it",
    ),
    "a job nobody asked for": (
        lambda s: shutil.copy(file_of(s, "one"), str(file_of(s, "one")).replace("one.json", "more.json")),
        "more of run r: nobody asked for it",
    ),
    "a file of another job": (
        lambda s: file_of(s, "one").write_text(file_of(s, "two").read_text()),
        "one,.*|holds job two",
    ),
    "an id without its key": (lambda s: (s / "jobs/ids/two").unlink(), "two: jobs/ids does not name its key"),
    "a result of another state": (
        lambda s: edit(file_of(s, "one"), '"state": "succeeded"', '"state": "failed"'),
        "one: is in succeeded, its result",
    ),
    "a run is lost": (lambda s: shutil.rmtree(s / "runs/r"), "run r: was created, and is lost"),
    "no events": (lambda s: (s / "jobs/events/one.jsonl").unlink(), "one: has no events"),
    "a lost event": (events("two", lambda ls: ls.pop(1)), r"two .*: the events' numbers are \[0, 2"),
    "an event that nobody misses by its number": (events("one", lost_event), "one .*attempt 1 has only the events"),
    "two ends": (events("one", lambda ls: ls.append(ls[-1])), r"terminal events are \['succeeded', 'succeeded'\]"),
    "no end": (events("gone", lambda ls: ls.pop()), r"gone .*: its terminal events are \[\]"),
    "another end": (events("bad", lambda ls: replaced(ls, ALL, '"failed"', '"cancelled"')), "bad .* are .'cancelled'"),
    "another reason": (
        events("bad", lambda ls: replaced(ls, ALL, "no memory", "much")),
        "bad .*its terminal event says",
    ),
    "an event of another job": (
        events("one", lambda ls: replaced(ls, 0, '"one"', '"two"')),
        "one .*: has events of {'two'}",
    ),
    "an event after the end": (events("one", lambda ls: ls.append(ls[1])), "one .*: after its end come"),
    "a doubled step": (events("two", doubled_step), r"two .*made the optimizer steps \[1, 2, 2\]"),
    "a step left out": (
        events("two", lambda ls: replaced(ls, ALL, '"step": 3, "steps"', '"step": 4, "steps"')),
        r"two .*made the optimizer steps \[1, 2, 4\]",
    ),
    "too few steps": (
        events("one", lambda ls: replaced(ls, ALL, f'"steps": {STEPS}', '"steps": 4')),
        "one .*succeeded with 3 optimizer steps",
    ),
    "a retry that computes something else": (
        events("two", lambda ls: replaced(ls, 3, '"loss": 1.0', '"loss": 1.5')),
        "two .*: attempt 2 computed",
    ),
    "events out of order": (
        events("one", lambda ls: replaced(ls, 0, '"claimed"', '"released"')),
        "one .*: events out of order",
    ),
    "half lines": (lambda s: (s / "jobs/events/one.jsonl").open("a").write('{"a\n{"b\n'), "2 half-written lines"),
    "an attempt too many": (
        lambda s: edit(file_of(s, "two"), '"attempt": 2', '"attempt": 1'),
        "two .*ended in attempt",
    ),
    "packed data is left": (lambda s: (s / "jobs/data/one").mkdir(), "one .*: left jobs/data/one"),
    "a lease is left": (lambda s: (s / "jobs/leases/two.json").touch(), "two .*: left jobs/leases/two.json"),
    "litter": (lambda s: [(s / f"jobs/.tmp-{i}").touch() for i in range(20)], "20 temporary names after 1 strikes"),
    "a checkpoint is lost": (lambda s: shutil.rmtree(s / TWO), r"two \(succeeded\): made the checkpoints \[\]"),
    "a gap in the chain": (lambda s: shutil.rmtree(s / "runs/r/checkpoints/00000001"), "run r: its chain is"),
    "a doubled checkpoint": (later_checkpoint, "two .*: made the checkpoints .*00000003"),
    "a checkpoint of a failed job": (
        lambda s: edit(s / TWO / "manifest.json", '"two"', '"bad"'),
        r"bad \(failed\): made the checkpoints",
    ),
    "a checkpoint of nobody": (
        lambda s: edit(s / TWO / "manifest.json", '"two"', '"who"'),
        "its job who does not exist",
    ),
    "another bit": (
        lambda s: (s / TWO / "adapter_config.json").write_text("()"),
        "adapter_config.json is .*, the manifest",
    ),
    "a file too many": (lambda s: (s / TWO / "more").touch(), "more is .* the manifest says None"),
    "a manifest that can't be read": (
        lambda s: (s / TWO / "manifest.json").write_text("{"),
        "its manifest can't be read",
    ),
    "a manifest of another step": (
        lambda s: edit(s / TWO / "manifest.json", '"step": 2', '"step": 1'),
        "its manifest is of r@1",
    ),
    "metrics of another step": (
        lambda s: edit(s / TWO / "manifest.json", '"grad_norm": 3.0', '"grad_norm": 4.0'),
        "not those of the last step",
    ),
    "an optimizer step is doubled": (
        lambda s: forged(s, ADAM, save({"step": np.array(7)})),
        "Adam counts 7 optimizer steps, the events count 6",
    ),
    "another adapter": (
        lambda s: forged(s, ADAPTER, save({"a": np.ones((2, 3), np.float32)})),
        "job two announced another adapter",
    ),
    "an adapter of another shape": (
        lambda s: forged(s, ADAPTER, save({"a": np.ones(2, np.float32)})),
        "other tensors than step 0",
    ),
    "an adapter with NaN": (
        lambda s: forged(s, ADAPTER, save({"a": np.full((2, 3), np.nan, np.float32)})),
        "not finite",
    ),
    "an adapter that is none": (lambda s: forged(s, ADAPTER, b"junk"), "can't be loaded"),
    "nothing is served": (lambda s: (s / "runs/r/served.json").unlink(), "run r: nothing is served"),
    "served.json is torn": (lambda s: (s / "runs/r/served.json").write_text("{"), "served.json can't be read"),
    "an older step is served": (
        lambda s: edit(s / "runs/r/served.json", '"step": 2', '"step": 1'),
        "step 1 is served, the newest is 00000002",
    ),
    "a step that does not exist is served": (
        lambda s: edit(s / "runs/r/served.json", '"step": 2', '"step": 9'),
        "names step 9, which does not exist",
    ),
    "other weights are served": (
        lambda s: edit(s / "runs/r/served.json", '"checkpoint": "....', '"checkpoint": "abcd'),
        "served.json says",
    ),
    "a step is served unverified": (
        lambda s: edit(s / "runs/r/served.json", "0.0001", "0.1"),
        "step 2 was not verified: error 0.1",
    ),
    "no event of what is served": (events("two", lambda ls: ls.pop()), "job two has no event of it"),
}


def test_a_good_spool_has_no_violations(good: Path) -> None:
    assert violations(good / "spool", Ledger.read(good / "ledger"), swept=True) == []


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_promise_is_found(good: Path, tmp_path: Path, name: str) -> None:
    breaks, expected = BREAKS[name]
    spool = tmp_path / "spool"
    shutil.copytree(good / "spool", spool)
    breaks(spool)
    found = violations(spool, Ledger.read(good / "ledger"))
    assert any(re.search(expected, line) for line in found), found


def test_a_job_that_was_refused_and_exists_is_found(good: Path) -> None:
    ledger = Ledger.read(good / "ledger")
    ledger.refused.add("one")
    assert "job one: was refused, and exists" in violations(good / "spool", ledger)


def test_the_soaks_own_damage_is_no_violation(good: Path, tmp_path: Path) -> None:
    """A queued job that the soak damaged, as the spool sets it aside."""
    root = tmp_path / "spool"
    shutil.copytree(good / "spool", root)
    spool, ledger = Spool(root), Ledger.read(good / "ledger")
    spool_tools.submit(spool, "hurt")
    (path,) = root.glob("jobs/queued/r/*/*,hurt.json")
    path.write_text("{")
    assert spool.queue.claim("runner") is None
    ledger.asked["hurt"] = "r"
    ledger.accepted.add("hurt")
    assert violations(root, ledger) == [f"job hurt: {next(root.glob('jobs/damaged/*')).name} is set aside, and nobody "
                                        "damaged it"]  # fmt: skip
    ledger.damaged.add("hurt")
    assert violations(root, ledger) == []
    # A submitter of the same id that dies has removed the events, and has not queued the new job.
    (root / "jobs/events/hurt.jsonl").unlink()
    assert violations(root, ledger) != []
    ledger.repeated.add("hurt")
    assert violations(root, ledger) == []


def test_a_process_that_is_left_is_found(tmp_path: Path) -> None:
    assert leftovers(tmp_path) == []
    with subprocess.Popen(["sleep", "60"], env={"TANDEM_ROOT": str(tmp_path)}) as process:
        assert [line.split()[0] for line in leftovers(tmp_path)] == [str(process.pid)]
        process.kill()


def test_the_checker_shares_no_code_with_tandem() -> None:
    code = "import sys, bench.soak.check; print([name for name in sys.modules if name.split('.')[0] == 'tandem'])"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
