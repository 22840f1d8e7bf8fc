"""The tests run `tandem train sft` and `tandem train dpo` on a whole stack, as a user runs them.
The tests check the learned answers, and kill the commands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integrations.clients import ROOT, UV
from local_stack import LocalStack

pytestmark = [pytest.mark.sample(1, of="vLLM and whole stacks"), pytest.mark.slow]
QUESTIONS = [
    f"Is it {what}?"
    for what in ("red", "big", "old", "new", "far", "dry", "hot", "low", "shy", "raw")
]


@pytest.fixture
def stack(resident_stack: LocalStack) -> LocalStack:
    return resident_stack


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": "no"}]
        for q in QUESTIONS * 4
    ]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def command(stack: LocalStack, *arguments: str) -> subprocess.Popen[str]:
    environment = stack.environment | {
        "TANDEM_URL": stack.controller_url,
        "TANDEM_API_KEY": stack.api_key,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", "train", *arguments, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background processes ignore SIGINT, and so do their children by default.
        preexec_fn=partial(  # noqa: PLW1509
            signal.signal, signal.SIGINT, signal.default_int_handler
        ),
    )


def lines(stack: LocalStack, *arguments: str) -> list[dict[str, Any]]:
    """Runs a command to its end. Returns the steps that the command prints."""
    out, err = command(stack, *arguments).communicate(timeout=300)
    assert out, err
    return [json.loads(line) for line in out.splitlines()]


SFT = (
    "chats.jsonl",
    "--batch-size",
    "4",
    "--checkpoint-every",
    "2",
    "--epochs",
    "2",
    "--held-out",
    "0.1",
    "--lr",
    "0.01",
    "--sequence-length",
    "128",
    "--lora-rank",
    "8",
)


@pytest.mark.sample(1, of="programs of a whole stack are killed")
def test_a_killed_command_goes_on_and_ends_with_the_same_bytes(stack: LocalStack) -> None:
    whole = lines(stack, "sft", "whole", *SFT)
    assert [line["step"] for line in whole if "loss" in line] == list(range(1, 19))
    held_out = [line["held_out_loss"] for line in whole if "held_out_loss" in line]
    assert len(held_out) == 10
    assert held_out[-1] < 0.1 * held_out[0]
    steps: list[int] = []
    for after in (1, 3, 7):  # optimizer steps
        killed = command(stack, "sft", "killed", *SFT)
        assert killed.stdout is not None
        for line in killed.stdout:
            steps.append(json.loads(line)["step"])
            if steps[-1] >= after:
                break
        os.kill(killed.pid, signal.SIGKILL if after != 3 else signal.SIGINT)
        killed.communicate()
    assert lines(stack, "sft", "killed", *SFT)[-1]["step"] == 18
    runs = [
        stack.spool.checkpoints.path(run, 10) / "adapter_model.safetensors"
        for run in ("whole", "killed")
    ]
    assert runs[0].read_bytes() == runs[1].read_bytes()
    made = stack.client.checkpoints("killed")
    assert [checkpoint.step for checkpoint in made] == list(range(11))


def test_the_examples_learn(stack: LocalStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    tuned = lines(stack, "sft", "--config", "examples/sft.toml", "--epochs", "8")
    of_step = [line["held_out_loss"] for line in tuned if "held_out_loss" in line]
    assert of_step[-1] < 0.5 * of_step[0]
    newest = stack.client.get_run("sums").newest_step
    stack.client.fork("sums", newest, "short-sums")
    turned = lines(stack, "dpo", "--config", "examples/dpo.toml", "--epochs", "4")
    assert turned[-1]["held_out_pair_accuracy"] == 1
    losses = [line["loss"] for line in turned if "loss" in line]
    assert losses[0] == pytest.approx(0.6931, abs=0.05)
    assert losses[-1] < 0.5 * losses[0]
    jobs = sorted(
        (job.spec for job in stack.client.list_jobs("short-sums")), key=lambda job: job.base_step
    )
    assert len(jobs) == 4
    assert {job.loss.reference for job in jobs[1:]} == {0}  # type: ignore[union-attr]


def test_a_client_without_extras_on_another_machine(stack: LocalStack, tmp_path: Path) -> None:
    """The wheel is installed in its own environment, with only its dependencies, and runs in a
    directory without the source."""
    subprocess.run(
        [
            UV,
            "build",
            "-q",
            "--python",
            sys.executable,
            "--wheel",
            "--out-dir",
            str(tmp_path / "dist"),
            str(ROOT),
        ],
        check=True,
    )
    [wheel] = (tmp_path / "dist").glob("*.whl")
    python, tandem = (str(tmp_path / "venv" / "bin" / name) for name in ("python", "tandem"))
    subprocess.run(
        [UV, "venv", "-q", "--python", sys.executable, str(tmp_path / "venv")], check=True
    )
    install = [UV, "pip", "install", "-q", "--python", python, str(wheel)]
    for attempt in range(3):  # the package index sometimes refuses a request
        if subprocess.run(install, check=attempt == 2).returncode == 0:
            break
    extras = ("torch", "numpy", "transformers", "fastapi")
    code = f"import importlib.util as i; print([name for name in {extras} if i.find_spec(name)])"
    assert (
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
    work = tmp_path / "work"
    work.mkdir()
    for name in ("rl_yes_no_maybe.py", "rl_yes_no_maybe.toml"):
        shutil.copy(ROOT / "examples" / name, work)
    config = work / "rl_yes_no_maybe.toml"
    config.write_text(re.sub(r"^steps = .*", "steps = 2", config.read_text(), flags=re.MULTILINE))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(work),
        "TANDEM_URL": stack.controller_url,
        "TANDEM_API_KEY": stack.api_key,
        "TANDEM_INFERENCE_URL": stack.inference_url,
    }

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout

    (work / "examples.jsonl").write_text(run(python, "rl_yes_no_maybe.py"))
    sft = ("--lr", "5e-3", "--epochs", "40", "--lora-rank", "16")
    assert "24" in run(tandem, "data", "check", "examples.jsonl")
    run(tandem, "train", "sft", "yes-no-maybe", "examples.jsonl", *sft)
    run(tandem, "rl", "rl_yes_no_maybe.toml")
    run(tandem, "track", "yes-no-maybe", "--to", "tensorboard:curves", "--no-follow")
    assert any((work / "curves").rglob("events.out.tfevents*"))
    assert stack.client.get_run("yes-no-maybe").newest_step == 3
