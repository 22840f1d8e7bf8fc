"""Bad input is refused with the right status and the field's name, and leaves nothing on the
spool."""

import errno
import json
import os
from pathlib import Path

import httpx
import pytest

from api_server import Server, make_root, rl_request, tree
from spool.volume_tools import full_disk

JSON = {"Content-Type": "application/json"}


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, type and field of a refusal. Checks that the refusal has a message."""
    error = answer.json()["error"]
    assert error["message"]
    return answer.status_code, error["type"], error["field"]


@pytest.fixture
def nothing_changes(root, idle_run):
    before = tree(root)
    yield
    assert tree(root) == before


def changed(path: str, value: object) -> dict:
    """`rl_request()` with one value replaced."""
    request = rl_request()
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    inner = request
    for parent in parents:
        inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else inner[parent]
    inner[last] = value
    return request


T = "groups.0.trajectories.1"
# Each case has the path of a value in a request, and a bad value. If the error's field is not this
# path, the case also has the field.
BAD_VALUES = {
    "no groups": ("groups", []),
    "no variance": (f"{T}.reward", 1.0, None),
    "token outside the vocabulary": (f"{T}.turns.0.token_ids", [20, 320]),
    "NaN log-prob": (f"{T}.turns.0.logprobs", [-1.0, float("nan")], f"{T}.turns.0.logprobs.1"),
    "log-prob of a token that can't be sampled": (f"{T}.turns.0.logprobs", [-1.0, -9998.0]),
    "advantage beyond float32": (f"{T}.advantage", 1e39),
    "unknown policy": ("loss.policy", "reinforce"),
    "reference step yet to come": (
        "loss",
        {"kl_coef": 0.1, "kl_reference": 1},
        "loss.kl_reference",
    ),
    "learning rate 0": ("optimizer.learning_rate", 0),
    "row longer than the model": ("packing.sequence_length", 8192),
    "trajectory longer than a row": ("packing.sequence_length", 3, "groups.0.trajectories.0"),
    "id that is no name": ("id", "../x"),
    "no attempts": ("max_attempts", 0),
    "more seconds than ranks can count": ("stall_seconds", 1e300),
    "negative base step": ("base_step", -1),
    "unknown kind": ("kind", "ppo", None),
}


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_training_requests(name, http, idle_run):
    path, value, *other_field = BAD_VALUES[name]
    request, field = changed(path, value), other_field[0] if other_field else path
    answer = http.post(f"/v1/runs/{idle_run}/train", content=json.dumps(request), headers=JSON)
    assert refusal(answer) == (
        422,
        "nothing_to_learn" if name == "no variance" else "invalid_input",
        field,
    )


@pytest.mark.usefixtures("nothing_changes")
def test_bodies_that_are_empty_not_json_or_not_declared_as_json(http, idle_run):
    train = f"/v1/runs/{idle_run}/train"
    # A browser sends text/plain to another origin without a preflight request.
    for path in (train, "/v1/data/render"):
        assert (
            http.post(path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code
            == 415
        )
    assert (
        "415"
        in http.get("/openapi.json").json()["paths"]["/v1/runs/{run}/train"]["post"]["responses"]
    )
    assert refusal(http.post(train, json={"kind": "sft", "examples": []})) == (
        422,
        "invalid_input",
        "examples",
    )
    for body, words in (
        ({}, "kind is missing"),
        ({"kind": "sft", "examplse": []}, "is missing; add it; and 1 more"),
    ):
        assert words in http.post(train, json=body).json()["error"]["message"]
    paths = (
        "/v1/runs",
        f"/v1/runs/{idle_run}/fork",
        f"/v1/runs/{idle_run}/rollback",
        "/v1/data/render",
        train,
    )
    for path in paths:
        for content in (b"{", b"\xff", b'{"step": "\xc0"}', b"", b"null", b"[1]"):
            assert refusal(http.post(path, content=content, headers=JSON)) == (
                422,
                "invalid_input",
                "body",
            ), content


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize("value", [False, "0", 0.0])
def test_a_step_is_a_number_and_nothing_that_python_takes_for_one(http, idle_run, value):
    """If `false` counted as a number, it would roll a run back to step 0."""
    for path, body, field in [
        (f"/v1/runs/{idle_run}/rollback", {"step": value}, "step"),
        (f"/v1/runs/{idle_run}/fork", {"step": value, "name": "copied"}, "step"),
        ("/v1/runs", {"name": "seeded", "seed": value}, "seed"),
    ]:
        assert refusal(http.post(path, json=body)) == (422, "invalid_input", field)


@pytest.mark.usefixtures("nothing_changes")
def test_numbers_that_no_file_system_and_no_name_has(http, idle_run):
    many = "1" + 400 * "0"
    for method, path, body in [
        ("GET", f"/v1/runs/{idle_run}/checkpoints/{many}", ""),
        ("PUT", f"/v1/runs/{idle_run}/checkpoints/{many}/pin", ""),
        ("POST", f"/v1/runs/{idle_run}/rollback", f'{{"step": {many}}}'),
        ("POST", f"/v1/runs/{idle_run}/fork", f'{{"step": {many}, "name": "b"}}'),
        ("GET", f"/v1/jobs/logged/log?offset={2**63}", ""),
    ]:
        assert refusal(http.request(method, path, content=body, headers=JSON))[:2] == (
            422,
            "invalid_input",
        ), path


def test_a_wrong_method_is_told_all_right_ones(http, idle_run):
    for path, methods in [
        ("/v1/runs", {"GET", "POST"}),
        (f"/v1/runs/{idle_run}", {"DELETE", "GET"}),
        (f"/v1/runs/{idle_run}/checkpoints/0/pin", {"DELETE", "PUT"}),
    ]:
        answer = http.request("PATCH", path)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == methods


@pytest.mark.usefixtures("nothing_changes")
def test_unknown_runs_steps_and_jobs(http, idle_run):
    for method, path, body, field in [
        ("POST", "/v1/runs/nobody/train", rl_request(), "run"),
        ("GET", "/v1/runs/nobody", None, "run"),
        ("POST", "/v1/runs/nobody/fork", {"step": 0, "name": "b"}, "run"),
        ("POST", "/v1/runs/nobody/rollback", {"step": 0}, "run"),
        ("DELETE", "/v1/runs/nobody?cancel_jobs=true", None, "run"),
        ("DELETE", "/v1/runs/nobody/checkpoints/1", None, "run"),
        ("DELETE", f"/v1/runs/{idle_run}/checkpoints/7", None, "step"),
        ("PUT", "/v1/runs/nobody/checkpoints/0/pin", None, "run"),
        ("PUT", f"/v1/runs/{idle_run}/checkpoints/7/pin", None, "step"),
        ("DELETE", "/v1/runs/nobody/checkpoints/0/pin", None, "run"),
        ("GET", "/v1/runs/nobody/checkpoints", None, "run"),
        ("GET", f"/v1/runs/{idle_run}/checkpoints/7", None, "step"),
        ("GET", f"/v1/runs/{idle_run}/checkpoints/7/download", None, "step"),
        ("POST", f"/v1/runs/{idle_run}/fork", {"step": 7, "name": "b"}, "step"),
        ("POST", f"/v1/runs/{idle_run}/rollback", {"step": 7}, "step"),
        ("GET", "/v1/jobs/nothing", None, "id"),
        ("GET", "/v1/jobs/nothing/events", None, "id"),
        ("GET", "/v1/jobs/nothing/log", None, "id"),
        ("POST", "/v1/jobs/nothing/cancel", None, "id"),
        ("GET", "/v1/jobs?run=nobody", None, "run"),
    ]:
        assert refusal(http.request(method, path, json=body)) == (404, "not_found", field), path
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found"
    for path in (
        "/v1/runs/%2e%2e/checkpoints",
        "/v1/runs/.hidden",
        "/v1/jobs/%2e%2e%2f%2e%2e%2fspool",
    ):
        assert http.get(path).status_code in (404, 422), path


BAD_RUNS = {
    "rank 0": ({"lora": {"rank": 0}}, 422, "lora.rank"),
    "rank above vLLM's": ({"lora": {"rank": 17}}, 422, "lora.rank"),
    "unknown target": ({"lora": {"targets": ["q_proj", "lm_head"]}}, 422, "lora.targets.1"),
    "a target twice": ({"lora": {"targets": ["q_proj", "q_proj"]}}, 422, "lora"),
    "infinite alpha": ({"lora": {"alpha": float("inf")}}, 422, "lora.alpha"),
    "another base model": ({"base_model": "somebody/else"}, 422, "base_model"),
    "merged weights": ({"weights": "merged"}, 422, "weights"),
    "a name that is a path": ({"name": "../up"}, 422, "name"),
    "capital letters": ({"name": "Idle"}, 422, "name"),
    "a name in use": ({"name": "idle", "seed": 5}, 409, "name"),
    "unknown key": ({"rank": 3}, 422, "rank"),
}


@pytest.mark.usefixtures("nothing_changes")
@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_runs(name, http):
    change, status, field = BAD_RUNS[name]
    body = json.dumps({"name": "beta", "lora": {"rank": 2}} | change)
    assert refusal(http.post("/v1/runs", content=body, headers=JSON))[::2] == (status, field)


def test_turns_that_are_too_old_behind_the_queued_jobs(http, server, client, run):
    """When the controller packs a request, it compares the request with the newest step. The
    request's job begins later, after the jobs that are already queued."""
    for _ in range(2):
        client.train(run, rl_request())
    body = rl_request(max_off_policy_steps=1)
    for trajectory in body["groups"][0]["trajectories"]:
        trajectory["turns"][0]["policy_step"] = 0
    before = tree(server.spool.root)
    answer = http.post(f"/v1/runs/{run}/train", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "max_off_policy_steps")
    assert tree(server.spool.root) == before
    assert (
        http.post(f"/v1/runs/{run}/train", json=body | {"max_off_policy_steps": 2}).status_code
        == 202
    )


def test_unknown_architecture(tmp_path):
    root = make_root(tmp_path / "spool")
    config = root / "models/tiny/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    with Server(root) as server, server.http() as http:
        before = tree(root)
        answer = http.post("/v1/runs", json={"name": "beta"})
        assert refusal(answer) == (422, "unknown_architecture", "base_model")
        assert "qwen3" in answer.text
        assert tree(root) == before


@pytest.mark.usefixtures("nothing_changes")
def test_a_full_volume(http, idle_run, monkeypatch):
    """The API answers while fsync fails, as on a full volume. Tests in tests/spool fill real
    disks."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        for path, body in [
            (f"/v1/runs/{idle_run}/train", rl_request()),
            ("/v1/runs", {"name": "beta"}),
        ]:
            answer = http.post(path, json=body)
            assert refusal(answer)[:2] == (503, "spool_unusable")
            assert "full" in answer.text
        assert (http.get("/readyz").status_code, http.get("/healthz").status_code) == (503, 200)
    assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO])
def test_what_passes_by_itself_is_503_with_retry_after(http, monkeypatch, number, run):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "a file")

    for path in (f"/v1/runs/{run}", "/v1/jobs", "/v1/jobs/some"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            patch.setattr(Path, "stat", fail)
            answer = http.get(path)
        assert (*refusal(answer)[:2], answer.headers.get("retry-after")) == (
            503,
            "spool_unusable",
            "2",
        )
