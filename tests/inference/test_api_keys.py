"""The middleware `ApiKeys` around the guard. With this middleware vLLM accepts every API key of the
deployment."""

import json
import logging

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tandem.inference.server.middleware.api_keys import ApiKeys
from tandem.inference.server.middleware.guard import AdminGuard
from tandem.system.api_keys import asking, digests, name_in_log
from tandem.vllm_client.names import KEYS_VARIABLE


async def header(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{request.headers.get('authorization')} {asking.get()}")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    keys = {"first": "ann", "second": "", "third": "bob"}
    monkeypatch.setenv("VLLM_API_KEY", "first")
    monkeypatch.setenv(KEYS_VARIABLE, json.dumps(digests(keys)))
    app = Starlette(routes=[Route("/tokenize", header), Route("/v1/models", header)])
    app.add_middleware(AdminGuard)
    app.add_middleware(ApiKeys)
    return TestClient(app)


def test_each_key_counts_as_the_one_that_vllm_knows(client: TestClient) -> None:
    for key, name in (("first", "ann"), ("second", ""), ("third", "bob")):
        answer = client.get("/tokenize", headers={"Authorization": f"Bearer {key}"})
        assert (answer.status_code, answer.text) == (200, f"Bearer first {name}")
    for wrong in ("Bearer fourth", "Bearer", "Basic first", "first", "Bearer ann"):
        assert client.get("/tokenize", headers={"Authorization": wrong}).status_code == 401
        # vLLM checks the key on /v1/models. The app of this test answers with the header that the
        # app got.
        assert client.get("/v1/models", headers={"Authorization": wrong}).text == f"{wrong} "
    twice = [("Authorization", "Bearer second"), ("Authorization", "Bearer third")]
    assert client.get("/tokenize", headers=twice).status_code == 401


def test_the_access_log_has_the_name(client: TestClient) -> None:
    client.get("/tokenize")  # Starlette builds the middleware at the first request.
    assert name_in_log in logging.getLogger("uvicorn.access").filters
    arguments = ("127.0.0.1:1", "GET", "/v1/models", "1.1", 200)
    record = logging.LogRecord("uvicorn.access", 20, "", 0, "%s - %s %s %s %d", arguments, None)
    token = asking.set("ann")
    try:
        assert name_in_log(record)
    finally:
        asking.reset(token)
    assert record.getMessage().startswith("127.0.0.1:1 ann - GET")
