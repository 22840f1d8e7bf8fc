"""Sessions of the rollout door in front of vLLM's own server: each turn continues the sampled
tokens, whatever the template makes of the answer that the client sends back."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from inference.scripted_vllm import FAMILIES, Scripted, serve

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
    """A call of the tool, as a model of the family writes it: its own white space and booleans."""
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
    """Twenty dialogues: their turns, each with what the model writes and the request's options."""
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
    """The message of a stream, put together as clients do."""
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
    """What a client sends behind an answer."""
    calls = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "seen"} for one in calls]
    return results or [{"role": "user", "content": "go on"}]


def play(
    vllm: Scripted, turns: list[tuple[str, dict[str, Any]]], session: str | None, stream: bool
) -> list[tuple[list[int], list[int]]]:
    """The dialogue; of each turn the engine's prompt and the sampled tokens."""
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
