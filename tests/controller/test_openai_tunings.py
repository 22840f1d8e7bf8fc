"""Fine-tuning jobs that the openai package creates, from the uploaded file to the model's name. The
tests also check refusals. The test acts as the runner."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from api_server import (
    BASE_MODEL,
    Process,
    claim,
    fail,
    make_root,
    run_one,
    serve,
    succeed,
    work,
)
from openai_client import chats, client, pairs, refused, upload
from tandem.config import Settings
from tandem.spool import Spool
from tandem.spool.removal import prune
from tandem.spool.schema import PENDING, JobError
from waiting import until

of_jobs = pytest.mark.sample(2, of="fine-tuning jobs")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("tunings") / "spool")


@pytest.fixture(scope="module")
def process(root: Path) -> Iterator[Process]:
    with Process(root, TANDEM_MAX_LORA_RANK="8") as process:
        yield process


@pytest.fixture(scope="module")
def sdk(process: Process) -> Iterator[OpenAI]:
    with client(process.url, max_retries=8) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def spool(process: Process, root: Path) -> Spool:
    return Spool(root)


@pytest.fixture(autouse=True)
def no_jobs_left(spool: Spool, sdk: OpenAI) -> Iterator[None]:
    yield
    for job in sdk.fine_tuning.jobs.list():
        if job.status not in ("succeeded", "failed", "cancelled"):
            sdk.fine_tuning.jobs.cancel(job.id)
    for _, job in spool.jobs.list(states=PENDING):
        spool.queue.cancel(job.spec.id)


@pytest.fixture(scope="module")
def file(sdk: OpenAI) -> str:
    return upload(sdk, chats(10)).id


def supervised(**values: Any) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": values}}


# the fine-tuning has three jobs of two optimizer steps each
SHORT = supervised(n_epochs=3, batch_size=5)


def create(sdk: OpenAI, file: str, **more: Any) -> FineTuningJob:
    return sdk.fine_tuning.jobs.create(
        **{"model": BASE_MODEL, "training_file": file, "method": SHORT, **more}
    )


def queued(spool: Spool, count: int = 2) -> list[str]:
    """Waits until `count` jobs are queued. Returns each job's id without the text before the first
    dot."""

    def names() -> list[str]:
        return [job.spec.id.partition(".")[2] for _, job in spool.jobs.list(states=("queued",))]

    return until(f"{count} jobs are queued", lambda: len(names()) == count and names())


def status(sdk: OpenAI, job: FineTuningJob, wanted: str) -> FineTuningJob:
    def found() -> FineTuningJob | None:
        now = sdk.fine_tuning.jobs.retrieve(job.id)
        return now if now.status == wanted else None

    return until(f"{job.id} is {wanted}", found, poll=0.1)


def finish(spool: Spool, sdk: OpenAI, job: FineTuningJob) -> FineTuningJob:
    """Runs all parts of a fine-tuning job, and serves the last part's step."""
    run = spool.tunings.get(job.id).run
    until("it is planned", lambda: spool.tunings.get(job.id).plan)
    parts = spool.tunings.get(job.id).plan.parts
    while spool.checkpoints.newest(run) < parts:
        until("a part is queued", lambda: spool.jobs.list(run, states=("queued",)))
        run_one(spool)
    serve(spool, run, parts)
    return status(sdk, job, "succeeded")


@pytest.mark.slow
@of_jobs
def test_a_file_becomes_a_model(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(
        sdk,
        file,
        validation_file=file,
        suffix="My Model: 1",
        seed=7,
        metadata={"team": "a"},
        extra_headers={"X-Ignored": "1"},
    )
    assert (job.status, job.fine_tuned_model, job.trained_tokens) == (
        "validating_files",
        None,
        None,
    )
    assert (job.seed, job.metadata, job.model) == (7, {"team": "a"}, BASE_MODEL)
    run = spool.tunings.get(job.id).run
    assert run.startswith("ft-my-model-1-")
    # two jobs are queued, so that one waits while the other trains
    assert queued(spool) == ["00000", "00001"]
    assert sdk.fine_tuning.jobs.retrieve(job.id).status == "queued"
    spec = spool.jobs.list(run)[0][1].spec
    assert spool.runs.get(run).lora.rank == 8
    assert spool.runs.get(run).seed == 7
    assert (spec.optimizer.learning_rate, spec.optimizer.batch_size) == (2e-4, 5)
    assert (spec.data.num_trajectories, spec.data.num_held_out) == (10, 10)
    assert spec.labels == {"fine_tuning_job": job.id, "part": "1/3"}
    first = claim(spool)
    assert status(sdk, job, "running").hyperparameters.learning_rate_multiplier == 1.0
    work(spool, first)
    spool.events.append(
        first.spec.id, "evaluated", attempt=1, step=2, metrics={"held_out_loss": 0.25}
    )
    succeed(spool, first)
    assert queued(spool) == ["00001", "00002"]
    done = finish(spool, sdk, job)
    assert done.fine_tuned_model == f"ft:tiny:tandem:My-Model-1:{run}@3"
    assert done.finished_at >= done.created_at
    tokens = spec.data.num_unshared_tokens
    assert done.trained_tokens == 3 * tokens
    events = [*sdk.fine_tuning.jobs.list_events(job.id, limit=4)][::-1]
    messages = [event.message for event in events]
    assert messages[:3] == [
        f"Created fine-tuning job: {job.id}",
        f"Validating {file} and {file}",
        "Files validated, moving job to queued state",
    ]
    assert [m for m in messages if m.startswith("Checkpoint")] == [
        f"Checkpoint created at step {step}" for step in (2, 4, 6)
    ]
    assert messages[-1] == "The job has successfully completed"
    assert len({event.id for event in events}) == len(events)
    steps = [event.data for event in events if event.message.startswith("Step")]
    assert [one["step"] for one in steps if "train_loss" in one] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["total_steps"] == 6
    made = sdk.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [one.step_number for one in made] == [6, 4, 2]
    assert made[-1].metrics.full_valid_loss == 0.25
    [results] = done.result_files
    assert sdk.files.retrieve(results).purpose == "fine-tune-results"
    table = sdk.files.content(results).text.splitlines()
    assert table[0].startswith(
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy"
    )
    assert table[2] == "2,0.5,,0.25,,"
    assert len(table) == 7
    # `tandem jobs` and the metrics show the kind of the jobs.
    assert {job.spec.kind for _, job in spool.jobs.list(run)} == {"sft"}


@pytest.mark.slow
@of_jobs
def test_answers_are_of_the_packages_types(sdk: OpenAI, spool: Spool, file: str) -> None:
    """The answer is validated strictly, because the package itself accepts any JSON."""
    jobs, raw = sdk.fine_tuning.jobs, sdk.fine_tuning.jobs.with_raw_response

    def parsed(answer: Any) -> FineTuningJob:
        return FineTuningJob.model_validate(answer.http_response.json(), strict=True)

    job = parsed(raw.create(model=BASE_MODEL, training_file=file, method=SHORT))
    assert parsed(raw.retrieve(job.id)) == job
    assert parsed(raw.pause(job.id)).status in ("validating_files", "queued")
    parsed(raw.resume(job.id))
    finish(spool, sdk, job)
    assert parsed(raw.retrieve(job.id)).status == "succeeded"
    for answer, kind in (
        (raw.list(), FineTuningJob),
        (raw.list_events(job.id), FineTuningJobEvent),
        (jobs.checkpoints.with_raw_response.list(job.id), FineTuningJobCheckpoint),
    ):
        page = answer.http_response.json()
        assert page["object"] == "list"
        assert page["data"]
        for one in page["data"]:
            kind.model_validate(one, strict=True)
    broken = upload(sdk, chats(1, words=9000)).id
    bad = parsed(raw.create(model=BASE_MODEL, training_file=broken, method=SHORT))
    status(sdk, bad, "failed")
    assert parsed(raw.retrieve(bad.id)).error.param == "training_file"
    gone = parsed(raw.create(model=BASE_MODEL, training_file=file, method=SHORT))
    assert parsed(raw.cancel(gone.id)).status == "cancelled"


@pytest.mark.slow
@of_jobs
def test_pairs_train_dpo(sdk: OpenAI, spool: Spool) -> None:
    file = upload(sdk, pairs(6)).id
    values = {"n_epochs": 2, "batch_size": 3, "beta": 0.25, "learning_rate_multiplier": 0.5}
    job = create(sdk, file, method={"type": "dpo", "dpo": {"hyperparameters": values}})
    assert job.method.dpo.hyperparameters.beta == 0.25
    queued(spool)
    specs = [job.spec for _, job in spool.jobs.list(spool.tunings.get(job.id).run)]
    assert [spec.kind for spec in specs] == ["dpo", "dpo"]
    # All jobs of the chain have the same reference policy.
    assert [(spec.loss.beta, spec.loss.reference) for spec in specs] == [(0.25, 0)] * 2
    assert specs[0].optimizer.learning_rate == pytest.approx(1e-5)
    finish(spool, sdk, job)
    auto = create(sdk, file, method={"type": "dpo"})
    queued(spool)
    assert sdk.fine_tuning.jobs.retrieve(auto.id).method.dpo.hyperparameters.beta == 0.1


@pytest.mark.sample(1, of="programs of a whole stack are killed")
@pytest.mark.slow
def test_a_killed_controller_goes_on(
    sdk: OpenAI, spool: Spool, file: str, process: Process
) -> None:
    """The controller is killed with `kill -9` after each call and each part. Every part still
    becomes one job, and the jobs have the right order."""
    job = create(sdk, file)
    process.kill_and_restart()
    assert queued(spool) == ["00000", "00001"]
    process.kill_and_restart()
    run_one(spool)
    process.kill_and_restart()
    assert queued(spool) == ["00001", "00002"]
    sdk.fine_tuning.jobs.pause(job.id)
    process.kill_and_restart()
    until("nothing waits", lambda: not spool.jobs.list(states=("queued",)))
    sdk.fine_tuning.jobs.resume(job.id)
    process.kill_and_restart()
    assert queued(spool) == ["00001.1", "00002.1"]
    run_one(spool)
    last = run_one(spool)
    process.kill_and_restart()
    serve(spool, last.spec.run, 3)
    process.kill_and_restart()
    done = status(sdk, job, "succeeded")
    assert sdk.files.content(done.result_files[0]).text.count("\n") == 7
    ended = spool.jobs.list(last.spec.run)
    assert [(state, one.spec.base_step) for state, one in ended if state == "succeeded"] == [
        ("succeeded", step) for step in range(3)
    ]


@pytest.mark.slow
@of_jobs
def test_a_pause_lets_the_part_that_trains_end(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file)
    queued(spool)
    running = claim(spool)
    assert sdk.fine_tuning.jobs.pause(job.id).status == "running"
    assert not spool.jobs.list(states=("queued",))
    assert sdk.fine_tuning.jobs.pause(job.id).status == "running"  # the second call changes nothing
    work(spool, running)
    succeed(spool, running)
    status(sdk, job, "queued")
    time.sleep(2.5)  # in this time the controller polls twice
    assert not spool.jobs.list(states=PENDING)
    assert sdk.fine_tuning.jobs.resume(job.id).status == "running"
    sdk.fine_tuning.jobs.resume(job.id)
    assert queued(spool) == ["00001.1", "00002.1"]
    texts = [event.message for event in sdk.fine_tuning.jobs.list_events(job.id)]
    assert "The job is resumed" in texts
    assert "The job is paused; a part that trains goes on to its checkpoint" in texts
    finish(spool, sdk, job)


def test_a_cancelled_job_stays_so(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file)
    queued(spool)
    running = claim(spool)
    gone = sdk.fine_tuning.jobs.cancel(job.id)
    assert (gone.status, gone.fine_tuned_model) == ("cancelled", None)
    assert gone.finished_at
    assert not spool.jobs.list(states=("queued",))
    assert spool.jobs.cancel_requested(running.spec.id)
    assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    spool.queue.requeue(running, JobError(type="stopped", message="", retriable=True))
    until("it has ended", lambda: spool.tunings.get(job.id).end)
    assert sdk.fine_tuning.jobs.list_events(job.id).data[0].message == "The job was cancelled"
    for call in (sdk.fine_tuning.jobs.pause, sdk.fine_tuning.jobs.resume):
        with refused(400, "fine_tuning_job_id", "has ended already: cancelled", "invalid_state"):
            call(job.id)
    assert sdk.fine_tuning.jobs.cancel(job.id).status == "cancelled"


@pytest.mark.slow
@of_jobs
def test_an_operator_may_cancel_a_part(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file)
    queued(spool)
    spool.queue.cancel(f"{job.id}.00000")
    status(sdk, job, "cancelled")
    until("nothing waits", lambda: not spool.jobs.list(states=PENDING))


@pytest.mark.slow
@of_jobs
def test_a_failed_part_fails_the_job(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file)
    queued(spool)
    run_one(spool)
    queued(spool)
    fail(spool, claim(spool))
    failed = status(sdk, job, "failed")
    assert (failed.error.code, failed.error.param) == ("rank_crashed", None)
    assert f"{job.id}.00001" in failed.error.message
    until("nothing waits", lambda: not spool.jobs.list(states=PENDING))
    with refused(400, "fine_tuning_job_id", "has ended already: failed"):
        sdk.fine_tuning.jobs.cancel(job.id)


def test_a_refused_step_fails_the_job(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file, method=supervised(n_epochs=2, batch_size=10))
    queued(spool)
    run = run_one(spool).spec.run
    serve(spool, run, 1)
    run_one(spool)
    serve(spool, run, 1, refused_step=2, refused_reason="log-probs differ")
    failed = status(sdk, job, "failed")
    assert failed.error.code == "step_refused"
    assert "log-probs differ" in failed.error.message


def test_a_run_that_others_changed_fails_the_job(sdk: OpenAI, spool: Spool, file: str) -> None:
    job = create(sdk, file)
    queued(spool)
    run = run_one(spool).spec.run
    queued(spool)
    sdk.fine_tuning.jobs.pause(job.id)
    spool.checkpoints.rollback(run, 0)
    assert "rolled back" in status(sdk, job, "failed").error.message


BAD_EXAMPLES = {
    "too long": (chats(2) + chats(1, words=9000), "line 3: the example takes"),
    "blank answer": (
        chats(1)
        + json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "  "},
                ]
            }
        ).encode(),
        "line 2: messages.1: the answer is blank",
    ),
}


@pytest.mark.parametrize("case", BAD_EXAMPLES)
@pytest.mark.parametrize("param", ["training_file", "validation_file"])
def test_a_line_that_cannot_be_trained_fails_the_job(
    sdk: OpenAI, spool: Spool, file: str, case: str, param: str
) -> None:
    content, message = BAD_EXAMPLES[case]
    bad = upload(sdk, content).id
    job = create(sdk, **{"file": file, param: bad})
    failed = status(sdk, job, "failed")
    assert (failed.error.code, failed.error.param) == (f"invalid_{param}", param)
    assert message in failed.error.message
    assert bad not in failed.error.message
    assert spool.tunings.get(job.id).run not in spool.runs.names()
    last = sdk.fine_tuning.jobs.list_events(job.id).data[0]
    assert (last.level, message in last.message) == ("error", True)


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "model": ({"model": "gpt-4o"}, "model", "can't be fine-tuned here"),
    "no run": ({"model": "ft:tiny:tandem::none@1"}, "model", "there is no run 'none'"),
    "no model": ({"model": ""}, "model", "at least 1"),
    "no file": ({"training_file": "file-none"}, "training_file", "No such File"),
    "no validation": ({"validation_file": "../x"}, "validation_file", "No such File"),
    "epochs 0": (
        {"method": supervised(n_epochs=0)},
        "method.supervised.hyperparameters.n_epochs",
        'use "auto", or a whole number from 1 to 50',
    ),
    "epochs 51": (
        {"method": supervised(n_epochs=51)},
        "method.supervised.hyperparameters.n_epochs",
        "from 1 to 50",
    ),
    "epochs true": (
        {"method": supervised(n_epochs=True)},
        "method.supervised.hyperparameters.n_epochs",
        "True is refused",
    ),
    "epochs 1.5": (
        {"method": supervised(n_epochs=1.5)},
        "method.supervised.hyperparameters.n_epochs",
        "1.5 is refused",
    ),
    "batch 257": (
        {"method": supervised(batch_size=257)},
        "method.supervised.hyperparameters.batch_size",
        "from 1 to 256",
    ),
    "rate 0": (
        {"method": supervised(learning_rate_multiplier=0)},
        "method.supervised.hyperparameters.learning_rate_multiplier",
        "from 0.001 to 10",
    ),
    "rate text": (
        {"method": supervised(learning_rate_multiplier="fast")},
        "method.supervised.hyperparameters.learning_rate_multiplier",
        "'fast' is refused",
    ),
    "beta of supervised": (
        {"method": supervised(beta=0.1)},
        "method.supervised.hyperparameters.beta",
        "no such key",
    ),
    "unknown": (
        {"method": supervised(warmup=1)},
        "method.supervised.hyperparameters.warmup",
        "no such key",
    ),
    "reinforcement": (
        {
            "method": {
                "type": "reinforcement",
                "reinforcement": {
                    "grader": {
                        "type": "string_check",
                        "name": "g",
                        "operation": "eq",
                        "input": "a",
                        "reference": "b",
                    }
                },
            }
        },
        "method.type",
        "reinforcement with graders is not served",
    ),
    "another method": (
        {"method": {"type": "supervised", "dpo": {}}},
        "method.dpo",
        "method.type is supervised",
    ),
    "unknown method": ({"method": {"type": "grpo"}}, "method.type", "supervised"),
    "both": ({"hyperparameters": {"n_epochs": 1}}, "hyperparameters", "goes with no method"),
    "pairs": ({"method": {"type": "dpo"}}, "training_file", "has conversations, and dpo trains"),
    "suffix": ({"suffix": "a" * 65}, "suffix", "at most 64"),
    "seed": ({"seed": -1}, "seed", "greater than or equal to 0"),
    "wandb": (
        {"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]},
        "integrations",
        "tandem track RUN --to wandb",
    ),
    "metadata": (
        {"metadata": {str(i): "a" for i in range(17)}},
        "metadata",
        "at most 16",
    ),
    "metadata value": ({"metadata": {"a": "b" * 513}}, "metadata.a", "at most 512"),
    "extra": ({"extra_body": {"n_gpus": 8}}, "n_gpus", "no such key"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_done_is_refused(sdk: OpenAI, spool: Spool, file: str, case: str) -> None:
    changes, param, message = REFUSALS[case]
    before = spool.tunings.ids()
    with refused(400, param, message):
        create(sdk, file, **changes)
    assert spool.tunings.ids() == before


def test_results_are_no_training_file(sdk: OpenAI, spool: Spool, file: str) -> None:
    done = finish(spool, sdk, create(sdk, file, method=supervised(n_epochs=1)))
    with refused(400, "training_file", "has results of a job"):
        create(sdk, done.result_files[0])


def test_graders_and_permissions_are_refused_in_words(sdk: OpenAI) -> None:
    grader = {
        "type": "string_check",
        "name": "g",
        "operation": "eq",
        "input": "a",
        "reference": "b",
    }
    with refused(404, None, "graders are of reinforcement fine-tuning", "not_served"):
        sdk.fine_tuning.alpha.graders.validate(grader=grader)
    permissions = sdk.fine_tuning.checkpoints.permissions
    with refused(404, None, "all keys of this deployment", "not_served"):
        permissions.create("ft:tiny:tandem::run@1", project_ids=["p"])
    for call in (
        sdk.fine_tuning.jobs.retrieve,
        sdk.fine_tuning.jobs.cancel,
        sdk.fine_tuning.jobs.list_events,
        sdk.fine_tuning.jobs.checkpoints.list,
    ):
        with refused(404, "fine_tuning_job_id", "Could not find fine tune: ftjob-none"):
            call("ftjob-none")


def test_a_file_in_use_stays(sdk: OpenAI, spool: Spool) -> None:
    own = upload(sdk, chats(4)).id
    job = create(sdk, own)
    with refused(400, "file_id", f"{job.id} trains on it", "file_in_use"):
        sdk.files.delete(own)
    sdk.fine_tuning.jobs.cancel(job.id)
    until("it has ended", lambda: spool.tunings.get(job.id).end)
    assert sdk.files.delete(own).deleted


@pytest.mark.slow
@of_jobs
def test_a_fine_tuned_model_goes_on(sdk: OpenAI, spool: Spool, file: str) -> None:
    one = finish(spool, sdk, create(sdk, file, method=supervised(n_epochs=1)))
    for name in (one.fine_tuned_model, one.fine_tuned_model.rpartition(":")[2]):
        more = create(sdk, file, model=name)
        queued(spool)
        run = spool.tunings.get(more.id).run
        first = spool.tunings.get(one.id).run
        assert spool.runs.get(run).forked_from.run == first
        weights = [spool.checkpoints.manifest(*at).weights_sha256 for at in ((first, 1), (run, 0))]
        assert weights[0] == weights[1]
        assert finish(spool, sdk, more).fine_tuned_model.endswith(f"{run}@3")


def test_lists_have_pages_and_filters(sdk: OpenAI, spool: Spool, file: str) -> None:
    mine = {"batch": str(time.time())}
    jobs = [create(sdk, file, metadata={**mine, "n": str(i)}).id for i in range(5)]
    listed = sdk.fine_tuning.jobs.list
    assert [job.id for job in listed(metadata=mine)] == jobs[::-1]
    assert [job.id for job in listed(metadata=mine, limit=2)] == jobs[::-1]
    assert [job.id for job in listed(metadata={**mine, "n": "3"})] == [jobs[3]]
    page = listed(limit=2, after=jobs[4])
    assert ([job.id for job in page.data], page.has_more) == ([jobs[3], jobs[2]], True)
    assert not {job.id for job in listed(extra_query={"metadata": "null"})} & {*jobs}
    with refused(400, "after", "ftjob-none"):
        listed(after="ftjob-none")
    events = sdk.fine_tuning.jobs.list_events(jobs[0], limit=1)
    assert events.has_more
    assert [*events][-1].message == f"Created fine-tuning job: {jobs[0]}"
    with refused(400, "after", "ftevent-none"):
        sdk.fine_tuning.jobs.list_events(jobs[0], after="ftevent-none")
    for job in jobs:
        sdk.fine_tuning.jobs.cancel(job)


def test_old_ones_go_with_old_jobs(sdk: OpenAI, spool: Spool, file: str, root: Path) -> None:
    done = finish(spool, sdk, create(sdk, file, method=supervised(n_epochs=1)))
    waiting = create(sdk, file)
    prune(spool, Settings(root=root, keep_days=1e-9))
    with refused(404, "fine_tuning_job_id", done.id):
        sdk.fine_tuning.jobs.retrieve(done.id)
    sdk.fine_tuning.jobs.retrieve(waiting.id)


def test_a_damaged_record_disturbs_nobody(sdk: OpenAI, spool: Spool, file: str) -> None:
    damaged, other = create(sdk, file), create(sdk, file)
    (spool.tunings.directory / f"{damaged.id}.json").write_text("{")
    with refused(404, "fine_tuning_job_id", damaged.id):
        sdk.fine_tuning.jobs.retrieve(damaged.id)
    assert damaged.id not in {job.id for job in sdk.fine_tuning.jobs.list()}
    until("the other one is queued", lambda: spool.tunings.get(other.id).plan)


CALLS: list[Callable[[OpenAI, str], Any]] = [
    lambda sdk, file: create(sdk, file, method=None, hyperparameters={"n_epochs": 1}),
    lambda sdk, file: create(sdk, file, model="base"),
    lambda sdk, file: create(sdk, file, integrations=[], metadata=None, suffix=None, seed=None),
]


@pytest.mark.parametrize("call", CALLS)
def test_other_ways_to_say_it(sdk: OpenAI, file: str, call: Callable[[OpenAI, str], Any]) -> None:
    assert call(sdk, file).status == "validating_files"
