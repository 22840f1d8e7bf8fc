"""Sessions of the rollout door in front of vLLM's own server. Each turn continues the sampled
tokens of the turn before, even if the chat template renders the client's copy of an answer to other
tokens."""

import asyncio
import itertools
import json
import re
import subprocess
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.scripted_vllm import FAMILIES, Scripted, serve
from integrations.clients import python_of
from tandem.client.rl.sampler import Sampler
from tandem.client.vllm import Vllm
from tandem.data.inputs import Trajectory, turn_from_openai
from tandem.inference.server.middleware.sessions import (
    RolloutSession,
    SampledTurn,
    SentMessages,
    Sessions,
    plain,
)

PROGRAMS = Path(__file__).parents[1] / "integrations" / "programs"
names = (f"session-{i}" for i in itertools.count())
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "deep": {"type": "boolean"},
                "count": {"type": "number"},
                "where": {"type": "object"},
                "text": {"type": "string"},
            },
        },
    },
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vllm(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with serve(tmp_path_factory.mktemp(family) / "model", family) as server:
        yield server


def breaks(vllm: Scripted) -> dict[str, float]:
    text = httpx.get(f"{vllm.url}/metrics").text
    found = re.findall(r'^tandem_rollout_prefix_breaks_total\{reason="(\w+)"\} (\S+)$', text, re.M)
    return {reason: float(count) for reason, count in found}


def call(family: str, **arguments: Any) -> str:
    """The text by which a model of `family` calls the tool. Each family has its own white space and
    its own form of booleans."""
    if family == "qwen3":
        body = json.dumps({"name": "look", "arguments": arguments}, separators=(",", ":"))
        return f"<tool_call>{body}</tool_call>"
    texts = {key: v if isinstance(v, str) else json.dumps(v) for key, v in arguments.items()}
    if family == "glm4moe":
        parts = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in texts.items()
        )
        return f"<tool_call>look\n{parts}</tool_call>"
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in texts.items())
    return f"<tool_call>\n<function=look>\n{parts}</function>\n</tool_call>"


def dialogues(family: str) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Names and turns of twenty dialogues. A turn has two parts: the text that the model writes,
    and the options of the request."""
    thought = {"qwen3": "<think>\nhm\n</think>\n\n", "qwen3_5_think": "hm\n</think>\n\n"}
    think = thought.get(family, "\n<think>hm</think>\n")
    to_tool, end = ("<|observation|>", "<|user|>") if family == "glm4moe" else ["<|im_end|>"] * 2
    calls = {
        "true": {"deep": True},
        "false": {"deep": False, "text": "False"},
        "empty": {},
        "numbers": {"count": 1.0, "deep": True},
        "object": {"where": {"b": [1, True, None], "a": "x"}},
        "text": {"text": "  two  spaces\nand a line "},
    }
    for name, arguments in calls.items():
        made = call(family, **arguments)
        yield name, [(f"{think}{made}{to_tool}", {}), (f"{think}done{end}", {})]
        yield f"{name}, with text", [(f"{think}I look.\n\n{made}{to_tool}", {}), (f"ok{end}", {})]
    twice = call(family, deep=True) + "\n" + call(family, deep=False)
    yield "two calls", [(f"{think}{twice}{to_tool}", {}), (f"{think}done{end}", {})]
    long = f"{think}a long answer that never ends{end}"
    yield "truncated", [(long, {"max_tokens": len(think) + 8}), (f"{think}ok{end}", {})]
    yield "truncated in a thought", [(long, {"max_tokens": 5}), (f"{think}ok{end}", {})]
    cut = f"{think}{call(family, deep=True)}{to_tool}"
    yield "truncated in a call", [(cut, {"max_tokens": len(think) + 25}), (f"ok{end}", {})]
    yield "white space", [(f"{think}\n\n yes \n{end}", {}), (f"{think}\n{end}", {})]
    yield "stop string", [(f"{think}I say STOP now{end}", {"stop": ["STOP"]}), (f"ok{end}", {})]
    yield (
        "stop string in a call",
        [
            (f"{think}{call(family, text='STOP here')}{to_tool}", {"stop": ["STOP"]}),
            (f"ok{end}", {}),
        ],
    )
    yield (
        "broken call",
        [(f"{think}<tool_call>\n{{look( </tool_call>{to_tool}", {}), (f"ok{end}", {})],
    )


def ask(vllm: Scripted, session: str | None, **body: Any) -> httpx.Response:
    headers = {"X-Session-ID": session} if session else {}
    body = {"model": "run@3", "tools": [TOOL], **body}
    return httpx.post(
        f"{vllm.url}/rollout/v1/chat/completions", headers=headers, json=body, timeout=60
    )


def streamed(response: httpx.Response) -> dict[str, Any]:
    """The message that a client puts together from a stream's events."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    function = {"name": part["function"]["name"], "arguments": ""}
                    calls.append({"id": part["id"], "type": "function", "function": function})
                calls[-1]["function"]["arguments"] += part["function"].get("arguments") or ""
    return message


def follow_up(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that a client sends after an answer."""
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "seen"} for one in calls]
    return results or [{"role": "user", "content": "go on"}]


def play(
    vllm: Scripted, turns: list[tuple[str, dict[str, Any]]], session: str | None, stream: bool
) -> list[tuple[list[int], list[int]]]:
    """Runs the dialogue. Returns the engine's prompt and the sampled tokens of each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look!"}]
    made = []
    for text, options in [*turns, ("last", {})]:
        vllm.engine.texts = [text]
        response = ask(vllm, session, messages=messages, **options, stream=stream)
        assert response.status_code == 200, response.text
        made.append((vllm.engine.prompts[-1], vllm.engine.sampled[-1]))
        if stream:
            message = streamed(response)
        else:
            [choice] = response.json()["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == made[-1]
            message = {k: v for k, v in choice["message"].items() if k != "reasoning"}
        messages += [message, *follow_up(message)]
    return made


def forks(made: list[tuple[list[int], list[int]]]) -> int:
    return sum(
        after[0][: len(before[0] + before[1])] != before[0] + before[1]
        for before, after in itertools.pairwise(made)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("stream", [False, True])
def test_twenty_dialogues_continue_the_sampled_tokens(
    vllm: Scripted, family: str, stream: bool
) -> None:
    before, scripts = breaks(vllm), dict(dialogues(family))
    assert len(scripts) == 20
    decode = vllm.engine.renderer.tokenizer.decode
    for name, turns in scripts.items():
        session = next(names)
        made = play(vllm, turns, session, stream)
        assert forks(made) == 0, (name, [decode(p) for p, _ in made])
        finish = httpx.post(
            f"{vllm.url}/rollout/sessions/{session}/finish", json={"reward": 1.0}
        ).json()
        kept = [(turn["prompt_token_ids"], turn["token_ids"]) for turn in finish["turns"]]
        assert kept == made, name
    assert breaks(vllm) == before


def test_without_a_session_a_call_forks(vllm: Scripted, family: str) -> None:
    turns = dict(dialogues(family))["false"]
    assert forks(play(vllm, turns, None, stream=False)) > 0


def begin(vllm: Scripted, session: str, text: str, **options: Any) -> list[dict[str, Any]]:
    """Starts a session with one turn whose answer is `text`. Returns the messages of the next
    request."""
    messages = [{"role": "user", "content": "look!"}]
    vllm.engine.texts = [text]
    [choice] = ask(vllm, session, messages=messages, **options).json()["choices"]
    return [*messages, choice["message"], *follow_up(choice["message"])]


def edited(messages: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    answer = {**messages[1], **changes}
    return [messages[0], {k: v for k, v in answer.items() if v is not None}, *messages[2:]]


def goes_on(vllm: Scripted, session: str, messages: list[dict[str, Any]], **options: Any) -> bool:
    """Whether the prompt of the next turn begins with all tokens of the turn before it."""
    known = vllm.engine.prompts[-1] + vllm.engine.sampled[-1]
    vllm.engine.texts = ["ok"]
    response = ask(vllm, session, messages=messages, **options)
    assert response.status_code == 200, response.text
    return vllm.engine.prompts[-1][: len(known)] == known


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_an_edited_history_is_rendered_in_full_and_counted_by_its_reason(vllm: Scripted) -> None:
    end, think = "<|im_end|>", "<think>\nhm\n</think>\n\n"
    made = call("qwen3", deep=True)
    cut = {"max_tokens": 12}
    stop = {"stop": ["STOP"]}

    def arguments(text: str) -> list[dict[str, Any]]:
        return [{"id": "1", "type": "function", "function": {"name": "look", "arguments": text}}]

    for reason, text, options, changes in [
        ("edited", f"yes{end}", {}, {"content": "no"}),
        ("whitespace", f"a  b{end}", {}, {"content": "a b"}),
        ("booleans", f"{made}{end}", {}, {"tool_calls": arguments('{"deep": "True"}')}),
        ("truncated", f"yes, I do{end}", cut, {"content": "yes, I cannot"}),
        ("stop_string", f"I STOP{end}", stop, {"content": "I stop here"}),
        ("edited", f"yes{end}", {}, {"reasoning": "other"}),
    ]:
        session, before = next(names), breaks(vllm)
        messages = begin(vllm, session, f"{think}{text}", **options)
        assert not goes_on(vllm, session, edited(messages, **changes), **options), changes
        after = breaks(vllm)
        assert {name for name in after if after[name] != before[name]} == {reason}, changes
        assert after[reason] == before[reason] + 1
    # A request with other tools has another prompt.
    other = {"type": "function", "function": {"name": "other"}}
    session, before = next(names), breaks(vllm)
    assert not goes_on(vllm, session, begin(vllm, session, f"yes{end}"), tools=[other])
    assert breaks(vllm)["edited"] == before["edited"] + 1


@pytest.mark.parametrize("family", ["gemma4"], indirect=True)
def test_a_tools_answer_that_has_no_place_behind_the_turn_is_rendered_in_full(
    vllm: Scripted,
) -> None:
    session, before = next(names), breaks(vllm)
    made = "<|tool_call>call:look{deep:true}<tool_call|><turn|>"
    messages = begin(vllm, session, made)
    assert messages[1]["tool_calls"]
    assert not goes_on(vllm, session, messages)
    assert "seen" in vllm.engine.renderer.tokenizer.decode(vllm.engine.prompts[-1])
    assert breaks(vllm)["template"] == before["template"] + 1
    session = next(names)
    assert goes_on(vllm, session, begin(vllm, session, "yes<turn|>"))


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_what_only_looks_like_an_edit_goes_on(vllm: Scripted) -> None:
    end, before = "<|im_end|>", breaks(vllm)
    think = "<think>\nhm\n</think>\n\n"
    thought = f"{think} yes \n{end}"
    for text, options, changes in [
        (thought, {}, {"content": "yes"}),
        (thought, {}, {"reasoning": None}),
        (thought, {}, {"reasoning": None, "reasoning_content": "hm"}),
        (thought, {}, {"content": [{"type": "text", "text": "yes"}], "refusal": None}),
        (thought, {}, {"tool_calls": []}),
        (f"{think}I STOP{end}", {"stop": ["STOP"]}, {"content": "I STOP"}),
    ]:
        session = next(names)
        messages = begin(vllm, session, text, **options)
        assert goes_on(vllm, session, edited(messages, **changes), **options), changes
    # A sub-agent's conversation does not count as an edit, and neither does a continuation of an
    # earlier turn.
    session = next(names)
    messages = begin(vllm, session, f"yes{end}")
    assert goes_on(vllm, session, messages)
    vllm.engine.texts = ["sub", "again"]
    ask(vllm, session, messages=[{"role": "user", "content": "sub-task"}])
    ask(vllm, session, messages=messages)
    assert vllm.engine.prompts[-1] == vllm.engine.prompts[-3]
    assert breaks(vllm) == before


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_what_would_fork_without_a_session_is_refused_in_words(vllm: Scripted) -> None:
    function = {"name": "look", "arguments": '{"deep": tru'}
    calls = [{"id": "1", "type": "function", "function": function}]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
    ]
    for session in (None, next(names)):
        response = ask(vllm, session, messages=messages)
        assert response.status_code == 400
        assert "the arguments of the call of 'look' in the history" in response.text
    messages[1:] = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    response = ask(vllm, None, messages=messages, stop=["STOP"])
    assert (response.status_code, response.json()["error"]["field"]) == (400, "stop")
    assert "X-Session-ID" in response.json()["error"]["message"]
    vllm.engine.texts = ["yes", "yes"]
    for options in ({"include_stop_str_in_output": True}, {"messages": messages[:1]}):
        body = {"messages": messages, "stop": ["STOP"], **options}
        assert ask(vllm, None, **body).status_code == 200


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_reasoning_in_other_names_reaches_the_template(vllm: Scripted) -> None:
    made = call("qwen3", deep=True)
    messages = begin(vllm, next(names), f"<think>\nhm\n</think>\n\n{made}<|im_end|>")
    for name in ("reasoning", "reasoning_content", "thinking"):
        vllm.engine.texts = ["ok"]
        assert ask(vllm, None, messages=edited(messages, **{"reasoning": None, name: "aha"}))
        prompt = vllm.engine.renderer.tokenizer.decode(vllm.engine.prompts[-1])
        assert "<think>\naha\n</think>" in prompt, name


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_a_sessions_answers_have_the_tokens_that_vllm_writes_without_one(vllm: Scripted) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answers = dict[str | None, list[dict[str, Any]]]()
    for session in (None, next(names)):
        vllm.engine.texts = ["yes, two<|im_end|>"]
        answers[session] = ask(vllm, session, **body).json()["choices"]
    for theirs, ours in zip(*answers.values(), strict=True):
        for entry in (*theirs["logprobs"]["content"], *ours["logprobs"]["content"]):
            entry["bytes"], entry["top_logprobs"] = None, []
        assert {**ours, "message": None} == {**theirs, "message": None}
        assert ours["message"] == theirs["message"]
        assert len(ours["token_ids"]) == len(ours["logprobs"]["content"]) > 1
        turn_from_openai({"choices": [ours]})
    vllm.engine.texts = ["yes<|im_end|>"]
    [choice] = ask(vllm, next(names), **body, top_logprobs=1).json()["choices"]
    # Only vLLM, not the session, knows `top_logprobs`.
    assert choice["logprobs"]["content"][0]["top_logprobs"]


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_a_session_becomes_a_trajectory(vllm: Scripted) -> None:
    session = next(names)
    url = f"{vllm.url}/rollout/sessions/{session}/finish"
    gone = httpx.post(url, json={"reward": 1})
    assert gone.status_code == 410
    assert "vLLM has started again" in gone.json()["error"]["message"]
    messages = begin(vllm, session, "yes<|im_end|>")
    assert goes_on(vllm, session, messages)
    for body in ({}, {"reward": "1"}, {"reward": True}, [], {"reward": None}):
        assert httpx.post(url, json=body).json()["error"]["field"] == "reward"
    body = {"reward": 0.5, "metrics": {"a": 1.0}, "advantage": 2.0}
    first, again = (httpx.post(url, json=body).json() for _ in range(2))
    assert first == again
    trajectory = Trajectory.model_validate(first)
    assert (trajectory.reward, trajectory.advantage, trajectory.metrics) == (0.5, 2, {"a": 1})
    assert [turn.policy_step for turn in trajectory.turns] == [3, 3]
    assert [turn.prompt_token_ids for turn in trajectory.turns] == vllm.engine.prompts[-2:]
    assert trajectory.turns[0].logprobs == [-0.5] * len(trajectory.turns[0].token_ids)
    assert trajectory.messages[-1]["reasoning"] == "ok"
    response = ask(vllm, "a b", messages=messages)
    assert (response.status_code, response.json()["error"]["field"]) == (400, "x-session-id")


def test_after_a_restart_turns_are_rendered_in_full_and_finish_has_only_the_later_ones(
    tmp_path: Path,
) -> None:
    session = next(names)
    for started in range(2):
        with serve(tmp_path / "model", "qwen3") as vllm:
            url = f"{vllm.url}/rollout/sessions/{session}/finish"
            before = breaks(vllm)
            if not started:
                messages = begin(vllm, session, "<think>\nhm\n</think>\n\nyes<|im_end|>")
                sampled = vllm.engine.prompts[-1] + vllm.engine.sampled[-1]
                assert len(httpx.post(url, json={"reward": 1}).json()["turns"]) == 1
                continue
            gone = httpx.post(url, json={"reward": 1})
            assert (gone.status_code, gone.json()["error"]["type"]) == (410, "gone")
            # The next turn's prompt is rendered from the client's messages, now without reasoning.
            del messages[-2]["reasoning"]
            vllm.engine.texts = ["again<|im_end|>"]
            assert ask(vllm, session, messages=messages).status_code == 200
            prompt = vllm.engine.prompts[-1]
            assert prompt[: len(sampled)] != sampled
            [turn] = httpx.post(url, json={"reward": 1}).json()["turns"]
            assert (turn["prompt_token_ids"], breaks(vllm)) == (prompt, before)


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_what_harmony_renders_is_recorded_and_its_breaks_are_counted(
    vllm: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For GPT-OSS, vLLM does not use its usual renderer. Without this renderer, a session can't
    continue a turn. On the CPU vLLM can't serve GPT-OSS, so this test uses a Qwen3 without the
    renderer."""
    monkeypatch.setattr(SentMessages, "of", lambda *_: None)
    monkeypatch.setattr(RolloutSession, "find", lambda *_: None)
    session, before = next(names), breaks(vllm)
    messages = begin(vllm, session, "<think>\nhm\n</think>\n\nyes<|im_end|>")
    other = [{"role": "user", "content": "of a sub-agent"}]
    vllm.engine.texts = ["ok<|im_end|>", "no<|im_end|>"]
    assert ask(vllm, session, messages=other).status_code == 200
    assert breaks(vllm) == before
    messages[-2] |= {"content": "edited"}
    assert ask(vllm, session, messages=messages).status_code == 200
    assert breaks(vllm) == before | {"template": before["template"] + 1}
    url = f"{vllm.url}/rollout/sessions/{session}/finish"
    kept = Trajectory.model_validate(httpx.post(url, json={"reward": 1}).json())
    assert [turn.prompt_token_ids for turn in kept.turns] == vllm.engine.prompts[-3:]


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
def test_a_rollout_of_tandem_rl_is_a_session(vllm: Scripted) -> None:
    """The tokens of two calls of the tool and of an answer are one linear sequence."""
    end, think = "<|im_end|>", "<think>\nhm\n</think>\n\n"
    made = [call("qwen3", deep=False), call("qwen3")]
    vllm.engine.texts = [*(f"{think}{one}{end}" for one in made), f"{think}a door{end}"]

    async def rollout() -> Trajectory:
        async with Vllm(f"{vllm.url}/v1", {}) as client:
            sampler = Sampler(client, "run", lambda: 3, None, {})
            messages: list[dict[str, Any]] = [{"role": "user", "content": "look!"}]
            for _ in range(2):
                message = await sampler.chat(messages, tools=[TOOL])
                messages += [message, *follow_up(message)]
            await sampler.chat(messages, tools=[TOOL])
            return sampler.finish(1.0)

    turns = asyncio.run(rollout()).turns
    assert len(turns) == 3
    assert forks([(turn.prompt_token_ids, turn.token_ids) for turn in turns]) == 0


def turn(tokens: int, asked: bytes = b"") -> SampledTurn:
    answer = plain([{"role": "assistant", "content": "a"}])
    new, sampled = array("i", [1]), array("i", range(tokens - 1))
    return SampledTurn(None, new, sampled, array("d"), asked, answer, "m", False, None, None, True)


def test_sessions_have_bounded_memory() -> None:
    sessions = Sessions(most=2, tokens=100)
    for name in ("a", "b", "a", "c"):
        sessions.use(name)
        sessions.add(name, turn(10))
    assert [sessions.known(name) is not None for name in "abc"] == [True, False, True]
    sessions.add("c", turn(90))
    assert [sessions.known(name) is not None for name in "ac"] == [False, True]
    sessions.add("d", turn(101))
    assert [sessions.known(name) is not None for name in "cd"] == [False, False]


@pytest.mark.slow
@pytest.mark.sample(1, of="agents that run unmodified")
@pytest.mark.parametrize("program", ["agents_door", "anthropic_door"])
@pytest.mark.parametrize("family", ["qwen3_5_think"], indirect=True)
def test_agents_of_other_dialects_run_unmodified(vllm: Scripted, program: str) -> None:
    """The agents use the OpenAI Agents SDK and Anthropic's API. The rollout door keeps the tokens
    of each turn. The prompt with the tool's answer continues these tokens."""
    before, first = breaks(vllm), len(vllm.engine.prompts)
    sessions = [next(names), next(names)]
    made = call("qwen3_5_think", deep=False)
    texts = [f"hm\n</think>\n\nI look.\n\n{made}<|im_end|>", "so\n</think>\n\nA door.<|im_end|>"]
    vllm.engine.texts = texts * 2
    printed = subprocess.run(
        [python_of("verifiers_old"), PROGRAMS / f"{program}.py", vllm.url, *sessions],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert printed.stdout == "A door.\nA door.\n[False, False]\n", printed.stderr
    prompts, sampled = vllm.engine.prompts[first:], vllm.engine.sampled[first:]
    for i, session in enumerate(sessions):
        url = f"{vllm.url}/rollout/sessions/{session}/finish"
        turns = Trajectory.model_validate(httpx.post(url, json={"reward": 1}).json()).turns
        assert [turn.prompt_token_ids for turn in turns] == prompts[2 * i : 2 * i + 2]
        assert [turn.token_ids for turn in turns] == sampled[2 * i : 2 * i + 2]
        assert forks(list(zip(prompts, sampled, strict=True))[2 * i : 2 * i + 2]) == 0
    assert breaks(vllm) == before
