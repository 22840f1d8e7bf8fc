"""The rollout door in front of an app that answers as vLLM does."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient

from tandem.data.inputs import turn_from_openai
from tandem.inference.server.middleware.guard import AdminGuard
from tandem.inference.server.middleware.rollout import RolloutDoor
from tandem.vllm_client.names import ROLLOUT_PATHS

API = {"Authorization": "Bearer the-key"}
CHAT, COMPLETIONS = "/rollout/v1/chat/completions", "/rollout/v1/completions"
RESPONSES, MESSAGES = "/rollout/v1/responses", "/rollout/v1/messages"
PARALLEL = "parallel_tool_calls"
GENERATE = "/rollout/inference/v1/generate"


def entries(ids: list[int]) -> dict[str, Any]:
    return {"content": [{"token": f"token_id:{i}", "logprob": -0.5} for i in ids]}


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def events(model: str) -> Iterator[str]:
    head = {"object": "chat.completion.chunk", "model": model}
    for index in (0, 1):
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        yield event({**head, "choices": [choice], "prompt_token_ids": [7, 8]})
    for index, token in ((0, 1), (1, 2), (0, 3)):
        text = 'says "prompt_token_ids": [0]'
        choice = {
            "index": index,
            "delta": {"content": text},
            "logprobs": entries([token]),
            "token_ids": [token],
        }
        yield event({**head, "choices": [choice]})
    yield "data: [DONE]\n\n"


@pytest.fixture
def seen() -> list[dict[str, Any]]:
    """The bodies of the requests that the app receives."""
    return []


@pytest.fixture
def door(seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", "the-token")
    app = FastAPI(openapi_url=None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": []}

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Any:
        seen.append(await request.json())
        entry = {"token_id": 9, "logprob": -0.5}
        return {
            "model": "run@3",
            "choices": [{"index": 0, "logprobs": {"content": [entry]}, "token_ids": [9]}],
        }

    @app.post("/v1/{kind:path}")
    async def complete(kind: str, request: Request) -> Any:
        body = await request.body()
        assert int(request.headers["content-length"]) == len(body)
        seen.append(json.loads(body))
        if seen[-1].get("model") == "unknown":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if seen[-1].get("stream"):
            return StreamingResponse(events("run@3"), media_type="text/event-stream")
        choices = [{"index": i, "logprobs": entries([i + 1]), "token_ids": [i + 1]} for i in (0, 1)]
        return {"model": "run@3", "choices": choices, "prompt_token_ids": [7, 8]}

    app.add_middleware(RolloutDoor)
    app.add_middleware(AdminGuard)
    return TestClient(app, headers=API, raise_server_exceptions=False)


def test_a_choice_has_everything_that_training_needs(
    door: TestClient, seen: list[dict[str, Any]]
) -> None:
    answer = door.post(
        CHAT, json={"model": "run@3", "messages": [], "logprobs": False, "temperature": 0.7}
    )
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    assert seen == [{"model": "run@3", "messages": [], "temperature": 0.7, "logprobs": True, **ids}]
    for i, choice in enumerate(answer.json()["choices"]):
        assert choice["model"] == "run@3"
        turn = turn_from_openai(choice)
        assert (turn.prompt_token_ids, turn.token_ids, turn.logprobs) == ([7, 8], [i + 1], [-0.5])
    for given, sent in ((None, 0), (3, 3)):
        door.post(COMPLETIONS, json={"prompt": "?", "logprobs": given})
        assert seen[-1] == {"prompt": "?", "logprobs": sent, **ids}


def test_tokens_in_and_out_have_the_names_of_ids(
    door: TestClient, seen: list[dict[str, Any]]
) -> None:
    body = {"model": "run@3", "token_ids": [7, 8], "sampling_params": {"max_tokens": 1}}
    answer = door.post(GENERATE, json=body)
    assert seen == [{**body, "sampling_params": {"max_tokens": 1, "logprobs": 1}}]
    [entry] = answer.json()["choices"][0]["logprobs"]["content"]
    assert entry == {"token_id": 9, "logprob": -0.5, "token": "token_id:9"}
    answer = door.post(GENERATE, json={**body, "sampling_params": {"top_k": 5}})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "top_k")


def test_a_stream_has_it_in_each_choices_first_chunk(door: TestClient) -> None:
    lines = door.post(CHAT, json={"messages": [], "stream": True, "n": 2}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[7, 8]] * 2 + [
        None
    ] * 3
    assert [chunk["choices"][0].get("model") for chunk in chunks] == ["run@3"] * 2 + [None] * 3
    assert chunks[2:] == [
        json.loads(event.removeprefix("data: ")) for event in list(events("run@3"))[2:-1]
    ]


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("top_k", 20, -1),
        ("top_p", 0.9, 1.0),
        ("min_p", 0.1, 0.0),
        ("frequency_penalty", 0.5, 0),
        ("bad_words", ["x"], []),
        ("logit_bias", {"1": 2}, {}),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("tool_choice", "required", "auto"),
        ("echo", True, False),
        ("include_reasoning", False, True),
        ("parallel_tool_calls", False, True),
        ("watermarking", True, False),
    ],
)
def test_what_changes_the_distribution_is_refused(
    door: TestClient, seen: list[dict[str, Any]], name: str, value: object, harmless: object
) -> None:
    answer = door.post(CHAT, json={"messages": [], name: value})
    assert (answer.status_code, answer.json()["error"]["field"], seen) == (400, name, [])
    assert door.post(CHAT, json={"messages": [], name: harmless}).status_code == 200


def test_errors_and_what_is_no_object_pass_unchanged(door: TestClient) -> None:
    answer = door.post(CHAT, json={"model": "unknown"})
    assert (answer.status_code, answer.json()) == (404, {"error": {"message": "no such model"}})
    for body in (b"{", b"[1]", b""):
        assert door.post(CHAT, content=body).status_code == 500, "it arrived"
    assert door.get("/rollout/v1/models").json() == {"data": []}


def test_the_key_is_asked_for_at_the_guard(door: TestClient, seen: list[dict[str, Any]]) -> None:
    for path in ROLLOUT_PATHS:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            answer = door.request(
                "GET" if path.endswith("models") else "POST", path, headers=headers
            )
            assert answer.status_code == 401
            assert "API key" in answer.json()["error"]["message"]
    for path in ("v1/load_lora_adapter", "pause", "v1/models/", "rollout/v1/models"):
        assert door.post(f"/rollout/{path}").status_code == 401
    assert seen == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "response_format"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"background": True}, "background"),
        (MESSAGES, {"top_k": 5}, "top_k"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, PARALLEL),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "response_format"),
    ],
)
def test_other_dialects_have_the_same_refusals(
    door: TestClient, seen: list[dict[str, Any]], path: str, body: dict[str, Any], field: str
) -> None:
    answer = door.post(path, json=body, headers={"X-Session-ID": "a"})
    assert (answer.status_code, answer.json()["error"]["field"], seen) == (400, field, [])


def test_other_dialects_need_a_session(door: TestClient, seen: list[dict[str, Any]]) -> None:
    for path in (RESPONSES, MESSAGES):
        answer = door.post(path, json={"model": "run@3"})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "x-session-id")
        assert "default_headers" in answer.json()["error"]["message"]
    assert seen == []


def test_calls_are_not_forced_into_a_schema(door: TestClient, seen: list[dict[str, Any]]) -> None:
    """If a tool has `strict`, vLLM 0.32 samples the tool's calls by a grammar, so the door removes
    `strict`."""
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    door.post(CHAT, json={"messages": [], "tools": [tool]})
    assert seen[-1]["tools"] == [{"type": "function", "function": {"name": "f"}}]


def test_clients_of_anthropics_api_send_the_key_in_a_header_of_their_own(
    door: TestClient, seen: list[dict[str, Any]]
) -> None:
    count = "/rollout/v1/messages/count_tokens"
    del door.headers["Authorization"]
    for key, status in (("wrong", 401), ("the-key", 200)):
        body = {"messages": [], "tool_choice": {"type": "auto"}}
        answer = door.post(count, json=body, headers={"X-API-Key": key})
        assert answer.status_code == status
        answer = door.post(CHAT, json={"messages": []}, headers={"X-API-Key": key})
        assert answer.status_code == 401
    assert seen == [body]
    assert door.post("/rollout/sessions/a/finish", json={"reward": 1}).status_code == 401
