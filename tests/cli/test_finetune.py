"""`tandem train sft` against a real controller; the test acts as the runner. The tests check the
data of each job. They also check that the same command, given again, continues its training."""

import json
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from api_server import KEY, Server, claim, fail, run_one, serve
from tandem.client import Tandem
from tandem.client.chain import Chain
from tandem.config import Settings
from tandem.data.chain_plan import SFTTraining
from tandem.data.packed_format import PackedBatch
from tandem.errors import Conflict
from tandem.spool.removal import prune
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
    lines = [
        json.dumps({"token_ids": [5, 100 + i], "trainable": [False, True]}) for i in range(EXAMPLES)
    ]
    Path("data.jsonl").write_text("\n".join(lines) + "\n")


ARGUMENTS = (
    "data.jsonl",
    "--batch-size",
    "4",
    "--checkpoint-every",
    "2",
    "--epochs",
    "2",
    "--sequence-length",
    "16",
)
STEPS, JOBS = 12, 6  # an epoch: 6 batches in 3 jobs; its last batch has 3 examples


type Trained = tuple[Job, list[list[int]], list[int]]
"""A job, the trained tokens of each of its batches, and the held-out tokens."""


@contextmanager
def trainer(
    server: Server, run: str, jobs: int, failing: tuple[int, ...] = ()
) -> Iterator[list[Trained]]:
    """Executes `jobs` jobs in a thread; the jobs whose numbers are in `failing` fail. Yields the
    list of the jobs' data."""
    spool, trained = server.spool, list[Trained]()

    def work() -> None:
        for number in range(jobs):
            until("a job is queued", lambda: spool.jobs.list(states=("queued",)))
            queued = spool.jobs.list(states=("queued",))[0][1]
            with PackedBatch.open(spool.root / queued.spec.data.path) as batch:
                # The examples of each batch; the held-out examples are batch -1.
                tokens: dict[int, list[int]] = defaultdict(list)
                for row in map(batch.row, range(len(batch))):
                    tokens[int(batch.row_batch[row.index])] += map(int, row.item_token)
            held_out = sorted(tokens.pop(-1, []))
            trained.append(
                (queued, [sorted(tokens[number]) for number in sorted(tokens)], held_out)
            )
            if number in failing:
                fail(spool, claim(spool))
            else:
                serve(spool, run, run_one(spool).spec.base_step + 1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield trained
    thread.join(60)
    assert not thread.is_alive()


def test_every_example_is_trained_once_per_epoch_in_batches(tandem, server, run) -> None:
    with trainer(server, run, JOBS) as trained:
        status, out, err = tandem(
            "train", "sft", run, *ARGUMENTS, "--lora-rank", "2", "--warmup", "3", "--lr", "0.5"
        )
    assert status == 0, err
    assert f"{run}@{JOBS}" in out
    assert server.spool.runs.get(run).lora.rank == 2
    batches = [batch for _, of_job, _ in trained for batch in of_job]
    assert [len(batch) for batch in batches] == ([4] * 5 + [3]) * 2
    for epoch in (batches[:6], batches[6:]):
        assert sorted(token for batch in epoch for token in batch) == list(
            range(100, 100 + EXAMPLES)
        )
    assert batches[:6] != batches[6:]
    rates = [
        job.spec.optimizer.rate(step) for job, of_job, _ in trained for step in range(len(of_job))
    ]
    assert rates[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    np.testing.assert_allclose(
        rates[3:], 0.25 * (1 + np.cos(np.pi * np.arange(STEPS - 3) / (STEPS - 3)))
    )
    assert [job.spec.base_step for job, *_ in trained] == list(range(JOBS))


def test_a_rank_leaves_the_rest_of_the_shape(tandem, server, run, tmp_path) -> None:
    file = tmp_path / "training.toml"
    file.write_text('lora = {rank = 8, alpha = 8, targets = ["q_proj"]}')
    with trainer(server, run, JOBS):
        status, _, err = tandem(
            "train", "sft", run, *ARGUMENTS, "--config", str(file), "--lora-rank", "2"
        )
    assert status == 0, err
    lora = server.spool.runs.get(run).lora
    assert (lora.rank, lora.alpha, lora.targets) == (2, 4, ("q_proj",))


def test_short_epochs_share_a_job(tandem, server, run) -> None:
    with trainer(server, run, 3) as trained:
        status, _, err = tandem(
            "train",
            "sft",
            run,
            "data.jsonl",
            "--batch-size",
            "8",
            "--epochs",
            "7",
            "--checkpoint-every",
            "9",
            "--sequence-length",
            "16",
            "--schedule",
            "linear",
            "--warmup",
            "0",
        )
    assert status == 0, err
    assert [job.spec.optimizer.epochs for job, *_ in trained] == [3, 3, 1]
    assert [sum(map(len, batches)) for _, batches, _ in trained] == [EXAMPLES] * 3
    starts = [job.spec.optimizer.schedule.start for job, *_ in trained]
    assert starts == [0, 9, 18]
    assert trained[0][0].spec.optimizer.schedule.total == 21


def test_the_same_command_goes_on_after_a_failed_job_and_when_records_are_gone(
    tandem, server, run
) -> None:
    with trainer(server, run, 3, failing=(2,)) as first:
        status, _, err = tandem("train", "sft", run, *ARGUMENTS)
        assert (status, "SIGSEGV" in err) == (3, True), err
    assert server.spool.jobs.list(run, ("queued",)) == []  # no prepared job is left
    for _, job in server.spool.jobs.list(run, ("succeeded",)):  # as after TANDEM_KEEP_DAYS
        shutil.rmtree(server.spool.paths.job_dir(job.spec.id))
    # The command continues the same training although its deadline differs.
    with trainer(server, run, 4) as second:
        status, _, err = tandem("train", "sft", run, *ARGUMENTS, "--set", "deadline_seconds=1e6")
    assert status == 0, err
    assert [job.spec.deadline_seconds for job, *_ in first + second] == [86400.0] * 3 + [1e6] * 4
    trained = [batch for _, of_job, _ in first[:2] + second for batch in of_job]
    assert len(trained) == STEPS
    assert sorted(token for batch in trained for token in batch) == sorted(
        [*range(100, 100 + EXAMPLES)] * 2
    )
    # The command recognises the complete training although `--sequence-length` and `--too-long`
    # differ.
    status, _, err = tandem("train", "sft", run, *ARGUMENTS[:-1], "32", "--too-long", "drop")
    assert (status, "complete" in err, f"{run}@{JOBS}" in err) == (1, True, True)


def test_the_same_command_trains_what_a_rollback_has_discarded(tandem, server, run) -> None:
    with trainer(server, run, JOBS):
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 0
    server.spool.checkpoints.rollback(run, 2)
    with trainer(server, run, JOBS - 2) as again:
        status, out, err = tandem("train", "sft", run, *ARGUMENTS)
    assert (status, f"{run}@{JOBS}" in out) == (0, True), err
    assert [job.spec.base_step for job, *_ in again] == list(range(2, JOBS))
    assert server.spool.checkpoints.newest(run) == JOBS


def test_another_training_of_the_run_in_between_is_refused(tandem, server, run) -> None:
    long = (
        "data.jsonl",
        "--batch-size",
        "12",
        "--checkpoint-every",
        "1",
        "--sequence-length",
        "16",
    )
    with trainer(server, run, 2, failing=(1,)):
        assert tandem("train", "sft", run, *long)[0] == 3
    with trainer(server, run, 1):
        assert (
            tandem(
                "train", "sft", run, "data.jsonl", "--batch-size", "23", "--sequence-length", "16"
            )[0]
            == 0
        )
    status, _, err = tandem("train", "sft", run, *long)
    assert (status, "base_step" in err) == (1, True)


CHANGED = json.dumps({"token_ids": [5, 99], "trainable": [False, True]}) + "\n"


def test_data_that_changed_in_mid_training_is_refused_with_both_ways_out(
    tandem, server, run
) -> None:
    whole = Path("data.jsonl").read_text()
    with trainer(server, run, 3, failing=(2,)) as first:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    Path("data.jsonl").write_text(whole + CHANGED)
    jobs = len(server.spool.jobs.list(run))
    status, out, err = tandem("train", "sft", run, *ARGUMENTS)
    said = " ".join(err.split())
    assert (status, out, len(server.spool.jobs.list(run))) == (1, "", jobs), err
    assert f"data.jsonl is not what {run} is half trained on: job 2 of {JOBS}" in said
    assert "restore the file as it was. To train the changed file instead, roll the run" in said
    assert f"tandem checkpoints rollback {run} 0), or change the training's seed" in said

    Path("data.jsonl").write_text(whole)  # the message's first remedy: restore the file
    with trainer(server, run, 1, failing=(0,)) as second:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    assert second[0][0].spec.base_step == 2
    assert second[0][0].spec.labels == first[2][0].spec.labels
    # the message's other remedies: another seed, or a rollback
    Path("data.jsonl").write_text(whole + CHANGED)
    for arguments, base in ((("--seed", "1"), 2), ((), 0)):
        if not arguments:
            server.spool.checkpoints.rollback(run, 0)
        with trainer(server, run, 1, failing=(0,)) as anew:
            assert tandem("train", "sft", run, *ARGUMENTS, *arguments)[0] == 3
        assert anew[0][0].spec.base_step == base


def test_without_the_jobs_records_the_same_data_goes_on_and_other_data_begins_anew(
    tandem, server, run
) -> None:
    """TANDEM_KEEP_DAYS has removed the jobs' records. The checkpoints still name their jobs. No
    record is left of a training with other data, so nothing tells whether it was complete."""
    whole = Path("data.jsonl").read_text()
    with trainer(server, run, 3, failing=(2,)) as first:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    prune(server.spool, Settings(keep_days=1e-9))
    assert server.spool.jobs.list(run) == []
    with trainer(server, run, 1, failing=(0,)) as second:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    assert second[0][1:] == first[2][1:]
    assert second[0][0].spec.labels == first[2][0].spec.labels
    assert second[0][0].spec.base_step == 2

    Path("data.jsonl").write_text(whole + CHANGED)
    with trainer(server, run, 1, failing=(0,)) as anew:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    assert anew[0][0].spec.labels["part"] == f"1/{JOBS}"
    assert anew[0][0].spec.base_step == 2


def test_data_that_changed_beside_a_queued_job_is_refused(tandem, server, run) -> None:
    """Before the first checkpoint, only the queued job says on which data the run trains."""
    with trainer(server, run, 0):
        chain = Chain(SFTTraining(run=run, data="data.jsonl", batch_size=4, checkpoint_every=2))
        with Tandem(server.url, api_key=KEY) as client:
            client.create_run(run)
            chain._submit(client, chain.slices[0], None)
    Path("data.jsonl").write_text(CHANGED * EXAMPLES)
    arguments = ("data.jsonl", "--batch-size", "4", "--checkpoint-every", "2")
    status, _, err = tandem("train", "sft", run, *arguments)
    assert (status, f"{run} is half trained on: job 1 of 3" in " ".join(err.split())) == (1, True)
    assert len(server.spool.jobs.list(run)) == 1


def test_a_held_out_file_that_changed_is_named(tandem, server, run) -> None:
    Path("held.jsonl").write_text(CHANGED)
    arguments = (*ARGUMENTS, "--held-out", "held.jsonl")
    with trainer(server, run, 2, failing=(1,)):
        assert tandem("train", "sft", run, *arguments)[0] == 3
    Path("held.jsonl").write_text(CHANGED * 2)
    status, _, err = tandem("train", "sft", run, *arguments)
    assert (status, "held.jsonl is not what" in err, "held_out" in err) == (1, True, True), err


def test_data_that_is_written_while_it_trains_is_refused_and_a_copy_is_not(
    tandem, server, run
) -> None:
    whole = Path("data.jsonl").read_text()
    chain = Chain(SFTTraining(run=run, data="data.jsonl", batch_size=4, checkpoint_every=2))
    Path("data.jsonl").write_text(whole)
    chain._request(chain.slices[0], "name", None)
    for change in (lambda: Path("data.jsonl").write_text(whole[:-1] + " \n"), _remove):
        change()
        with pytest.raises(Conflict, match=r"changed while it trains\. Restore it"):
            chain._request(chain.slices[1], "name", 0)


def _remove() -> None:
    Path("data.jsonl").unlink()


@pytest.mark.parametrize("killed_at", ["before the epoch's last job", "after it"])
def test_a_kill_at_an_epochs_end_repeats_and_skips_nothing(
    tandem, server, run, killed_at: str
) -> None:
    """An epoch takes three jobs. The training stops before or after the third job, and then goes on
    to the end of the second epoch."""
    jobs = 3 if killed_at == "after it" else 2
    with trainer(server, run, jobs + 1, failing=(jobs,)) as first:
        assert tandem("train", "sft", run, *ARGUMENTS)[0] == 3
    with trainer(server, run, JOBS - jobs) as second:
        status, _, err = tandem("train", "sft", run, *ARGUMENTS)
    assert status == 0, err
    made = first[:jobs] + second
    assert [job.spec.base_step for job, *_ in made] == list(range(JOBS))
    assert [job.spec.optimizer.schedule.start for job, *_ in made] == [0, 2, 4, 6, 8, 10]
    batches = [batch for _, of_job, _ in made for batch in of_job]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3] * 2
    for epoch in (batches[:6], batches[6:]):
        assert sorted(token for batch in epoch for token in batch) == list(
            range(100, 100 + EXAMPLES)
        )


def test_a_run_that_trains_something_else_is_refused(tandem, server, run) -> None:
    assert tandem("run", "create", run, "--rank", "4")[0] == 0
    for shape in (("--lora-rank", "8"), ("--full",), ("--set", 'lora.targets=["q_proj"]')):
        status, _, err = tandem("train", "sft", run, *ARGUMENTS, *shape)
        assert (
            status,
            f"run '{run}' exists and trains a LoRA of rank=4" in err.replace("\n", " "),
        ) == (1, True)
    assert not server.spool.jobs.list(run)


def test_a_share_is_held_out_and_never_trained(tandem, server, run) -> None:
    with trainer(server, run, 3) as trained:
        assert (
            tandem(
                "train", "sft", run, *ARGUMENTS[:-4], "--sequence-length", "16", "--held-out", "0.2"
            )[0]
            == 0
        )
    held_out = trained[0][2]
    assert len(held_out) == 5
    assert [one for *_, one in trained] == [held_out] * 3
    tokens = sorted(token for _, of_job, _ in trained for batch in of_job for token in batch)
    assert tokens == sorted(set(range(100, 100 + EXAMPLES)) - set(held_out))
    assert trained[0][0].spec.data.num_held_out == 5
    assert trained[0][0].spec.data.num_trajectories == 8


BROKEN = [
    ("run = ", "as TOML"),
    ("data = 'data.jsonl'", "run: tune.toml, line 1: is missing"),
    ("run = 'x'\ndata = 'data.jsonl'\nlerning_rate = 1", "tune.toml, line 3: no such key"),
    ("run = 'x'\ndata = 'data.jsonl'\nlearning_rate = -1", "learning_rate: tune.toml, line 3"),
    ("run = 'x'\ndata = 'data.jsonl'\nheld_out = 1.0", "held_out"),
    ("run = 'x'\ndata = 'data.jsonl'\nheld_out = 'none.jsonl'", "none.jsonl"),
    ("run = 'x'\ndata = 'none.jsonl'", "none.jsonl"),
    ("run = 'x'\ndata = 'data.jsonl'\nformat = 'csv'", "format"),
    ("run = 'x'\ndata = 'data.jsonl'\nkind = 'dpo'", "kind"),
    ("run = 'x'\ndata = 'data.jsonl'\nloss = { policy = 'ppo' }", "loss.policy"),
    ("run = 'x'\ndata = 'data.jsonl'\noptimizer = { batch_size = 4 }", "optimizer.batch_size"),
    ("run = 'x'\ndata = 'data.jsonl'\nsequence_length = 100000", " sequence_length: "),
]


@pytest.mark.parametrize(("text", "problem"), BROKEN)
def test_a_broken_configuration_is_refused_with_its_key(
    tandem, server, text: str, problem: str
) -> None:
    Path("tune.toml").write_text(text)
    jobs = len(server.spool.jobs.list())
    status, out, err = tandem("train", "sft", "--config", "tune.toml")
    assert (status, out) == (1, "")
    assert problem in err.replace("\n", " ")
    assert len(server.spool.jobs.list()) == jobs


def test_what_is_too_long_is_refused_with_the_options_of_this_command(tandem, run) -> None:
    Path("long.jsonl").write_text(
        json.dumps({"token_ids": [1] * 20, "trainable": [False] + [True] * 19}) + "\n"
    )
    status, _, err = tandem("train", "sft", run, "long.jsonl", "--sequence-length", "16")
    advice = (
        "long.jsonl line 1: 20 tokens don't fit a row of 16; raise sequence_length, or set"
        ' too_long to "truncate"'
    )
    assert (status, advice in err.replace("\n", " ")) == (1, True), err
