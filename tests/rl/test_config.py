"""Mistakes in the config of `tandem rl` and in its environments are refused. The message names the
line, the field and the remedy."""

import asyncio
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rl.mock_vllm import MockVllm
from tandem.cli.common import read_toml
from tandem.client.rl.config import Config, EnvironmentSection, RLSection
from tandem.client.rl.environment import Environment, Tasks
from tandem.client.rl.requests import task_labels
from tandem.client.rl.rollout import described
from tandem.client.rl.sampler import Sampler
from tandem.controller.schemas import RLRequest
from tandem.errors import InvalidInput

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = """[run]
name = "r"

[rl]
steps = 3

[rl.sampling]
max_tokens = 8

[[rl.environment]]
use = "a:b"

[[rl.environment]]
use = "c:d"
weight = 2
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "message"),
    [
        ("steps = 3", "stepz = 3", 4, "rl.steps", "is missing; add it"),
        (
            "steps = 3",
            "steps = 3\nworker = 4",
            6,
            "rl.worker",
            "no such key; correct or remove it; the keys are steps, groups_per_step, ",
        ),
        (
            "weight = 2",
            "wait = 2",
            15,
            "rl.environment.1.wait",
            "the keys are use, weight, arguments",
        ),
        ("steps = 3", "steps = 0", 5, "rl.steps", "greater than or equal to 1"),
        ("weight = 2", "weight = 0", 15, "rl.environment.1.weight", "greater than 0"),
        (
            "max_tokens = 8",
            "top_k = 5",
            4,
            "rl",
            "sampling.top_k: top_k=5 samples from another distribution",
        ),
        ("max_tokens = 8", "n = 5", 4, "rl", "sampling.n is set by the loop itself; remove it"),
        ("max_tokens = 8", "seed = 3", 4, "rl", "seed makes all rollouts of a group the same text"),
        ("max_tokens = 8", "best_of = 2", 4, "rl", "best_of=2 bends what the model answers"),
        ("max_tokens = 8", "ignore_eos = true", 4, "rl", "ignore_eos=True bends"),
        ("max_tokens = 8", "truncate_prompt_tokens = 9", 4, "rl", "truncate_prompt_tokens=9 bends"),
        (
            "[run]",
            "[eval]\nsamples = 2\npass_at = [4]\n[run]",
            1,
            "eval.0",
            "pass_at has 4, samples is 2; raise samples",
        ),
        ("[run]", "[eval]\nevery = 0\n[run]", 2, "eval.0.every", "greater than or equal to 1"),
        ("max_tokens = 8", "temperature = 0.7", 4, "rl", "loss.temperature 1.0; make them equal"),
        (
            "[rl.sampling]",
            "[rl.loss]\nclip = 2\n[rl.sampling]",
            8,
            "rl.loss.clip",
            "the keys are policy, ",
        ),
        (
            "[rl.sampling]",
            "[rl.optimizer.schedule]\nwarmup = 2\n[rl.sampling]",
            4,
            "rl",
            "optimizer.batch_size",
        ),
        ("[run]", "[evaluation]\nevery = 2\n[run]", 1, "evaluation", "the keys are run, rl, eval"),
        (
            'name = "r"',
            'name = "My Run"',
            2,
            "run.name",
            "use lower-case letters, digits, '.', '_' and '-', at most 64",
        ),
        ("[rl]", "[rl", 4, None, "TOML"),
    ],
)
def test_what_is_wrong_is_refused(
    tmp_path: Path, old: str, new: str, line: int, field: str | None, message: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(InvalidInput) as refused:
        read_toml(file, Config)
    assert refused.value.field == field
    assert message in refused.value.message
    assert f"line {line}" in refused.value.message


def test_good_configs_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    assert [e.weight for e in read_toml(tmp_path / "c.toml", Config).rl.environment] == [1, 2]
    for example in EXAMPLES.glob("*.toml"):
        if "[rl]" in example.read_text():
            read_toml(example, Config)
    with pytest.raises(InvalidInput, match="can't read"):
        read_toml(tmp_path / "none.toml", Config)


def test_the_command_refuses_without_a_traceback_and_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GOOD)
    command = [sys.executable, "-m", "tandem", "rl", "c.toml", "--json"]
    environment = os.environ | {"TANDEM_URL": "http://127.0.0.1:9", "PYTHONPATH": ""}
    run = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    error = json.loads(run.stderr)["error"]
    assert error["field"] == "rl.environment.0.use"
    assert "in a module beside the config file" in error["message"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]


def test_the_command_may_open_more_files_than_shells_allow(tmp_path: Path) -> None:
    """The command needs many open files, because each rollout that samples holds a connection."""
    (tmp_path / "c.toml").write_text(GOOD.replace("a:b", "many:files"))
    (tmp_path / "many.py").write_text(
        "import resource\ndef tasks(): raise"
        " ValueError(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\nfiles = tasks\n"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = 2**20 if hard == resource.RLIM_INFINITY else min(hard, 2**20)
    run = subprocess.run(
        [sys.executable, "-m", "tandem", "rl", "c.toml", "--json"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)),
    )
    assert f"ValueError: {allowed} (many.py, line 2)" in json.loads(run.stderr)["error"]["message"]


def test_an_environment_is_a_class_or_a_coroutine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs_of_test.py").write_text(
        "class Own:\n"
        "    def __init__(self, size=1): self.size = size\n"
        "    def tasks(self): return range(self.size)\n"
        "    async def rollout(self, task, sampler): return task\n"
        "def tasks(): return ['x']\n"
        "async def one(task, sampler, twice=False): return task * 2 if twice else task\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = Environment(EnvironmentSection(use="envs_of_test:Own", arguments={"size": 4}), 0, "e")
    assert sorted(own.tasks[i] for i in range(4)) == [0, 1, 2, 3]
    one = Environment(EnvironmentSection(use="envs_of_test:one", arguments={"twice": True}), 0, "e")
    assert asyncio.run(one.rollout(one.tasks[0], None)) == "xx"  # type: ignore[arg-type]
    (tmp_path / "broken_env_of_test.py").write_text("def tasks(:\n")
    (tmp_path / "raising_env_of_test.py").write_text(
        "\ndef tasks(): yield 1 / 0\nasync def one(task, sampler): pass\n"
    )
    for use, arguments, problem in (
        ("envs_of_test:nothing", {}, "nothing"),
        ("envs_of_test:Own", {"length": 4}, "length"),
        ("envs_of_test:Own", {"size": 0}, "gave no task"),
        ("no_module:x", {}, "ModuleNotFoundError: No module named 'no_module'; "),
        ("broken_env_of_test:x", {}, r"SyntaxError: .*\(broken_env_of_test.py, line 1\)"),
        (
            "raising_env_of_test:one",
            {},
            r"ZeroDivisionError: .* \(raising_env_of_test.py, line 2\)",
        ),
    ):
        with pytest.raises(
            InvalidInput, match=f"can't load '{use}': .*{problem}.*it needs rollout"
        ):
            Environment(EnvironmentSection(use=use, arguments=arguments), 0, "e")


def test_verifiers_is_an_environment_of_the_integrations(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Taskset:
        rollout = None

        def __init__(self, **arguments: Any) -> None:
            made.update(arguments)

        def tasks(self) -> list[str]:
            return ["task"]

    section = EnvironmentSection(use="verifiers:owner/name@1.0", arguments={"tokenizer": "d"})
    with pytest.raises(InvalidInput, match="pip install 'verifiers"):
        Environment(section, 0, "e")
    monkeypatch.setattr("tandem.client.verifiers.VerifiersEnvironment", Taskset)
    assert Environment(section, 0, "e").tasks[0] == "task"
    assert made == {"name": "owner/name@1.0", "tokenizer": "d"}


def test_without_reasoning_gym_its_datasets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # an import raises ImportError
    section = EnvironmentSection(use="reasoning_gym:chain_sum")
    with pytest.raises(InvalidInput, match=r"pip install 'tandem-rl\[reasoning-gym\]'"):
        Environment(section, 0, "e")


def test_tasks_are_the_same_after_a_restart() -> None:
    def numbers(source: Any) -> list[Any]:
        tasks = Tasks(source, seed=3)
        assert [tasks[i] for i in (25, 4)] == [tasks[25], tasks[4]]
        return [tasks[i] for i in range(30)]

    first = numbers(range(10))
    assert first == numbers(list(range(10)))
    assert sorted(first[:10]) == sorted(first[10:20]) == list(range(10))
    assert first[:10] != first[10:20]
    assert numbers(itertools.count(5)) == list(range(5, 35))
    assert numbers(iter("abc")) == list("abc" * 10)
    assert list(Tasks(range(10), seed=3).first(3)) == [0, 1, 2]


SETTINGS: dict[str, Any] = {"steps": 1, "retries": 1, "environment": [{"use": "a:b"}]}
TURN = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-0.5]}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            1.0,
            r"returned 1.0; return sampler.finish\(reward\) \(test_config.py, line \d+\)",
        ),
        (None, r"returned None; return sampler.finish\(reward\) \(test_config.py, line \d+\)"),
        (("a", 1), r"returned \('a', 1\); return sampler.finish"),
        ({"role": "assistant"}, "returned a trajectory that is wrong in turns: is missing"),
        ({"turns": [TURN], "reward": 1.0}, "no policy_step"),
        ({"turns": [{**TURN, "policy_step": 1}], "reward": float("nan")}, "finite"),
        ({"turns": [{**TURN, "policy_step": 1}], "reward": 3.5e38}, "does not fit float32"),
        (
            {"turns": [{**TURN, "policy_step": 1, "prompt_token_ids": [1] * 63}], "reward": 1.0},
            "64 tokens.*63",
        ),
    ],
)
def test_a_rollout_that_returns_something_else_is_refused(result: Any, message: str) -> None:
    async def rollout(task: Any, sampler: Any) -> Any:
        return result

    environment = object.__new__(Environment)
    environment.rollout = rollout
    errors: list[Exception] = []
    packing = {"sequence_length": 63, "too_long": "refuse"}
    settings = SETTINGS | {"packing": packing}
    with pytest.raises((InvalidInput, ValidationError), match=message):
        asyncio.run(
            environment.play(
                None, lambda: None, RLSection.model_validate(settings), errors.append, (0, 0)
            )
        )
    assert len(errors) == 2


def exits() -> None:
    sys.exit("the environment's own end")


def cancels() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (
            exits,
            (
                r"the rollout raised SystemExit\(\"the environment's own end\"\) \(test_config.py,"
                r" line \d+\)"
            ),
        ),
        (cancels, r"the rollout raised CancelledError\(\) \(test_config.py, line \d+\)"),
        (
            lambda: asyncio.sleep(60),
            r"longer than rl.rollout_seconds \(0.01 s\) \(test_config.py, line \d+\)",
        ),
        (lambda: json.loads("{"), r"JSONDecodeError: .* \(test_config.py, line \d+\)"),
        (
            lambda: RLSection.model_validate_json("{"),
            r"ValidationError: .* \(test_config.py, line \d+\)",
        ),
    ],
)
def test_whatever_ends_a_rollout_is_its_failure_at_a_line_of_its_own(
    end: Callable[[], Any], message: str
) -> None:
    async def rollout(task: Any, sampler: Any) -> Any:
        if waited := end():
            await waited

    environment = object.__new__(Environment)
    environment.rollout = rollout
    errors: list[Exception] = []
    settings = RLSection.model_validate(SETTINGS | {"rollout_seconds": 0.01})

    async def group() -> None:
        async with asyncio.TaskGroup() as rollouts:
            rollouts.create_task(
                environment.play(None, lambda: None, settings, errors.append, (0, 0))
            )

    with pytest.raises(ExceptionGroup):
        asyncio.run(group())
    told = [described(error) for error in errors]
    assert len(told) == 2
    assert all(re.search(message + "$", line, re.DOTALL) for line in told), told


def test_a_rollout_that_the_loop_cancels_is_not_tried_again() -> None:
    environment, begun = object.__new__(Environment), list[Any]()

    async def rollout(task: Any, sampler: Any) -> Any:
        begun.append(task)
        await asyncio.sleep(60)

    environment.rollout = rollout

    async def cancelled() -> None:
        playing = asyncio.create_task(
            environment.play(1, lambda: None, RLSection.model_validate(SETTINGS), print)
        )
        while not begun:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert begun == [1]


def test_between_two_tries_of_a_rollout_is_a_pause_that_grows() -> None:
    environment, begun = object.__new__(Environment), list[float]()

    async def rollout(task: Any, sampler: Any) -> Any:
        begun.append(time.monotonic())
        raise OSError("the judge is away")

    environment.rollout = rollout
    settings = RLSection.model_validate(SETTINGS | {"retries": 3, "rollout_seconds": 0.05})
    with pytest.raises(OSError, match="judge"):
        asyncio.run(environment.play(1, lambda: None, settings, lambda error: None, (0.1, 0.2)))
    pauses = [after - before for before, after in itertools.pairwise(begun)]
    assert [pause >= least for pause, least in zip(pauses, (0.075, 0.15, 0.15), strict=True)] == [
        True
    ] * 3
    assert sum(pauses) < 2


class Vllm:
    """A vLLM that answers every request, or that refuses every request with `refusal`."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal, self.asked = refusal, list[dict[str, Any]]()

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked.append(body)
        if self.refusal:
            return httpx.Response(400, json={"error": {"message": self.refusal}})
        choice = {
            "message": {"role": "assistant"},
            "token_ids": [5],
            "logprobs": {"content": [{"logprob": -0.5}]},
        }
        return httpx.Response(
            200, json={"model": body["model"], "prompt_token_ids": [1], "choices": [choice]}
        )

    async def play(self, pin: int | None, turns: int = 1, **options: Any) -> list[int | None]:
        """The steps that sampled the turns of a rollout."""
        steps = itertools.count(7)
        vllm = MockVllm(self.answer)
        sampler = Sampler(vllm, "r", lambda: next(steps), pin, {"temperature": 0.7})
        for _ in range(turns):
            await sampler.chat([{"role": "user", "content": "x"}], **options)
        return [turn.policy_step for turn in sampler.finish(1).turns]


def test_a_turn_samples_from_the_newest_step_unless_it_is_pinned() -> None:
    vllm, tools = Vllm(), [{"type": "function"}]
    assert asyncio.run(vllm.play(None, turns=2, tools=tools)) == [7, 8]
    assert asyncio.run(vllm.play(3, turns=2, tools=tools)) == [3, 3]
    assert [body["model"] for body in vllm.asked] == ["r@7", "r@8", "r@3", "r@3"]
    wanted = {"return_token_ids": True, "tools": tools, "temperature": 0.7}
    assert all(wanted.items() <= body.items() for body in vllm.asked)


def test_another_distribution_is_refused_and_a_refusal_of_vllm_is_not_repeated() -> None:
    vllm = Vllm(refusal="the prompt is too long")
    for options, problem in (
        ({"temperature": 1.0}, "temperature: 1.0 is not the loss's 0.7"),
        ({"top_p": 0.5}, "top_p"),
        ({}, "the prompt is too long"),
    ):
        with pytest.raises(InvalidInput, match=problem):
            asyncio.run(vllm.play(None, **options))
    assert len(vllm.asked) == 1


def test_the_labels_of_a_job_with_many_tasks_are_what_the_controller_takes():
    tasks = [str(number) for number in range(10_000)]
    turn = {"prompt_token_ids": [1], "token_ids": [2], "logprobs": [-1.0]}
    group = {"trajectories": [{"turns": [turn], "reward": 1.0}]}
    for count, labels in ((1, 1), (300, 5), (3000, 55), (10_000, 64)):
        found = task_labels(tasks[:count])
        RLRequest.model_validate({"kind": "rl", "groups": [group], "labels": found})
        assert len(found) == labels
        told = " ".join(found.values()).split()
        assert told[-1] == "…" if count == 10_000 else told == tasks[:count]
