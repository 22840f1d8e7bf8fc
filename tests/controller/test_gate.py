"""Keys, hosts and sizes; and what a controller refuses to start with."""

from __future__ import annotations

import json

import httpx
import pytest

from api_server import Process, Server, make_root, rl_request, tree
from tandem.config import Settings
from tandem.controller.authentication import check_bind
from tandem.controller.schemas import CreateRun, Fork, RLRequest, Rollback, SFTRequest
from tandem.errors import Unauthorized


@pytest.mark.parametrize("key", ["key-one", "key-two", "key-three"])
def test_each_of_several_keys_opens(server, key):
    with server.http(key) as http:
        assert http.get("/v1/runs").status_code == 200


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Bearer key-one,key-two", "Basic key-one", "key-one"]
)
def test_anything_else_is_unauthorized(server, root, header):
    before = tree(root)
    with server.http(None) as http:
        headers = {"Authorization": header} if header else {}
        for method, path in [
            ("GET", "/v1/runs"),
            ("POST", "/v1/runs"),
            ("GET", "/v1/jobs/x/events"),
            ("GET", "/v1/none"),
        ]:
            answer = http.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "unauthorized"), path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "key-one" not in answer.text
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 200
        assert http.get("/openapi.json").status_code == 200
    assert tree(root) == before


def test_bodies_over_the_limit_are_refused_whether_they_say_so_or_not(tmp_path):
    root = make_root(tmp_path / "spool")
    with Server(root, max_request_bytes=2**20) as server, server.http() as http:
        http.post("/v1/runs", json={"name": "a", "lora": {"rank": 2}})
        before = tree(root)
        big = json.dumps(rl_request(labels={"x": "y" * 2**20})).encode()
        headers = {"Content-Type": "application/json"}

        def pieces():
            for start in range(0, len(big), 2**16):
                yield big[start : start + 2**16]

        for content in (big, pieces()):
            answer = http.post("/v1/runs/a/train", content=content, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["field"]) == (413, "request_too_large", "body")
        answer = http.post("/v1/runs", content=pieces(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
        assert tree(root) == before
        assert http.post("/v1/runs/a/train", json=rl_request()).status_code == 202


def test_only_training_takes_large_bodies(http):
    answer = http.post("/v1/runs", json={"name": "a" * 2**20})
    assert answer.status_code == 413


def test_without_keys_only_localhost_names_are_answered(tmp_path):
    with Server(make_root(tmp_path / "spool"), api_key=None) as server, server.http(None) as http:
        assert http.get("/v1/runs").status_code == 200
        assert http.get("/v1/runs", headers={"Host": f"localhost:{server.settings.controller_port}"}).status_code == 200
        assert http.get("/v1/runs", headers={"Host": "[::1]:8080"}).status_code == 200
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", ""):
            answer = http.get("/v1/runs", headers={"Host": host})
            assert (answer.status_code, answer.json()["error"]["field"]) == (422, "Host"), host


@pytest.mark.parametrize(
    ("host", "key", "fine"),
    [
        ("127.0.0.1", None, True),
        ("::1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("::", None, False),
        ("10.0.0.1", " , ", False),
        ("0.0.0.0", "k", True),
    ],
)
def test_binds_beyond_loopback_need_a_key(host, key, fine):
    settings = Settings(controller_host=host, api_key=key, base_model="m")
    if fine:
        check_bind(settings)
    else:
        with pytest.raises(Unauthorized, match="TANDEM_API_KEY"):
            check_bind(settings)


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"TANDEM_API_KEY": "", "TANDEM_CONTROLLER_HOST": "0.0.0.0"}, "TANDEM_CONTROLLER_HOST"),
        ({"TANDEM_CONTROLLER_PORT": "0"}, "CONTROLLER_PORT"),
    ],
)
def test_a_controller_that_must_not_start_says_why(tmp_path, variables, word):
    process = Process(make_root(tmp_path / "spool"), **variables)
    assert process.popen.wait(timeout=60) == 2
    assert word in process.output()
    process.__exit__()


def test_a_volume_that_is_a_file_stops_the_start(tmp_path):
    (tmp_path / "file").touch()
    process = Process(tmp_path / "file")
    assert process.popen.wait(timeout=60) == 2
    assert "not a directory" in process.output()
    process.__exit__()


def test_the_schema_is_whole(server):
    schema = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()
    operations = [op for path in schema["paths"].values() for op in path.values()]
    ids = [op["operationId"] for op in operations]
    assert {"create_run", "train", "follow_events", "download_checkpoint", "rollback_run"} <= set(ids)
    assert len(set(ids)) == len(ids)
    components = schema["components"]["schemas"]

    def references(part):
        if isinstance(part, dict):
            if "$ref" in part:
                yield part["$ref"]
            for value in part.values():
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    for reference in set(references(schema)):
        assert reference.removeprefix("#/components/schemas/") in components, reference
    assert components["TrainRequest"]["discriminator"]["propertyName"] == "kind"
    for operation in operations:
        if operation["operationId"] not in ("live", "ready"):
            assert operation["security"] == [{"HTTPBearer": []}]
            assert "422" in operation["responses"]
            assert operation["summary"] or operation["description"]


def test_the_examples_of_the_schema_are_accepted(http):
    run = CreateRun.model_config["json_schema_extra"]["examples"][0]
    assert http.post("/v1/runs", json=run).status_code == 201
    request = RLRequest.model_config["json_schema_extra"]["examples"][0]
    answer = http.post(f"/v1/runs/{run['name']}/train", json=request)
    assert answer.status_code == 202, answer.text
    for model in (SFTRequest, Fork, Rollback):
        model.model_validate(model.model_config["json_schema_extra"]["examples"][0])
