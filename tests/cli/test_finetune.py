"""`tandem train sft` against a real controller; the test does the runner's part: what a job trains, and resume."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from api_server import Server, claim, fail, run_one, serve
from tandem.data.packed_format import PackedBatch
from tandem.spool.schema import Job
from waiting import until

EXAMPLES = 23
pytestmark = pytest.mark.timeout(120)
_numbers = count()


@pytest.fixture
def run() -> str:
    return f"tuned-{next(_numbers)}"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch) -> None:
    """data.jsonl: example i trains the token 100 + i."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"token_ids": [5, 100 + i], "trainable": [False, True]}) for i in range(EXAMPLES)]
    Path("data.jsonl").write_text("\n".join(lines) + "\n")


ARGUMENTS = ("data.jsonl", "--batch-size", "4", "--checkpoint-every", "2", "--epochs", "2", "--sequence-length", "16")
STEPS, JOBS = 12, 6  # per epoch 6 batches, the last one of 3, in 3 jobs


class Trainer:
    """Claims jobs in a thread; `seen` has what each trains: its batches' trained tokens."""

    def __init__(self, server: Server, run: str, jobs: int, failing: tuple[int, ...] = ()) -> None:
        self.server, self.run, self.jobs, self.failing = server, run, jobs, failing
        self.seen: list[tuple[Job, list[list[int]], list[int]]] = []
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        spool = self.server.spool
        for number in range(self.jobs):
            until("a job is queued", lambda: spool.jobs.list(states=("queued",)), 60)
            queued = spool.jobs.list(states=("queued",))[0][1]
            with PackedBatch.open(spool.root / queued.spec.data.path) as batch:
                rows = [batch.row(r) for r in range(len(batch))]
                batches = [
                    sorted(int(t) for row in rows if batch.row_batch[row.index] == b for t in row.item_token)
                    for b in range(int(batch.row_batch.max()) + 1)
                ]
                held_out = sorted(int(t) for row in rows if batch.row_batch[row.index] < 0 for t in row.item_token)
            self.seen.append((queued, batches, held_out))
            if number in self.failing:
                fail(spool, claim(spool))
            else:
                job = run_one(spool)
                serve(spool, self.run, job.spec.base_step + 1)


@contextmanager
def trainer(server: Server, run: str, jobs: int, failing: tuple[int, ...] = ()) -> Iterator[Trainer]:
    made = Trainer(server, run, jobs, failing)
    made.thread.start()
    yield made
    made.thread.join(60)
    assert not made.thread.is_alive()


def test_every_example_is_trained_once_per_epoch_in_batches(tandem, server, run) -> None:
    with trainer(server, run, JOBS) as worker:
        status, out, err = tandem("train", "sft", run, *ARGUMENTS, "--lora-rank", "2", "--warmup", "3", "--lr", "0.5")
    assert status == 0, err
    assert f"{run}@{JOBS}" in out
    assert server.spool.runs.get(run).lora.rank == 2
    batches = [batch for _, of_job, _ in worker.seen for batch in of_job]
    assert [len(batch) for batch in batches] == ([4] * 5 + [3]) * 2
    for epoch in (batches[:6], batches[6:]):
        assert sorted(token for batch in epoch for token in batch) == list(range(100, 100 + EXAMPLES))
    assert batches[:6] != batches[6:]
    rates = [job.spec.optimizer.rate(step) for job, of_job, _ in worker.seen for step in range(len(of_job))]
    assert rates[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    np.testing.assert_allclose(rates[3:], 0.25 * (1 + np.cos(np.pi * np.arange(STEPS - 3) / (STEPS - 3))))
    assert [job.spec.base_step for job, *_ in worker.seen] == list(range(JOBS))


def test_short_epochs_share_a_job(tandem, server, run) -> None:
    with trainer(server, run, 3) as worker:
        status, _, err = tandem("train", "sft", run, "data.jsonl", "--batch-size", "8", "--epochs", "7",
                                "--checkpoint-every", "9", "--sequence-length", "16", "--schedule", "linear",
                                "--warmup", "0")  # fmt: skip
    assert status == 0, err
    assert [job.spec.optimizer.epochs for job, *_ in worker.seen] == [3, 3, 1]
    assert [sum(map(len, batches)) for _, batches, _ in worker.seen] == [EXAMPLES] * 3
    starts = [job.spec.optimizer.schedule.start for job, *_ in worker.seen]
    assert starts == [0, 9, 18]
    assert worker.seen[0][0].spec.optimizer.schedule.total == 21


def test_the_same_command_goes_on_after_a_failed_job_and_when_records_are_gone(tandem, server, run) -> None:
    with trainer(server, run, 3, failing=(2,)) as first:
        status, _, err = tandem("train", "sft", run, *ARGUMENTS)
        assert (status, "SIGSEGV" in err) == (3, True), err
    assert server.spool.jobs.list(run, ("queued",)) == []  # what was prepared ahead
    for _, job in server.spool.jobs.list(run, ("succeeded",)):  # as after TANDEM_KEEP_DAYS
        server.spool.paths.id_file(job.spec.id).unlink()
    with trainer(server, run, 4) as second:
        status, _, err = tandem("train", "sft", run, *ARGUMENTS)
    assert status == 0, err
    trained = [batch for _, of_job, _ in first.seen[:2] + second.seen for batch in of_job]
    assert len(trained) == STEPS
    assert sorted(token for batch in trained for token in batch) == sorted([*range(100, 100 + EXAMPLES)] * 2)
    status, _, err = tandem("train", "sft", run, *ARGUMENTS)
    assert (status, "complete" in err, f"{run}@{JOBS}" in err) == (1, True, True)


def test_another_training_of_the_run_in_between_is_refused(tandem, server, run) -> None:
    long = ("data.jsonl", "--batch-size", "12", "--checkpoint-every", "1", "--sequence-length", "16")
    with trainer(server, run, 2, failing=(1,)):
        assert tandem("train", "sft", run, *long)[0] == 3
    with trainer(server, run, 1):
        assert tandem("train", "sft", run, "data.jsonl", "--batch-size", "23", "--sequence-length", "16")[0] == 0
    status, _, err = tandem("train", "sft", run, *long)
    assert (status, "base_step" in err) == (1, True)


def test_a_share_is_held_out_and_never_trained(tandem, server, run) -> None:
    with trainer(server, run, 3) as worker:
        assert tandem("train", "sft", run, *ARGUMENTS[:-4], "--sequence-length", "16", "--held-out", "0.2")[0] == 0
    held_out = worker.seen[0][2]
    assert len(held_out) == 5
    assert [tokens for *_, tokens in worker.seen] == [held_out] * 3
    trained = sorted(token for _, of_job, _ in worker.seen for batch in of_job for token in batch)
    assert trained == sorted(set(range(100, 100 + EXAMPLES)) - set(held_out))
    assert worker.seen[0][0].spec.data.num_held_out == 5
    assert worker.seen[0][0].spec.data.num_trajectories == 8


CONFIGS = {
    "not TOML": ("run = ", "as TOML"),
    "no run": ("data = 'data.jsonl'", "run"),
    "a run's name with a slash": ("run = 'a/b'\ndata = 'data.jsonl'", "run"),
    "no data": ("run = 'x'", "data"),
    "unknown key": ("run = 'x'\ndata = 'data.jsonl'\nlerning_rate = 1", "lerning_rate"),
    "negative rate": ("run = 'x'\ndata = 'data.jsonl'\nlearning_rate = -1", "learning_rate"),
    "text for a rate": ("run = 'x'\ndata = 'data.jsonl'\nlearning_rate = 'fast'", "learning_rate"),
    "infinite rate": ("run = 'x'\ndata = 'data.jsonl'\nlearning_rate = inf", "learning_rate"),
    "no epochs": ("run = 'x'\ndata = 'data.jsonl'\nepochs = 0", "epochs"),
    "half an epoch": ("run = 'x'\ndata = 'data.jsonl'\nepochs = 0.5", "epochs"),
    "empty batches": ("run = 'x'\ndata = 'data.jsonl'\nbatch_size = 0", "batch_size"),
    "unknown schedule": ("run = 'x'\ndata = 'data.jsonl'\nschedule = 'step'", "schedule"),
    "negative warm-up": ("run = 'x'\ndata = 'data.jsonl'\nwarmup = -3", "warmup"),
    "everything held out": ("run = 'x'\ndata = 'data.jsonl'\nheld_out = 1.0", "held_out"),
    "a held-out file that is missing": ("run = 'x'\ndata = 'data.jsonl'\nheld_out = 'none.jsonl'", "none.jsonl"),
    "data that is missing": ("run = 'x'\ndata = 'none.jsonl'", "none.jsonl"),
    "unknown format": ("run = 'x'\ndata = 'data.jsonl'\nformat = 'csv'", "format"),
    "pairs' kind": ("run = 'x'\ndata = 'data.jsonl'\nkind = 'dpo'", "kind"),
    "LoRA of rank 0": ("run = 'x'\ndata = 'data.jsonl'\nlora = { rank = 0 }", "lora.rank"),
    "a loss of RL": ("run = 'x'\ndata = 'data.jsonl'\nloss = { policy = 'ppo' }", "loss.policy"),
    "two sizes": (
        "run = 'x'\ndata = 'data.jsonl'\noptimizer = { grad_accumulation_sequences = 4 }",
        "grad_accumulation_sequences",
    ),
    "rows that are too long": ("run = 'x'\ndata = 'data.jsonl'\nsequence_length = 100000", "packing.sequence_length"),
    "rows of one token": ("run = 'x'\ndata = 'data.jsonl'\nsequence_length = 1", "sequence_length"),
    "a seed that is text": ("run = 'x'\ndata = 'data.jsonl'\nseed = 'x'", "seed"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_broken_configuration_is_refused_with_its_key(tandem, server, name: str) -> None:
    text, key = CONFIGS[name]
    Path("tune.toml").write_text(text)
    jobs = len(server.spool.jobs.list())
    status, out, err = tandem("train", "sft", "--config", "tune.toml")
    assert (status, out) == (1, "")
    assert key in err.replace("\n", " ")
    if key in ("batch_size", "epochs", "seed", "learning_rate", "warmup", "schedule", "lerning_rate"):
        assert "tune.toml, line 3" in err
    assert len(server.spool.jobs.list()) == jobs


def test_a_broken_record_is_refused_before_anything_is_made(tandem, server, run: str) -> None:
    lines = Path("data.jsonl").read_text().splitlines()
    lines[20] = '{"token_ids": [5, 6], "trainable": [true, true]}'
    Path("data.jsonl").write_text("\n".join(lines))
    status, _, err = tandem("train", "sft", run, *ARGUMENTS)
    assert (status, "line 21" in err, "trainable" in err) == (1, True, True)
    assert run not in [spec.name for spec in server.spool.runs.list()]


def test_rows_may_become_longer_in_mid_training(tandem, server, run: str) -> None:
    """An example that does not fit is found when its job is made. The settings that help name no job."""
    with trainer(server, run, 2):
        status, _, err = tandem("train", "sft", run, "data.jsonl", "--batch-size", "12", "--checkpoint-every", "1",
                                "--sequence-length", "16")  # fmt: skip
    assert status == 0, err
    status, _, err = tandem("train", "sft", run, "data.jsonl", "--batch-size", "12", "--checkpoint-every", "1",
                            "--sequence-length", "32", "--too-long", "drop")  # fmt: skip
    assert (status, "complete" in err) == (1, True)
