"""Clients that people already use run unmodified against one whole stack. `requirements/` has the
clients' versions."""

import json
import sys
from pathlib import Path

import pytest

from integrations.clients import HERE, ROOT, python_of, run
from local_stack import LocalStack

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
PROGRAMS, EXAMPLES = HERE / "programs", ROOT / "examples"


@pytest.fixture(scope="module")
def taught(stack: LocalStack) -> str:
    """A run that ART's example trains. First the run learns to answer. Then ART's own loop makes
    one step."""
    arguments = ("taught", "models/tiny", "--epochs", "20", "--steps", "1", "--group-size", "8")
    printed = run(stack, python_of("art"), EXAMPLES / "art_yes_no_maybe.py", *arguments)
    assert printed.splitlines()[-1] == "taught@3 is served"
    return "taught"


def metrics(stack: LocalStack, step: int, name: str = "taught") -> list[dict[str, float]]:
    job = str(stack.spool.checkpoints.manifest(name, step).job)
    return [event.data["metrics"] for event in stack.spool.events.read(job) if event.type == "step"]


def test_arts_gather_train_and_train_sft(stack: LocalStack, taught: str) -> None:
    coarse, fine, rl = (metrics(stack, step) for step in (1, 2, 3))
    assert (len(coarse), len(fine), len(rl)) == (20, 20, 1), "a batch of ART is an optimizer step"
    assert [steps[0]["learning_rate"] for steps in (coarse, fine, rl)] == [5e-3, 5e-4, 1e-3]
    assert fine[-1]["loss"] < coarse[0]["loss"] / 2
    assert rl[0]["kl_sampler"] < 1e-3, "the log-probs are the sampler's"
    assert (rl[0]["off_policy_steps_max"], rl[0]["off_policy_steps_mean"]) == (0, 0)
    history = stack.root / ".art/yes-no-maybe/models/taught/history.jsonl"
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss/train" in row] == [2, 3]


@pytest.mark.sample(1, of="clients of one stack")
def test_arts_pipeline_trainer_and_retention(stack: LocalStack, taught: str) -> None:
    stack.client.fork(taught, 3, "pipeline")
    printed = run(stack, python_of("art"), PROGRAMS / "art_pipeline.py", "pipeline", "models/tiny")
    assert printed.splitlines()[-1] == "pipeline@3 [0, 3]"
    (row,) = metrics(stack, 3, "pipeline")
    assert row["off_policy_steps_max"] <= 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("version", ["2", "3"])
def test_openai_through_the_door(stack: LocalStack, taught: str, version: str) -> None:
    newest = stack.client.get_run(taught).newest_step
    stack.client.wait_served(taught, newest)
    python: Path | str = python_of("art") if version == "2" else sys.executable
    printed = run(stack, python, PROGRAMS / "openai_door.py", taught, str(newest))
    assert printed.startswith(f"openai {version}.")
    (row,) = metrics(stack, newest + 1)
    assert row["off_policy_steps_max"] == 0
    assert row["kl_sampler"] < 1e-3, "the log-probs are the sampler's"


@pytest.mark.sample(1, of="clients of one stack")
def test_verifiers(stack: LocalStack, taught: str) -> None:
    newest = stack.client.get_run(taught).newest_step
    stack.client.wait_served(taught, newest)
    printed = run(
        stack,
        python_of("verifiers"),
        PROGRAMS / "verifiers_new.py",
        taught,
        "models/tiny",
        str(newest),
    )
    assert f"{taught}@{newest}: reward" in printed
    assert metrics(stack, newest + 1)[0]["kl_sampler"] < 1e-3


@pytest.mark.sample(1, of="clients of one stack")
def test_the_old_api_of_verifiers(stack: LocalStack, taught: str) -> None:
    newest = stack.client.get_run(taught).newest_step
    stack.client.wait_served(taught, newest)
    printed = run(
        stack, python_of("verifiers_old"), PROGRAMS / "verifiers_old.py", taught, str(newest)
    )
    assert printed.splitlines()[-1] == "verifiers 0.2.1"
    assert metrics(stack, newest + 1)[0]["kl_sampler"] < 1e-3
