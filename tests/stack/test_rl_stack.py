"""`tandem rl` on a whole stack with a tiny model: it learns, even if it is killed ten times. The
examples run."""

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_model
from tokenizers import AddedToken
from transformers import AutoTokenizer

from local_stack import LocalStack
from waiting import until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
EXAMPLES = Path(tiny_model.__file__).parent
SFT_STEPS = 1


@pytest.fixture
def stack(loops_stack: LocalStack) -> LocalStack:
    return loops_stack


def teach(
    stack: LocalStack,
    run: str,
    examples: list[dict[str, Any]],
    epochs: int = 40,
    sequence_length: int = 256,
) -> None:
    """Create the run and teach it the form of the task by SFT, as `tandem train sft` would."""
    stack.client.create_run(run, lora={"rank": 16, "alpha": 32})
    schedule = {"shape": "cosine", "total": epochs * ceil(len(examples) / 32)}
    optimizer = {"learning_rate": 5e-3, "epochs": epochs, "batch_size": 32, "schedule": schedule}
    packing = {"sequence_length": sequence_length}
    stack.client.train_sft(run, examples, optimizer=optimizer, packing=packing, wait="served")


class Rl:
    """Runs `tandem rl` on an example with a changed config, in a directory of its own."""

    def __init__(self, stack: LocalStack, directory: Path, example: str, **changes: str) -> None:
        text = (EXAMPLES / f"{example}.toml").read_text()
        for name, value in changes.items():
            text, found = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
            assert found == 1
        shutil.copy(EXAMPLES / f"{example}.py", directory)
        self.config = directory / f"{example}.toml"
        self.config.write_text(text)
        self.state = self.config.with_suffix(".state.json")
        self.environment = stack.environment | {
            "TANDEM_URL": stack.controller_url,
            "TANDEM_INFERENCE_URL": stack.inference_url,
        }

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tandem", "rl", str(self.config)]
        # A shell's background processes ignore SIGINT, and so do their children by default.
        return subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=partial(  # noqa: PLW1509
                signal.signal, signal.SIGINT, signal.default_int_handler
            ),
        )

    def finish(self) -> str:
        """Run the command to its end. Returns its output."""
        process = self.start()
        printed, _ = process.communicate(timeout=400)
        assert process.returncode == 0, printed
        return printed

    def lines(self, kind: str) -> list[dict[str, Any]]:
        file = self.config.with_suffix(".metrics.jsonl")
        found = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        return [line for line in found if kind in line]

    def known(self) -> dict[str, Any]:
        """The state file's content."""
        return json.loads(self.state.read_text()) if self.state.exists() else {}


def check(stack: LocalStack, run: str, first: int, steps: int, bound: int) -> None:
    """Checks the jobs' records and events. Each step must be made once, from groups of its own,
    within the bound of off-policy steps."""
    jobs = [job for _, job in stack.spool.jobs.list(run=run) if job.spec.kind == "rl"]
    assert sorted(job.spec.base_step for job in jobs) == list(range(first, first + steps))
    assert stack.spool.checkpoints.newest(run) == first + steps
    tasks = [task for job in jobs for task in job.spec.labels["tasks"].split()]
    assert len(tasks) == len(set(tasks))
    for job in jobs:
        assert job.spec.data.policy_step_min is not None
        assert job.spec.base_step - job.spec.data.policy_step_min <= bound
        metrics = [
            event.data["metrics"]
            for event in stack.spool.events.read(job.spec.id)
            if event.type == "step"
        ]
        assert metrics
        assert all(
            0 <= row["off_policy_steps_mean"] <= row["off_policy_steps_max"] <= bound
            for row in metrics
        )


@pytest.mark.sample(1, of="programs of a whole stack are killed")
def test_yes_no_maybe_learns_although_it_is_killed_ten_times(
    stack: LocalStack, tmp_path: Path
) -> None:
    run = "yes-no-maybe"
    teach(stack, run, importlib.import_module("rl_yes_no_maybe").sft_examples())
    rl = Rl(stack, tmp_path, "rl_yes_no_maybe", steps="6")

    def event(kind: str) -> Callable[[], bool]:
        def happened() -> bool:
            jobs = [job["id"] for job in rl.known().get("jobs", [])]
            return any(e.type == kind for job in jobs[-1:] for e in stack.spool.events.read(job))

        return happened

    def sampled(count: int) -> Callable[[], bool]:
        return lambda: sum(rl.known().get("cursors", [])) >= count

    made = len(rl.lines("step"))
    points: dict[str, Callable[[], bool]] = {
        "the state exists": rl.state.exists,
        "a request is written down": lambda: bool(rl.known().get("pending")),
        "a job is submitted": lambda: bool(rl.known().get("jobs")) and not rl.known()["pending"],
        "claimed": event("claimed"),
        "loaded": event("loaded"),
        "checkpoint": event("checkpoint"),
        "succeeded": event("succeeded"),
        "served": event("served"),
        "the step is recorded": lambda: len(rl.lines("step")) > made,
        "the next request is written down": lambda: bool(rl.known().get("pending")),
    }
    for name, reached in points.items():
        made = len(rl.lines("step"))
        process = rl.start()
        until(
            name,
            lambda reached=reached, process=process: reached() or process.poll() is not None,
            120,
            poll=0.001,
        )
        assert process.poll() is None, process.communicate()[0]
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    printed = rl.finish()
    check(stack, run, SFT_STEPS, steps=6, bound=1)
    steps = rl.lines("step")
    assert [line["step"] for line in steps] == list(range(SFT_STEPS + 1, SFT_STEPS + 7))
    assert f"@{steps[-1]['step']}: reward" in printed
    before, *_, after = rl.lines("evaluated")
    assert after["evaluated"] == SFT_STEPS + 6
    assert after["reward"] > max(0.9, before["reward"] + 0.1)
    assert rl.known()["jobs"] == []


@pytest.mark.sample(1, of="examples of tandem rl")
def test_the_game_learns_over_several_turns(stack: LocalStack, tmp_path: Path) -> None:
    teach(stack, "game", importlib.import_module("game").Game().sft_examples())
    # The machine's speed decides which policy plays which tasks. So the speed also decides how fast
    # the run learns.
    for steps in (10, 20, 30):
        rl = Rl(stack, tmp_path, "game", steps=str(steps), every="10")
        rl.finish()
        before, *_, after = rl.lines("evaluated")
        if after["reward"] > before["reward"] + 0.15:
            break
    else:
        pytest.fail(
            f"30 steps brought the reward from {before['reward']} to {after['reward']} only"
        )
    check(stack, "game", SFT_STEPS, steps=steps, bound=1)
    assert all(line["turns"] > 6 * 8 for line in rl.lines("step")), (
        "trajectories have several turns"
    )


@pytest.mark.sample(1, of="examples of tandem rl")
def test_the_example_with_a_tool_runs_and_ctrl_c_says_how_to_go_on(
    stack: LocalStack, tmp_path: Path
) -> None:
    teach(
        stack,
        "arithmetic",
        importlib.import_module("arithmetic_tool").Sums().sft_examples(),
        epochs=20,
    )
    rl = Rl(stack, tmp_path, "arithmetic_tool", steps="2", every="1")
    process = rl.start()
    until("a job is submitted", lambda: rl.known().get("jobs"), 120, poll=0.01)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"The same command continues: tandem rl {rl.config}" in " ".join(printed.split())
    rl.finish()
    check(stack, "arithmetic", SFT_STEPS, steps=2, bound=0)
    assert any("called" in line["metrics"] for line in rl.lines("step"))


@pytest.mark.sample(1, of="examples of tandem rl")
def test_a_step_of_another_run_teaches_a_run_by_its_log_probs(
    stack: LocalStack, tmp_path: Path
) -> None:
    module = importlib.import_module("rl_yes_no_maybe")
    teach(stack, "teacher", module.sft_examples(), epochs=20)
    teach(stack, "yes-no-maybe-distilled", module.sft_examples(), epochs=4)
    rl = Rl(stack, tmp_path, "rl_yes_no_maybe", steps="6", name='"yes-no-maybe-distilled"')
    text = rl.config.read_text()
    rl.config.write_text(f'{text}\n[rl.distill]\nmodel = "teacher@{SFT_STEPS}"\n')
    rl.finish()
    kl = [line["metrics"]["reverse_kl"] for line in rl.lines("step")]
    print("reverse KL of each step:", kl)
    assert len(kl) == 6
    assert kl[0] > 0.02  # nats per token
    assert kl[-1] < 0.7 * kl[0], kl


@pytest.fixture
def with_tools(tmp_path: Path) -> Iterator[LocalStack]:
    """A tiny model with Qwen3's own template and its tokens for tool calls, which vLLM parses."""
    model = tiny_model.write_tiny_qwen3(tmp_path / "spool" / "models" / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = ("think", "tool_call", "tool_response")
    added = [text for word in words for text in (f"<{word}>", f"</{word}>")]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    package = Path(str(find_spec("trl").origin)).parent  # type: ignore[union-attr]
    tokenizer.chat_template = (package / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer.save_pretrained(model)
    variables = {
        "TANDEM_MAX_MODEL_LEN": "1024",
        "TANDEM_VLLM_ARGS": "--enable-auto-tool-choice --tool-call-parser hermes"
        " --reasoning-parser qwen3",
    }
    with LocalStack(tmp_path / "spool", **variables) as running:
        yield running


@pytest.mark.sample(0, of="the template's own tools")  # the test needs a stack of its own
def test_a_tool_of_the_template_is_called(with_tools: LocalStack, tmp_path: Path) -> None:
    stack = with_tools
    sums = importlib.import_module("arithmetic_tool").Sums(largest=2, tools=True)
    teach(stack, "arithmetic", sums.sft_examples(), epochs=80, sequence_length=1024)
    rl = Rl(
        stack,
        tmp_path,
        "arithmetic_tool",
        steps="2",
        every="2",
        groups="4",
        groups_per_step="4\ndynamic_sampling = false",
        batch_size="4",
        max_tokens="100",
        arguments="{ largest = 2, tools = true }",
        sequence_length="1024",
    )
    rl.finish()
    check(stack, "arithmetic", SFT_STEPS, steps=2, bound=0)
    for line in rl.lines("step"):
        assert min(line["metrics"]["called"], line["reward"]) > 0.1, line
        assert abs(line["trained"]["kl_sampler"]) < 1e-3, line
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    text = httpx.get(f"{stack.inference_url}/metrics", headers=headers).text
    breaks = re.findall(r"^tandem_rollout_prefix_breaks_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert breaks
    assert not any(map(float, breaks)), text
