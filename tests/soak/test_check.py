"""The soak's checker finds no violation on a good spool, and finds each violation on a spool that
has it."""

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
from safetensors.numpy import save

from soak.check import Ledger, leftovers, violations
from spool import spool_tools
from tandem.spool import Spool
from tandem.spool.schema import JobError, JobResult, Served

STEPS = 3
ADAPTER, ADAM = "adapter_model.safetensors", "optimizer/adam.safetensors"
TWO, SERVED = "runs/r/checkpoints/00000002", "runs/r/served.json"
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
        spool.events.append(
            spec.id, "step", attempt=job.attempt, step=step, steps=STEPS, metrics=metrics
        )
    if steps < STEPS:
        return job
    staged = spool.paths.work_dir(spec.id, job.attempt) / "checkpoint"
    (staged / "optimizer").mkdir(parents=True)
    write_adapter(staged, 1.0 + spec.base_step)
    (staged / ADAM).write_bytes(save({"step": np.array(STEPS * (spec.base_step + 1))}))
    manifest = spool.checkpoints.commit(
        staged, spec.run, spec.base_step + 1, spec.id, metrics=metrics
    )
    sha256 = manifest.files[ADAPTER].sha256
    spool.events.append(
        spec.id, "checkpoint", attempt=job.attempt, step=manifest.step, sha256=sha256
    )
    spool.queue.finish(job, JobResult(state="succeeded", step=manifest.step, finished=time.time()))
    return job


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool with four jobs: one succeeded, one succeeded after a lost attempt, one failed, and
    one was cancelled."""
    root = tmp_path_factory.mktemp("good")
    spool = Spool.create(root / "spool")
    spool.runs.create(spool_tools.run_spec("r"), write_adapter)
    lines = [{"kind": "run", "run": "r"}, {"kind": "strike"}]
    for job_id in ("one", "two", "bad", "gone"):
        spool_tools.submit(spool, job_id)
        lines += [{"kind": "asked", "id": job_id, "run": "r"}, {"kind": "accepted", "id": job_id}]
    attempt(spool)
    spool.queue.requeue(
        attempt(spool, steps=2), JobError(type="runner_lost", message="gone", retriable=True)
    )
    attempt(spool)
    spool.queue.requeue(attempt(spool, steps=1), JobError(type="oom", message="no memory"))
    spool.queue.cancel("gone")
    sha256 = spool.checkpoints.manifest("r", 2).files[ADAPTER].sha256
    spool.served.put(
        "r",
        Served(
            step=2,
            model="r@2",
            checkpoint=sha256,
            verified=time.time(),
            mean_abs_logprob_error=1e-4,
            allowed_logprob_error=0.15,
            tokens_checked=9,
        ),
    )
    spool.events.append("two", "served", step=2)
    (root / "ledger").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def directory_of(spool: Path, job_id: str) -> Path:
    (path,) = spool.glob(f"jobs/ended/*/*,{job_id},*")
    return path


def file_of(spool: Path, job_id: str, name: str = "job.json") -> Path:
    return directory_of(spool, job_id) / name


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert re.search(old, text), f"{path} has no {old}"
    path.write_text(re.sub(old, new, text, count=1))


def manifest(old: str, new: str) -> Callable[[Path], object]:
    return lambda spool: edit(spool / TWO / "manifest.json", old, new)


def events(job_id: str, change: Callable[[list[str]], object]) -> Callable[[Path], object]:
    def apply(spool: Path) -> None:
        path = file_of(spool, job_id, "events.jsonl")
        lines = path.read_text().splitlines()
        change(lines)
        path.write_text("".join(line + "\n" for line in lines))

    return apply


def replaced(job_id: str, index: int | slice, old: str, new: str) -> Callable[[Path], object]:
    def change(lines: list[str]) -> None:
        chosen = range(len(lines))[index] if isinstance(index, slice) else [index]
        assert any(old in lines[i] for i in chosen), f"{old} is not in {lines}"
        for i in chosen:
            lines[i] = lines[i].replace(old, new)

    return events(job_id, change)


def number(lines: list[str]) -> None:
    for seq, line in enumerate(lines):
        lines[seq] = re.sub(r'"seq": ?\d+', f'"seq": {seq}', line)


def doubled_step(lines: list[str]) -> None:
    lines.insert(4, lines[4])
    number(lines)


def lost_event(lines: list[str]) -> None:
    """The event is lost, as if a writer had appended it to half a line of another writer."""
    assert '"loaded"' in lines.pop(2)
    number(lines)


def moved_to_live(spool: Path, job_id: str, how: Callable[..., object]) -> None:
    directory = directory_of(spool, job_id)
    target = spool / "jobs/live/r/00000" / directory.name.rpartition(",")[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    how(directory, target)


def later_checkpoint(spool: Path) -> None:
    shutil.copytree(spool / TWO, spool / "runs/r/checkpoints/00000003")
    edit(spool / "runs/r/checkpoints/00000003/manifest.json", '"step": 2', '"step": 3')


def forged(file: str, content: bytes) -> Callable[[Path], object]:
    """Replaces a file, and changes the manifest to match."""

    def apply(spool: Path) -> None:
        (spool / TWO / file).write_bytes(content)
        path = spool / TWO / "manifest.json"
        record = json.loads(path.read_text())
        record["files"][file] = {
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        path.write_text(json.dumps(record))

    return apply


# The checker's message (a regular expression) -> the change that breaks the spool.
BREAKS: dict[str, Callable[[Path], object]] = {
    "gone: was accepted, and is lost": lambda s: shutil.rmtree(directory_of(s, "gone")),
    r"one: is in \['live', 'ended'\]": lambda s: moved_to_live(s, "one", shutil.copytree),
    r"gone: is in \['live'\]": lambda s: moved_to_live(s, "gone", Path.rename),
    "gone.ULID is set aside, and nobody damaged it": lambda s: directory_of(s, "gone").rename(
        s / "jobs/damaged" / f"{directory_of(s, 'gone').name.rpartition(',')[0]}.ULID"
    ),
    "more of run r: nobody asked for it": lambda s: shutil.copytree(
        directory_of(s, "one"), str(directory_of(s, "one")).replace(",one,", ",more,")
    ),
    "one,.*|holds job two": lambda s: file_of(s, "one").write_text(file_of(s, "two").read_text()),
    r"one: is in \['succeeded'\], its state failed": lambda s: edit(
        file_of(s, "one"), '"state": "succeeded"', '"state": "failed"'
    ),
    "bad: is failed without a result": lambda s: edit(
        file_of(s, "bad"), r'(?s)"result": \{.*\}\n\}', '"result": null}'
    ),
    "run r: was created, and is lost": lambda s: shutil.rmtree(s / "runs/r"),
    "one: has no events": lambda s: file_of(s, "one", "events.jsonl").unlink(),
    r"two .*: the events' numbers are \[0, 2": events("two", lambda ls: ls.pop(1)),
    "one .*attempt 1 has only the events": events("one", lost_event),
    r"terminal events are \['succeeded', 'succeeded'\]": events(
        "one", lambda ls: ls.append(ls[-1])
    ),
    r"gone .*: its terminal events are \[\]": events("gone", lambda ls: ls.pop()),
    "bad .* are .'cancelled'": replaced("bad", ALL, '"failed"', '"cancelled"'),
    "bad .*its terminal event says": replaced("bad", ALL, "no memory", "much"),
    "one .*: has events of {'two'}": replaced("one", 0, '"one"', '"two"'),
    "one .*: after its end come": events("one", lambda ls: ls.append(ls[1])),
    r"two .*made the optimizer steps \[1, 2, 2\]": events("two", doubled_step),
    r"two .*made the optimizer steps \[1, 2, 4\]": replaced(
        "two", ALL, '"step": 3, "steps"', '"step": 4, "steps"'
    ),
    "one .*succeeded with 3 optimizer steps": replaced(
        "one", ALL, f'"steps": {STEPS}', '"steps": 4'
    ),
    "two .*: attempt 2 computed": replaced("two", 3, '"loss": 1.0', '"loss": 1.5'),
    "one .*: events out of order": replaced("one", 0, '"claimed"', '"released"'),
    "2 half-written lines": (
        lambda s: file_of(s, "one", "events.jsonl").open("a").write('{"a\n{"b\n')
    ),
    "two .*ended in attempt": lambda s: edit(file_of(s, "two"), '"attempt": 2', '"attempt": 1'),
    "one .*: left data": lambda s: file_of(s, "one", "data").mkdir(),
    "two .*: left lease.json": lambda s: file_of(s, "two", "lease.json").touch(),
    "two: left jobs/active/": lambda s: (s / "jobs/active/1,1,r,two").touch(),
    "20 temporary names after 1 strikes": lambda s: [
        (s / f"jobs/.tmp-{i}").touch() for i in range(20)
    ],
    r"two \(succeeded\): made the checkpoints \[\]": lambda s: shutil.rmtree(s / TWO),
    "run r: its chain is": lambda s: shutil.rmtree(s / "runs/r/checkpoints/00000001"),
    "two .*: made the checkpoints .*00000003": later_checkpoint,
    r"bad \(failed\): made the checkpoints": manifest('"two"', '"bad"'),
    "its job who does not exist": manifest('"two"', '"who"'),
    "adapter_config.json is .*, the manifest": (
        lambda s: (s / TWO / "adapter_config.json").write_text("()")
    ),
    "more is .* the manifest says None": lambda s: (s / TWO / "more").touch(),
    "its manifest can't be read": lambda s: (s / TWO / "manifest.json").write_text("{"),
    "its manifest is of r@1": manifest('"step": 2', '"step": 1'),
    "not those of the last step": manifest('"grad_norm": 3.0', '"grad_norm": 4.0'),
    "Adam counts 7 optimizer steps, the events count 6": forged(ADAM, save({"step": np.array(7)})),
    "job two announced another adapter": forged(ADAPTER, save({"a": np.ones((2, 3), np.float32)})),
    "other tensors than step 0": forged(ADAPTER, save({"a": np.ones(2, np.float32)})),
    "not finite": forged(ADAPTER, save({"a": np.full((2, 3), np.nan, np.float32)})),
    "can't be loaded": forged(ADAPTER, b"junk"),
    "run r: nothing is served": lambda s: (s / SERVED).unlink(),
    "served.json can't be read": lambda s: (s / SERVED).write_text("{"),
    "step 1 is served, the newest is 00000002": lambda s: edit(
        s / SERVED, '"step": 2', '"step": 1'
    ),
    "names step 9, which does not exist": lambda s: edit(s / SERVED, '"step": 2', '"step": 9'),
    "served.json says": lambda s: edit(s / SERVED, '"checkpoint": "....', '"checkpoint": "abcd'),
    "step 2 was not verified: error 0.1": lambda s: edit(s / SERVED, "0.0001", "0.1"),
    "job two has no event of it": events("two", lambda ls: ls.pop()),
}


def test_a_good_spool_has_no_violations(good: Path) -> None:
    assert violations(good / "spool", Ledger.read(good / "ledger"), swept=True) == []


@pytest.mark.parametrize("expected", BREAKS)
def test_each_broken_promise_is_found(good: Path, tmp_path: Path, expected: str) -> None:
    spool = tmp_path / "spool"
    shutil.copytree(good / "spool", spool)
    BREAKS[expected](spool)
    found = violations(spool, Ledger.read(good / "ledger"))
    assert any(re.search(expected, line) for line in found), found


def test_a_job_that_was_refused_and_exists_is_found(good: Path) -> None:
    ledger = Ledger.read(good / "ledger")
    ledger.refused.add("one")
    assert "job one: was refused, and exists" in violations(good / "spool", ledger)


def test_the_soaks_own_damage_is_no_violation(good: Path, tmp_path: Path) -> None:
    """The spool sets aside a queued job that the soak damaged."""
    root = tmp_path / "spool"
    shutil.copytree(good / "spool", root)
    spool, ledger = Spool(root), Ledger.read(good / "ledger")
    spool_tools.submit(spool, "hurt")
    (path,) = root.glob("jobs/live/r/*/*,hurt/job.json")
    path.write_text("{")
    assert spool.queue.claim("runner") is None
    ledger.asked["hurt"] = "r"
    ledger.accepted.add("hurt")
    assert violations(root, ledger) == [
        f"job hurt: {next(root.glob('jobs/damaged/*')).name} is set aside, and nobody damaged it"
    ]
    ledger.damaged.add("hurt")
    assert violations(root, ledger) == []


@pytest.mark.parametrize("steps", [(1,), (2,), (3,), (1, 2), (2, 3)])
def test_steps_that_a_full_volume_refused_are_no_violation(
    good: Path, tmp_path: Path, steps: tuple[int, ...]
) -> None:
    """Steps may lack events only if the volume was full when the events were due. The checkpoint
    must also say that the steps were made."""
    root, ledger = tmp_path / "spool", Ledger.read(good / "ledger")
    shutil.copytree(good / "spool", root)

    def leave_out(lines: list[str]) -> None:
        del lines[2 + steps[0] : 3 + steps[-1]]
        number(lines)

    events("one", leave_out)(root)
    place = 2 + steps[0]  # after `claimed`, `started`, `loaded` and the reported steps
    assert violations(root, ledger) != []
    for elsewhere in ((0, place - 1), (place + 1, 9)):
        ledger.full = {"one": [elsewhere]}
        assert violations(root, ledger) != []
    ledger.full = {"two": [(0, 9)]}
    assert violations(root, ledger) != []
    ledger.full = {"one": [(place, place)]}
    assert violations(root, ledger) == []
    forged(ADAM, save({"step": np.array(5)}))(root)
    assert any("Adam counts 5 optimizer steps" in line for line in violations(root, ledger))


@pytest.mark.parametrize("kind", ["loaded", "succeeded"])
def test_a_full_volume_excuses_no_other_event(good: Path, tmp_path: Path, kind: str) -> None:
    root, ledger = tmp_path / "spool", Ledger.read(good / "ledger")
    shutil.copytree(good / "spool", root)

    def lose(lines: list[str]) -> None:
        (place,) = [i for i, line in enumerate(lines) if f'"{kind}"' in line]
        del lines[place]
        number(lines)

    events("one", lose)(root)
    ledger.full = {"one": [(0, 9)]}
    assert violations(root, ledger) != []


def test_a_process_that_is_left_is_found(tmp_path: Path) -> None:
    assert leftovers(tmp_path) == []
    with subprocess.Popen(["sleep", "60"], env={"TANDEM_ROOT": str(tmp_path)}) as process:
        assert [line.split()[0] for line in leftovers(tmp_path)] == [str(process.pid)]
        process.kill()


def test_the_checker_shares_no_code_with_tandem() -> None:
    code = (
        "import sys, tests.soak.check; print([name for name in sys.modules if name.split('.')[0] =="
        " 'tandem'])"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
