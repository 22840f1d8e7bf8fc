"""The admin guard, alone and in front of a real router."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette._utils import get_route_path
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tandem.inference.server.middleware.asgi import route_path
from tandem.inference.server.middleware.guard import API_KEY_PATHS, AdminGuard
from tandem.vllm_client.names import ADMIN_HEADER, PUBLIC_PATHS

ADMIN = {ADMIN_HEADER: "s3cret-token"}
API = {"Authorization": "Bearer the-key"}
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS")
CLOSED = [
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pause",
    "/sleep",
    "/update_weights",
    "/collective_rpc",
    "/adapters",
    "/server_info",
    "/v1/chat/completions/render",
    "/v1/responses",
    "/",
    "",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", "s3cret-token")
    monkeypatch.delenv("TANDEM_ADMIN_TOKEN_FILE", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "the-key")


def client() -> TestClient:
    """A client of an app behind the guard. The app itself answers on every path."""
    app = FastAPI(openapi_url=None)

    @app.websocket("/{path:path}")
    async def socket(websocket: WebSocket, path: str) -> None:
        await websocket.accept()
        await websocket.send_text("in")
        await websocket.close()

    @app.api_route("/{path:path}", methods=list(METHODS))
    async def anything(path: str) -> dict[str, str]:
        return {"path": path}

    app.add_middleware(AdminGuard)
    return TestClient(app, raise_server_exceptions=False)


def _asgi(path: str, root_path: str = "", scheme: str = "http") -> int:
    """The status of a request with exactly this `path`. The request does not go through an HTTP
    client, because a client would normalise the path."""
    statuses = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        statuses.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": scheme, "method": "POST", "path": path, "query_string": b"", "headers": []}
    asyncio.run(AdminGuard(app)({**scope, "root_path": root_path}, receive, send))
    return statuses[0] if statuses else 0


def test_without_a_key_only_programs_on_this_machine_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A web page can make its own host name resolve to 127.0.0.1, and then send requests without
    reading the answers."""
    for key, status in (("the-key", 200), ("", 422)):
        monkeypatch.setenv("VLLM_API_KEY", key)
        guarded = client()
        for headers in (
            {"Host": "evil.example"},
            {"Host": "127.0.0.1.evil.example:8000"},
            {"Host": ""},
            {"Host": "127.0.0.1:8000", "Origin": "http://evil.example"},
            {"Host": "127.0.0.1:8000", "Origin": "null"},
        ):
            for path in ("/v1/models", "/v1/chat/completions", *API_KEY_PATHS):
                answer = guarded.post(path, headers=API | headers)
                assert answer.status_code == status, (path, headers)
                if status == 422:
                    assert answer.json()["error"]["field"] == list(headers)[-1]
            assert guarded.get("/health", headers=headers).status_code == 200
            assert guarded.post("/pause", headers=ADMIN | headers).status_code == 200
        for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
            answer = guarded.get("/v1/models", headers={"Host": host, "Origin": f"http://{host}"})
            assert answer.status_code == 200


def test_public_routes_need_no_secret() -> None:
    for path in PUBLIC_PATHS:
        assert client().get(path).status_code == 200, path


@pytest.mark.parametrize("path", CLOSED)
def test_every_other_route_needs_the_token(path: str) -> None:
    guarded, token = client(), ADMIN[ADMIN_HEADER]
    wrong = [
        {},
        API,
        {ADMIN_HEADER: "wrong"},
        {ADMIN_HEADER: ""},
        {"Authorization": f"Bearer {token}"},
    ]
    twice = [
        [(ADMIN_HEADER, value) for value in values]
        for values in ([token, token], [token, "no"], ["no", token])
    ]
    for method in METHODS:
        for headers in (*wrong, *twice):
            answer = guarded.request(method, path, headers=headers)
            assert answer.status_code == 401, (method, headers)
            if method != "HEAD":
                assert answer.json()["error"]["type"] == "unauthorized"
                assert token not in answer.text
        assert guarded.request(method, path, headers=ADMIN).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "//pause",
        "/pause/",
        "/./pause",
        "/health/../pause",
        "/%70ause",
        "/PAUSE",
        "/pause?x=/health",
        "/pause%2f",
        "/pause;/health",
        "/health/",
        "/health//",
        "//health",
        "/HEALTH",
        "/v1//models",
        "/v1/models/",
        "/v1/models/x",
        "/v1/completions/../load_lora_adapter",
        "/v1/completions%2f..%2fload_lora_adapter",
        "/health%00",
        "/health%20",
        "/metrics/../pause",
        "/metricsx",
        "/pause#/health",
    ],
)
def test_other_spellings_of_a_path_are_closed_too(path: str) -> None:
    assert client().post(path, headers=API).status_code == 401
    assert _asgi(path.split("#")[0].split("?")[0]) == 401


@pytest.mark.parametrize(
    ("path", "root_path", "status"),
    [
        ("/models-api/health", "/models-api", 200),
        ("/models-api/pause", "/models-api", 401),
        ("/pause", "/models-api", 401),
        ("/health", "/models-api", 200),  # Starlette routes a path without the root path too
        ("/models-apihealth", "/models-api", 401),
        ("/health/pause", "/health", 401),
        # the server is mounted at /pause, so its router sees /health
        ("/pause/health", "/pause", 200),
        ("/models-api", "/models-api", 401),
    ],
)
def test_the_guard_decides_by_the_path_that_the_router_matches(
    path: str, root_path: str, status: int
) -> None:
    assert _asgi(path, root_path) == status
    scope = {"type": "http", "path": path, "root_path": root_path}
    assert route_path(scope) == get_route_path(scope)


def test_websockets_and_unknown_scopes() -> None:
    for path in ("/v1/realtime", "/pause", "/health", "/tokenize"):
        with (
            pytest.raises(WebSocketDisconnect) as caught,
            client().websocket_connect(path, headers=API),
        ):
            pass
        assert caught.value.code == 1008
        with client().websocket_connect(path, headers=ADMIN) as socket:
            assert socket.receive_text() == "in"
    assert _asgi("/health", scheme="webtransport") == 0


def test_tokenize_needs_the_api_key_if_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in API_KEY_PATHS:
        for headers, status in [
            ({}, 401),
            (API, 200),
            ({"Authorization": "Bearer wrong"}, 401),
            (ADMIN, 200),
            ({"Authorization": "the-key"}, 401),
        ]:
            assert client().post(path, headers=headers).status_code == status, headers
    monkeypatch.delenv("VLLM_API_KEY")
    assert client().post("/tokenize", headers={"Host": "localhost"}).status_code == 200


@pytest.mark.parametrize("token", ["", "  "])
def test_without_a_token_configured_the_admin_routes_are_closed(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", token)
    for headers in ({}, API, {ADMIN_HEADER: ""}, {ADMIN_HEADER: "  "}, {ADMIN_HEADER: "None"}):
        answer = client().post("/pause", headers=headers)
        assert answer.status_code == 401
        assert "TANDEM_ADMIN_TOKEN" in answer.text
    assert client().get("/health").status_code == 200


def test_the_token_comes_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_ADMIN_TOKEN")
    assert client().post("/pause", headers=ADMIN).status_code == 401
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(FileNotFoundError):
        AdminGuard(None)  # type: ignore[arg-type]
    (tmp_path / "token").write_text("from-a-file\n")
    assert client().post("/pause", headers={ADMIN_HEADER: "from-a-file"}).status_code == 200
    assert client().post("/pause", headers=ADMIN).status_code == 401
