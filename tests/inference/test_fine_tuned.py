"""The middleware that translates names of fine-tuned models, in front of an app that answers as
vLLM does."""

import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient

from tandem.inference.server.middleware.fine_tuned import FineTunedNames
from tandem.inference.server.middleware.guard import AdminGuard
from tandem.inference.server.middleware.rollout import RolloutDoor

NAME, LAST = "ft:tiny:tandem:my-suffix:ft-my-suffix-0123@7", "ft-my-suffix-0123@7"


@pytest.fixture
def seen() -> list[bytes]:
    """The bodies of the requests that the app receives."""
    return []


@pytest.fixture
def door(seen: list[bytes], monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    app = FastAPI(openapi_url=None)

    @app.post("/{path:path}")
    async def answer(path: str, request: Request) -> Any:
        body = await request.body()
        assert int(request.headers["content-length"]) == len(body)
        seen.append(body)
        return {"model": json.loads(body).get("model") if body[:1] == b"{" else None, "choices": []}

    for middleware in (RolloutDoor, FineTunedNames, AdminGuard):
        app.add_middleware(middleware)
    return TestClient(app, headers={"Authorization": "Bearer the-key"})


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/rollout/v1/chat/completions", "/tokenize"]
)
def test_the_last_part_is_what_vllm_gets(door: TestClient, seen: list[bytes], path: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": 'says "ft:a:b" ü'}]}
    assert door.post(path, json=body).json()["model"] == LAST
    sent = json.loads(seen[0])
    assert (sent["model"], sent["messages"]) == (LAST, body["messages"])


UNCHANGED = [
    b'{"model": "run@3", "messages": []}',
    b'{"model":  "base", "messages": [{"role": "user", "content": "\\"ft:x\\""}]}',
    b'{"model": "base", "prompt": "ft:a"}',
    b'{"prompt": "ft:a", "user": "ft:b"}',
    b'{"model": ["ft:a"]}',
    b'["ft:a"]',
    b'{"model": "ft:a"',
    b"",
    b"[" * 100_000 + b'"ft:a"',
]


@pytest.mark.parametrize("body", UNCHANGED, ids=range(len(UNCHANGED)))
def test_other_bodies_arrive_as_they_are(door: TestClient, seen: list[bytes], body: bytes) -> None:
    with TestClient(door.app, headers=door.headers, raise_server_exceptions=False) as client:
        client.post("/v1/completions", content=body)
    assert seen == [body]


def test_the_key_comes_first(door: TestClient, seen: list[bytes]) -> None:
    door.headers["Authorization"] = "Bearer other"
    assert door.post("/rollout/v1/completions", json={"model": NAME}).status_code == 401
    assert door.post("/v1/load_lora_adapter", json={"model": NAME}).status_code == 401
    assert seen == []
