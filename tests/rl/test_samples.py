"""The samples that users see: before the first step, at evaluations, every ten steps, when nothing
is learned, and in the file of the last rollouts."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from rl.fake_stack import RUN, Environment, FakeStack, config, make_loop, run_until_done
from tandem.cli import app
from tandem.cli.rl import text_line
from tandem.client import Trajectory
from tandem.client.rl import samples
from tandem.client.rl.loop import Loop
from tandem.client.rl.samples import (
    Alike,
    SampleFile,
    find_samples,
    read_samples,
    sample,
    samples_file,
)
from tandem.errors import InvalidInput, NothingToLearn


def told(loop: Loop) -> list[dict[str, Any]]:
    """Runs the loop. Returns the loop's messages in order."""
    found: list[dict[str, Any]] = []
    loop.record._tell = found.append
    asyncio.run(loop.run())
    return found


def trajectory(reward: float, text: str, token: int = 5, **more: Any) -> Trajectory:
    turn = {"prompt_token_ids": [1], "token_ids": [token], "logprobs": [-0.5], "policy_step": 3}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    return Trajectory.model_validate(
        {"turns": [turn], "reward": reward, "messages": messages} | more
    )


def test_the_run_the_tasks_the_first_sample_and_what_is_waited_for_come_before_the_first_step(
    tmp_path: Path,
) -> None:
    stack = FakeStack()
    lines = told(make_loop(config(steps=2), stack, Environment(stack), tmp_path))
    before = lines[: next(i for i, line in enumerate(lines) if "step" in line)]
    text = "\n".join(map(text_line, before))
    for part in (
        "run fake at step 0, to be trained to step 2: 3 groups of 3 rollouts per step",
        "tasks of fake:fake, the first: 0",
        "waits until vLLM serves fake@0",
        "the first sample\n--- reward ",
        "job fake-rl-0 is submitted; waits until it has trained, and vLLM serves fake@1",
    ):
        assert part in text
    assert [line for line in lines[len(before) :] if "notice" in line] == []
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not any("notice" in line for line in kept)


def test_a_sample_is_shown_every_ten_steps_and_at_each_evaluation(tmp_path: Path) -> None:
    stack = FakeStack(delay=0.001)
    settings = config(steps=20, evaluation={"every": 8, "groups": 2})
    lines = told(make_loop(settings, stack, Environment(stack), tmp_path))
    assert [line["step"] for line in lines if "step" in line and "sample" in line] == [10, 20]
    evaluated = [line for line in lines if "evaluated" in line]
    assert [line["evaluated"] for line in evaluated if "sample" in line] == [0, 8, 16, 20]
    for line in lines:
        if "sample" in line:
            said = text_line(line)
            assert f"--- reward {line['sample']['reward']:g}\nuser: " in said
            assert "assistant: " in said


@pytest.mark.parametrize("answers", [["c"], ["b", "c"]], ids=["equal texts", "equal rewards"])
def test_where_nothing_is_learned_the_last_samples_and_the_rewards_say_why(
    tmp_path: Path, answers: list[str]
) -> None:
    stack = FakeStack(delay=0.0005)
    said = iter(range(10**9))

    async def answer(request: httpx.Request) -> httpx.Response:
        response, number = await FakeStack.answer(stack, request), next(said)
        if request.method == "GET":
            return response
        body = response.json()
        [choice] = body["choices"]
        choice["message"]["content"] = answers[number % len(answers)]
        choice["token_ids"] = [number if len(answers) > 1 else 5]
        return httpx.Response(200, json=body)

    stack.answer = answer  # type: ignore[method-assign]
    loop = make_loop(config(evaluation={"groups": 4}), stack, Environment(stack), tmp_path)
    lines: list[dict[str, Any]] = []
    loop.record._tell = lines.append
    with pytest.raises(NothingToLearn) as ended:
        asyncio.run(loop.run())
    message = ended.value.message
    match = re.search(
        r"The rewards: 0 \((\d+) times\)\. In (\d+) of (\d+) groups all answers are the same text,"
        r" in (\d+) they differ",
        message,
    )
    assert match
    times, same, groups, others = map(int, match.groups())
    assert (times, same + others) == (3 * groups, groups)
    assert (same if answers == ["c"] else others) == groups >= 48
    assert message.count("--- reward 0\nuser: ") == 3

    [evaluation] = [text_line(line) for line in lines if "evaluated" in line]
    kind = "equal" if answers == ["c"] else "different"
    assert f"the rewards: 0 (4 times); the answers are {kind} texts" in evaluation
    assert evaluation.count("--- reward 0\nuser: ") == 3


def test_a_batch_that_the_controller_refuses_is_shown(tmp_path: Path) -> None:
    stack = FakeStack(delay=0.0005)
    settings = config(advantage={"baseline": "none", "scale": "none"})
    environment = Environment(stack, equal=range(50))
    with pytest.raises(NothingToLearn, match=r"no variance\. The rewards: 1 \(9 times\)\. In "):
        asyncio.run(make_loop(settings, stack, environment, tmp_path).run())


def test_rewards_are_counted_and_texts_are_told_apart_from_rewards() -> None:
    equal = [trajectory(0.2, "a"), trajectory(0.2, "a")]
    alike = Alike([equal, [trajectory(0.0, "a"), trajectory(0.0, "b", token=6)]])
    assert (alike.counts(), alike.groups, alike.same_text) == ({"0.2": 2, "0": 2}, 2, 1)
    assert [one["reward"] for one in alike.last] == [0.2, 0.0, 0.0]


def test_a_sample_is_cut_and_obeyed_by_no_terminal() -> None:
    long = [{"role": "user", "content": str(number)} for number in range(50)]
    cut = sample(trajectory(1, "", messages=long))
    assert [one["content"] for one in cut["messages"]] == [
        "0",
        "1",
        "... 38 messages ...",
        *map(str, range(40, 50)),
    ]
    made = sample(trajectory(1, f"\x1b[31m{'x' * 9000}\u202e"))
    assert len(made["messages"][1]["content"]) < 2010
    assert samples.said(made).startswith("user: ?\nassistant: \\x1b[31mxxx")
    calls = [{"function": {"name": "add"}}]
    tool = sample(trajectory(1, "", messages=[{"content": None, "tool_calls": calls}]))
    assert samples.said(tool) == f"None: {json.dumps(calls)}"
    assert samples.said(sample(trajectory(1, "", messages=None))) == "(1 tokens, without messages)"


def test_the_file_keeps_the_last_rollouts_and_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "KEPT", 10)
    file = tmp_path / "s.samples.jsonl"
    kept = SampleFile(file)
    for number in range(57):
        kept.add([sample(trajectory(number, "a"), run="r", task=str(number))])
        assert len(file.read_bytes().splitlines()) <= 20
        assert [one["reward"] for one in read_samples(file)][-1] == number
    assert [one["reward"] for one in read_samples(file)] == list(range(47, 57))

    whole = file.read_bytes()
    file.write_bytes(whole[:-7])  # as if the loop was killed while it wrote the last rollout
    assert [one["reward"] for one in read_samples(file)] == list(range(46, 56))
    SampleFile(file).add([sample(trajectory(99, "a"), run="r", task="t")])
    assert [one["reward"] for one in read_samples(file)][-2:] == [55, 99]
    file.write_bytes(b"\xff\n[]\n{}\n" + file.read_bytes())
    assert read_samples(file)[-1]["reward"] == 99

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # The process is killed before the shortened copy replaces the file of samples.
    monkeypatch.setattr(Path, "replace", killed)
    before = file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        SampleFile(file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def listed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["rl", "samples", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_lists_what_a_step_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = FakeStack()
    stack.delay, stack.kill_at = 0.001, 15
    settings = config(steps=3, evaluation={"every": 1, "groups": 2})
    asyncio.run(run_until_done(settings, stack, tmp_path))
    monkeypatch.chdir(tmp_path)
    assert samples_file(tmp_path / "state.json") == find_samples(RUN, tmp_path)
    trained = stack.trained[1].request["groups"]
    found = json.loads(listed(RUN, "--step", "1", "--last", "1000", "--json"))
    assert {one["step"] for one in found} == {1}
    tasks = stack.trained[1].request["labels"]["tasks"].split()
    for group, task in zip(trained, tasks, strict=True):
        rewards = [one["reward"] for one in found if one["task"] == task]
        assert rewards == [one["reward"] for one in group["trajectories"]]
    assert {one["task"] for one in found if one.get("evaluated")} == {"eval:0", "eval:1"}

    newest = listed(RUN, "--last", "2")
    assert newest.startswith("fake@3 sampled 2 rollouts; the rewards: ")
    assert newest.count("\n--- task eval:") == 2
    assert "assistant: " in newest
    for state in ("--state", "state.json"), ():
        assert listed("x" if state else RUN, *state) == listed(RUN)
    (tmp_path / "state.samples.jsonl").rename("game.samples.jsonl")
    assert listed("game.toml") == listed(RUN)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, problem in (
        (["r"], "a file *.samples.jsonl of run 'r' in this directory has no samples"),
        (["c.toml"], "c.samples.jsonl has no samples; name the training's TOML file"),
    ):
        with pytest.raises(InvalidInput) as error:
            listed(*arguments)
        assert problem in str(error.value)
    file = SampleFile(tmp_path / "c.samples.jsonl")
    file.add([sample(trajectory(1, "a"), run="r", task="0:1")])
    with pytest.raises(InvalidInput, match="no samples of step 2 are kept, only of 3 to 3"):
        listed("r", "--step", "2")


def test_a_config_needs_no_name_of_a_command(tmp_path: Path) -> None:
    for arguments in (["rl", "none.toml"], ["rl", "--json", "none.toml"], ["rl", "train", "none"]):
        with pytest.raises(InvalidInput, match="can't read"):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
