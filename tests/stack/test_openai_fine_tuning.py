"""The openai package, unmodified, on a whole stack. A file becomes a model that answers under the
model's name, although the controller dies several times."""

import io
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from local_stack import LocalStack
from waiting import until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
QUESTIONS = [f"Is it {what}?" for what in ("red", "big", "old", "new", "far", "dry", "hot", "low")]


@pytest.fixture
def stack(resident_stack: LocalStack) -> LocalStack:
    return resident_stack


ANSWERS = ["no", "yes"]


def lines() -> bytes:
    """A conversation about each question."""
    chats = (
        [{"role": "user", "content": q}, {"role": "assistant", "content": ANSWERS[i % 2]}]
        for i, q in enumerate(QUESTIONS)
    )
    return "".join(json.dumps({"messages": chat}) + "\n" for chat in chats).encode()


def client(url: str) -> OpenAI:
    # The controller dies between calls. The client retries until the controller is back.
    return OpenAI(base_url=f"{url}/v1", api_key="test-api-key", max_retries=20)


@pytest.mark.sample(1, of="programs of a whole stack are killed")
def test_a_file_becomes_a_model_through_deaths_of_the_controller(stack: LocalStack) -> None:
    tuning, sampling = client(stack.controller_url), client(stack.inference_url)
    file = tuning.files.create(file=("chats.jsonl", io.BytesIO(lines())), purpose="fine-tune")
    stack.kill("controller")
    values = {"n_epochs": 12, "batch_size": 4, "learning_rate_multiplier": 10}
    job = tuning.fine_tuning.jobs.create(
        model="base",
        training_file=file.id,
        validation_file=file.id,
        method={"type": "supervised", "supervised": {"hyperparameters": values}},
        suffix="yes-no",
        seed=1,
    )
    stack.kill("controller")
    run = stack.spool.tunings.get(job.id).run

    def steps() -> int:
        return stack.spool.checkpoints.newest(run) if run in stack.spool.runs.names() else 0

    until("the third checkpoint", lambda: steps() >= 3, 180)
    stack.kill("controller")

    def ended() -> openai.types.fine_tuning.FineTuningJob | None:
        now = tuning.fine_tuning.jobs.retrieve(job.id)
        return now if now.status in ("succeeded", "failed", "cancelled") else None

    done = until("the job's end", ended, 240, poll=0.5)
    assert done.status == "succeeded", done.error
    assert done.fine_tuned_model == f"ft:tiny:tandem:yes-no:{run}@12"
    # Each part of the training is one job, even if two controllers submitted it.
    jobs = list(stack.client.list_jobs(run))
    assert [one.spec.base_step for one in jobs] == list(range(12))
    assert {one.state for one in jobs} == {"succeeded"}
    events = [*tuning.fine_tuning.jobs.list_events(job.id, limit=100)]
    losses = {
        e.data["step"]: e.data["train_loss"] for e in events if e.data and "train_loss" in e.data
    }
    assert sorted(losses) == list(range(1, 25))
    assert losses[24] < 0.2 * losses[1]
    held_out = [e.data["full_valid_loss"] for e in events if e.data and "full_valid_loss" in e.data]
    assert held_out[0] < 0.2 * held_out[-1]  # newest first
    table = tuning.files.content(done.result_files[0]).text.splitlines()
    assert len(table) == 1 + 24
    made = tuning.fine_tuning.jobs.checkpoints.list(job.id).data
    assert [one.step_number for one in made] == list(range(24, 4, -2))
    assert made[0].fine_tuned_model_checkpoint == done.fine_tuned_model
    for i, question in enumerate(QUESTIONS):
        answer = sampling.chat.completions.create(
            model=done.fine_tuned_model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=4,
        )
        assert answer.choices[0].message.content == ANSWERS[i % 2]
        assert answer.model == f"{run}@12"
    with pytest.raises(openai.NotFoundError):
        sampling.chat.completions.create(
            model="ft:tiny:tandem:yes-no:none@1", messages=[{"role": "user", "content": "Is it?"}]
        )
    more = tuning.fine_tuning.jobs.create(model=done.fine_tuned_model, training_file=file.id)
    assert stack.spool.tunings.get(more.id).origin.run == run
    tuning.fine_tuning.jobs.cancel(more.id)


@pytest.mark.sample(1, of="programs of the documents")
def test_the_documents_program_runs(stack: LocalStack, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "openai-fine-tuning.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    for written, here in (
        ("http://127.0.0.1:8080", stack.controller_url),
        ("http://127.0.0.1:8000", stack.inference_url),
        ("choose-one", stack.api_key),
    ):
        assert written in program
        program = program.replace(written, here)
    (tmp_path / "chats.jsonl").write_bytes(lines())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told, answer = done.stdout.split("\n", 1)
    assert told.startswith("succeeded None ft:tiny:tandem:my-model:ft-my-model-")
    assert answer  # a random model may answer with any characters
