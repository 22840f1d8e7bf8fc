"""Keys, hosts and body sizes, and the settings with which a controller refuses to start."""

import json
import logging

import pytest

from api_server import Process, Server, make_root, rl_request, tree
from tandem.config import Settings
from tandem.controller.__main__ import _is_news
from tandem.errors import InvalidInput


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Bearer key-one,key-two", "Basic key-one", "key-one"]
)
def test_anything_but_a_key_is_unauthorized(server, root, header):
    for key in ("key-one", "key-two", "key-three"):
        with server.http(key) as http:
            assert http.get("/v1/runs").status_code == 200
    before = tree(root)
    with server.http(None) as http:
        headers = {"Authorization": header} if header else {}
        for request in ("GET /v1/runs", "POST /v1/runs", "GET /v1/jobs/x/events", "GET /v1/none"):
            answer = http.request(*request.split(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (
                401,
                "unauthorized",
            ), request
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "TANDEM_API_KEY" in answer.text
            assert "key-one" not in answer.text
        for path in ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"):
            assert http.get(path, headers=headers).status_code == 401, path
        for path in ("/healthz", "/readyz", "/metrics"):
            answer = http.get(path)
            assert answer.status_code == 200
            assert "<script" not in answer.text
    with server.http() as http:
        assert http.get("/openapi.json").json()["openapi"]
        for path in ("/docs", "/docs/oauth2-redirect", "/redoc"):
            assert http.get(path).status_code == 404, path
    assert tree(root) == before


def test_bodies_over_the_limit_are_refused_with_and_without_content_length(tmp_path):
    root = make_root(tmp_path / "spool")
    with Server(root, max_request_bytes=2**20) as server, server.http() as http:
        http.post("/v1/runs", json={"name": "a", "lora": {"rank": 2}})
        before = tree(root)
        big = json.dumps(rl_request(labels={"x": "y" * 2**20})).encode()

        def pieces():
            yield from (big[start : start + 2**16] for start in range(0, len(big), 2**16))

        for path, content in [
            ("/v1/runs/a/train", big),
            ("/v1/runs/a/train", pieces()),
            ("/v1/runs", pieces()),
        ]:
            answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["field"]) == (
                413,
                "request_too_large",
                "body",
            )
        assert tree(root) == before
        assert http.post("/v1/runs/a/train", json=rl_request()).status_code == 202


def test_only_examples_may_be_large(http):
    assert http.post("/v1/runs", json={"name": "a" * 2**20}).status_code == 413
    for path in ("/v1/runs/nobody/train", "/v1/data/render"):
        answer = http.post(
            path, json={"kind": "sft", "examples": [{"text": "a" * 2**21, "texts": 1}]}
        )
        assert answer.status_code == (404 if "train" in path else 422), answer.text


def test_without_keys_only_localhost_names_are_answered(tmp_path):
    with Server(make_root(tmp_path / "spool"), api_key=None) as server, server.http(None) as http:
        for host in ("127.0.0.1:8080", "localhost:8080", "[::1]:8080"):
            assert http.get("/v1/runs", headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""):
            answer = http.get("/v1/runs", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["field"]) == (422, "Host"), host
        # A web page of another origin makes a browser on this machine send these headers.
        for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
            answer = http.post(
                "/v1/jobs/j/cancel", headers={"Host": "127.0.0.1:8080", "Origin": origin}
            )
            assert (answer.status_code, answer.json()["error"]["field"]) == (422, "Origin"), origin
        own = {"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}
        assert http.get("/v1/runs", headers=own).status_code == 200


def test_a_bind_beyond_loopback_needs_a_key():
    for host, key in [("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", "k")]:
        Settings(controller_host=host, api_key=key, base_model="m").check_bind()
    for host, key in [("0.0.0.0", None), ("::", None), ("10.0.0.1", " , ")]:
        with pytest.raises(InvalidInput, match="TANDEM_API_KEY"):
            Settings(controller_host=host, api_key=key, base_model="m").check_bind()
        with pytest.raises(InvalidInput, match="TANDEM_API_KEY") as caught:
            Settings(inference_host=host, api_key=key, base_model="m").check_bind("inference")
        assert caught.value.field == "TANDEM_INFERENCE_HOST"


def test_successes_of_probes_and_scrapes_are_not_logged():
    for path, status, told in [
        ("/readyz", 200, False),
        ("/metrics", 200, False),
        ("/readyz", 503, True),
        ("/v1/runs", 200, True),
    ]:
        arguments = ("127.0.0.1:1", "GET", path, "1.1", status)
        record = logging.LogRecord(
            "uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None
        )
        assert _is_news(record) == told, path


@pytest.mark.slow
def test_a_controller_that_must_not_start_says_why(tmp_path):
    (tmp_path / "file").touch()
    processes = {
        "not a directory": Process(tmp_path / "file"),
        "TANDEM_CONTROLLER_HOST": Process(
            tmp_path / "spool", TANDEM_API_KEY="", TANDEM_CONTROLLER_HOST="0.0.0.0"
        ),
        "CONTROLLER_PORT": Process(tmp_path / "spool", TANDEM_CONTROLLER_PORT="0"),
    }
    for reason, process in processes.items():
        assert process.popen.wait(timeout=60) == 2
        assert reason in process.output()
        process.__exit__()
