"""The tuner, which advances fine-tunings, without HTTP. The tests kill the tuner at every change of
the volume, and check the meaning of "auto" and the length of rows."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api_server import BASE_MODEL, make_root, run_one, serve
from openai_client import chats, pairs
from spool.volume_tools import DiedError, dying_at
from tandem.config import Settings
from tandem.controller.deployment import Deployment
from tandem.controller.openai.hyperparameters import checkpoint_every, resolved, row_length
from tandem.controller.openai.lines import check_lines
from tandem.controller.openai.progress import run_name, tuning_events
from tandem.controller.openai.tuner import Tuner
from tandem.spool import Spool
from tandem.spool.removal import prune
from tandem.spool.schema.tuning import Hyperparameters, Tuning, Upload
from tandem.spool.tunings import new_id
from tandem.system.logs import Log


def deployment(root: Path) -> Deployment:
    return Deployment(Settings(root=root, base_model=BASE_MODEL))


def keep(spool: Spool, content: bytes) -> Upload:
    upload_id = new_id("file")
    with spool.uploads.receiving() as staged:
        path = staged / f"{upload_id}.jsonl"
        path.write_bytes(content)
        method, lines = check_lines(path)
        upload = Upload(
            id=upload_id,
            filename="a.jsonl",
            purpose="fine-tune",
            method=method,
            lines=lines,
            size=len(content),
            created=time.time(),
        )
        spool.uploads.commit(staged, upload)
    return upload


def tuning_of(spool: Spool, upload: Upload, **more: Any) -> Tuning:
    tuning_id = new_id("ftjob")
    values = Hyperparameters(n_epochs=3, batch_size=4)
    tuning = Tuning(
        id=tuning_id,
        created=time.time(),
        model=BASE_MODEL,
        run=run_name(tuning_id, None),
        method=upload.method,
        seed=1,
        training_file=upload.id,
        **{"hyperparameters": values, **more},
    )
    spool.tunings.create(tuning)
    return tuning


def advance(root: Path, tuning_id: str, tuner: Tuner | None = None) -> None:
    tuner = tuner or Tuner(deployment(root))
    tuner.advance(Spool(root).tunings.get(tuning_id))


def summary(root: Path, tuning_id: str) -> Any:
    """The state of a fine-tuning and its spool, without times."""
    spool = Spool(root)
    tuning = spool.tunings.get(tuning_id)
    shown = tuning.model_dump(exclude={"plan": {"made"}, "end": {"finished"}})
    jobs = [
        (state, job.spec.id, job.spec.base_step, job.spec.data.sha256)
        for state, job in spool.jobs.list()
    ]
    results = b""
    if tuning.end and tuning.end.result_file:
        results = spool.uploads.path(spool.uploads.get(tuning.end.result_file)).read_bytes()
    runs = [(run, spool.checkpoints.steps(run)) for run in spool.runs.names()]
    return shown, jobs, results, runs


def serve_all(spool: Spool, tuning: Tuning) -> None:
    while spool.jobs.list(states=("queued",)):
        run_one(spool)


def cancel(spool: Spool, tuning: Tuning) -> None:
    spool.tunings.change(tuning.id, lambda now: now.model_copy(update={"cancelled": 1.0}))


def pause(spool: Spool, tuning: Tuning) -> None:
    spool.tunings.change(tuning.id, lambda now: now.model_copy(update={"paused": True}))


def nothing(spool: Spool, tuning: Tuning) -> None: ...


def served(spool: Spool, tuning: Tuning) -> None:
    serve(spool, tuning.run, 3)


# The changes that a test makes on the spool before each poll of the controller.
LOOKS: dict[str, tuple[Callable[[Spool, Tuning], None], ...]] = {
    "validates": (nothing,),
    "submits": (nothing, nothing),
    "goes on": (nothing, nothing, serve_all),
    "completes": (nothing, nothing, serve_all, serve_all, served),
    "cancels": (nothing, nothing, cancel),
    "pauses": (nothing, nothing, pause),
}


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory for the spool, because fsync on a disk is slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.slow  # the test kills the tuner once at each change of the volume
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LOOKS)
def test_dying_anywhere(memory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """If the controller dies at any change of the volume, the next controller reaches the same
    state as a controller that does not die."""
    for level in ("info", "warning", "error"):  # the log's writes don't go to the volume
        monkeypatch.setattr(Log, level, lambda *_, **__: None)
    template, dead = memory / f"{name} template", memory / f"{name} dead"
    make_root(template)
    tuning = tuning_of(Spool(template), keep(Spool(template), chats(8)))
    for number, before in enumerate(LOOKS[name]):
        before(Spool(template), tuning)
        if number < len(LOOKS[name]) - 1:
            advance(template, tuning.id)
    undisturbed = memory / f"{name} undisturbed"
    shutil.copytree(template, undisturbed)
    start = summary(undisturbed, tuning.id)
    for _ in range(2):
        advance_open(undisturbed, tuning.id)
    after = summary(undisturbed, tuning.id)
    assert after != start
    deaths = 0
    for count in range(1, 1000):
        shutil.copytree(template, dead)
        tuner = Tuner(deployment(dead))
        try:
            with dying_at(count):
                advance(dead, tuning.id, tuner)
        except DiedError:
            deaths += 1
        else:
            break
        for _ in range(3):
            advance_open(dead, tuning.id)
            if summary(dead, tuning.id) == after:
                break
        assert summary(dead, tuning.id) == after, count
        shutil.rmtree(dead)
    assert deaths > 2


def advance_open(root: Path, tuning_id: str) -> None:
    if Spool(root).tunings.get(tuning_id).end is None:
        advance(root, tuning_id)


AUTO = {
    # number of examples: (epochs, batch size)
    1: (25, 1),
    10: (10, 1),
    33: (3, 2),
    34: (3, 2),
    100: (3, 6),
    1000: (3, 32),
    8333: (3, 32),
    8334: (2, 32),
    30_000: (1, 32),
}


@pytest.mark.parametrize("examples", AUTO)
def test_auto(examples: int) -> None:
    found = resolved(Hyperparameters(), "supervised", examples)
    assert (found.n_epochs, found.batch_size) == AUTO[examples]
    assert (found.learning_rate_multiplier, found.beta) == (1.0, "auto")
    assert resolved(Hyperparameters(), "dpo", examples).beta == 0.1
    given = Hyperparameters(n_epochs=2, batch_size=3, learning_rate_multiplier=4, beta=0.5)
    assert resolved(given, "dpo", examples) == given


def test_a_job_is_an_epoch_unless_that_is_long() -> None:
    assert checkpoint_every(batch=4, examples=10, size=10_000) == 3
    assert checkpoint_every(batch=1, examples=1000, size=10**6) == 100
    # A job has at most 16 MiB of lines: 1,677 lines of 10,000 bytes.
    assert checkpoint_every(batch=32, examples=10**5, size=10**9) == 52
    assert checkpoint_every(batch=256, examples=1000, size=1000 * 2**23) == 1


def test_a_row_holds_the_longest_example_and_a_batch() -> None:
    assert row_length(longest=20, tokens=100, steps=10, positions=4096) == 256
    assert row_length(longest=257, tokens=100, steps=10, positions=4096) == 512
    assert row_length(longest=20, tokens=10_000, steps=10, positions=4096) == 1024
    assert row_length(longest=20, tokens=10**6, steps=10, positions=4096) == 2048
    assert row_length(longest=3000, tokens=10**6, steps=10, positions=4096) == 4096
    assert row_length(longest=900, tokens=900, steps=1, positions=1000) == 1000


def test_a_mistake_of_ours_ends_the_job_and_no_other(tmp_path: Path) -> None:
    root = make_root(tmp_path / "spool")
    spool = Spool(root)
    broken, other = (tuning_of(spool, keep(spool, content)) for content in (pairs(3), chats(3)))

    class Broken(Tuner):
        def _measure(self, tuning: Tuning, *rest: Any) -> tuple[int, int]:
            if tuning.id == broken.id:
                raise ZeroDivisionError
            return super()._measure(tuning, *rest)

    tuner = Broken(deployment(root))
    for tuning in (broken, other):
        tuner.advance(tuning)
    end = spool.tunings.get(broken.id).end
    assert (end.status, end.code) == ("failed", "server_error")
    assert "ZeroDivisionError in the controller" in end.message
    assert spool.tunings.get(other.id).plan is not None


def test_a_full_volume_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spool.volume_tools import full_disk

    root = make_root(tmp_path / "spool")
    spool = Spool(root)
    tuning = tuning_of(spool, keep(spool, chats(4)))
    with monkeypatch.context() as patch:
        patch.setattr("tandem.spool.fs.write_all", full_disk)
        advance(root, tuning.id)
    assert spool.tunings.get(tuning.id) == tuning
    advance(root, tuning.id)
    assert spool.tunings.get(tuning.id).plan is not None


def test_events_outlive_their_jobs(tmp_path: Path) -> None:
    """`TANDEM_KEEP_DAYS` removes ended jobs. The fine-tuning still reports the remaining jobs of
    its chain."""
    root = make_root(tmp_path / "spool")
    spool, tuner = Spool(root), Tuner(deployment(root))
    tuning = tuning_of(spool, keep(spool, chats(4)))
    for _ in range(2):
        tuner.advance(spool.tunings.get(tuning.id))
    run_one(spool)
    everything = tuning_events(spool, spool.tunings.get(tuning.id))
    assert [one["message"] for one in everything][-1] == "Checkpoint created at step 1"
    prune(spool, Settings(root=root, keep_days=1e-9))
    assert not spool.jobs.list(states=("succeeded",))
    left = [one["message"] for one in tuning_events(spool, spool.tunings.get(tuning.id))]
    assert left == [one["message"] for one in everything][:3]
    tuner.advance(spool.tunings.get(tuning.id))
    run_one(spool)
    told = [one["message"] for one in tuning_events(spool, spool.tunings.get(tuning.id))]
    assert told[-1] == "Checkpoint created at step 2"
