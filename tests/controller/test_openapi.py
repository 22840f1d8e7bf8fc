"""The OpenAPI document is complete, and its examples are valid."""

import re
from collections.abc import Iterator
from typing import Any

from api_server import rl_request
from tandem.controller.schemas import CreateRun, Fork, RLRequest, Rollback, SFTRequest
from tandem.spool.schema.base import JOB_ID_PATTERN, RUN_NAME_PATTERN


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"].removeprefix("#/components/schemas/")
        part = part.values()
    if not isinstance(part, str):
        for value in part if hasattr(part, "__iter__") else ():
            yield from references(value)


def test_the_document_is_complete(server):
    schema = server.app.openapi()
    operations = {
        op["operationId"]: op for path in schema["paths"].values() for op in path.values()
    }
    assert {
        "create_run",
        "train",
        "follow_events",
        "download_checkpoint",
        "rollback_run",
    } <= operations.keys()
    assert len(operations) == sum(len(path) for path in schema["paths"].values())
    components = schema["components"]["schemas"]
    assert set(references(schema)) <= components.keys()
    assert components["TrainRequest"]["discriminator"]["propertyName"] == "kind"
    for name, operation in operations.items():
        assert operation["summary"] or operation["description"]
        if name not in ("live", "ready"):
            assert operation["security"] == [{"HTTPBearer": []}]
            assert "422" in operation["responses"]


def unbounded(part: Any, components: dict[str, Any], where: str, seen: set[str]) -> Iterator[str]:
    """The strings, lists and dicts that a client may send without any limit on their size."""
    if isinstance(part, list):
        for index, inner in enumerate(part):
            yield from unbounded(inner, components, f"{where}.{index}", seen)
    if not isinstance(part, dict):
        return
    if name := part.get("$ref", "").removeprefix("#/components/schemas/"):
        if name not in seen:
            seen.add(name)
            yield from unbounded(components[name], components, name, seen)
        return
    bounds = {"string": {"maxLength", "const", "enum", "pattern"}, "array": {"maxItems"}}
    bounds["object"] = {"maxProperties", "properties"}
    kind = part.get("type")
    if isinstance(kind, str) and kind in bounds and not bounds[kind] & part.keys():
        yield f"{where}: {kind}"
    if kind == "object" and "properties" not in part and "propertyNames" not in part:
        yield f"{where}: names of {kind}"
    for key, inner in part.items():
        if key not in ("examples", "description", "responses"):
            yield from unbounded(inner, components, f"{where}.{key}", seen)


def test_whatever_a_client_sends_has_a_bound(server):
    schema, seen = server.app.openapi(), set[str]()
    found = list(unbounded(schema["paths"], schema["components"]["schemas"], "paths", seen))
    assert found == []
    assert {"CreateRun", "Fork", "RLRequest", "SFTExample", "PreferencePair", "Turn"} <= seen
    # a pattern is a bound if it limits the length
    for pattern in (RUN_NAME_PATTERN, JOB_ID_PATTERN):
        assert not re.match(pattern, "a" * 65)


def test_the_largest_record_that_a_request_makes(http, server):
    """Each label and name has the maximum length, and consists of the characters that are longest
    in JSON."""
    labels = {f"{i:02}" + "\x01" * 62: "\x01" * 256 for i in range(64)}
    name = "r" * 64
    assert http.post("/v1/runs", json={"name": name, "lora": {"rank": 2}}).status_code == 201
    job = http.post(f"/v1/runs/{name}/train", json=rl_request(id="j" * 64, labels=labels)).json()
    assert job["spec"]["labels"] == labels
    records = [path for path in server.spool.root.rglob("*.json") if "models" not in path.parts]
    assert max(path.stat().st_size for path in records) < 256 * 2**10
    for wrong in ({**labels, "one more": ""}, {"a" * 65: ""}, {"a": "b" * 257}):
        answer = http.post(f"/v1/runs/{name}/train", json=rl_request(labels=wrong))
        assert (answer.status_code, answer.json()["error"]["field"].split(".")[0]) == (
            422,
            "labels",
        )


def test_the_examples_are_accepted(http):
    run = CreateRun.model_config["json_schema_extra"]["examples"][0]
    assert http.post("/v1/runs", json=run).status_code == 201
    request = RLRequest.model_config["json_schema_extra"]["examples"][0]
    answer = http.post(f"/v1/runs/{run['name']}/train", json=request)
    assert answer.status_code == 202, answer.text
    for model in (SFTRequest, Fork, Rollback):
        model.model_validate(model.model_config["json_schema_extra"]["examples"][0])
