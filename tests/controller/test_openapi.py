"""The OpenAPI document is complete, and its examples are valid."""

from collections.abc import Iterator
from typing import Any

from tandem.controller.schemas import CreateRun, Fork, RLRequest, Rollback, SFTRequest


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


def test_the_examples_are_accepted(http):
    run = CreateRun.model_config["json_schema_extra"]["examples"][0]
    assert http.post("/v1/runs", json=run).status_code == 201
    request = RLRequest.model_config["json_schema_extra"]["examples"][0]
    answer = http.post(f"/v1/runs/{run['name']}/train", json=request)
    assert answer.status_code == 202, answer.text
    for model in (SFTRequest, Fork, Rollback):
        model.model_validate(model.model_config["json_schema_extra"]["examples"][0])
