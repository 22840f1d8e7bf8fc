"""Bad input is refused at the door: the right status, the field's name, and nothing on the spool."""

from __future__ import annotations

import json

import pytest

from api_server import Server, groups, make_root, rl_request, run_one, sft_request, tree, turn


def _with(path: str, value: object) -> dict:
    """`rl_request()` with one value replaced."""
    request = rl_request()
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    inner = request
    for parent in parents:
        inner = inner.setdefault(parent, {}) if isinstance(inner, dict) else inner[parent]
    inner[last] = value
    return request


TRAJECTORY = "groups.0.trajectories.1"
BAD_TRAINING = {
    "NaN reward": (_with(f"{TRAJECTORY}.reward", float("nan")), f"{TRAJECTORY}.reward"),
    "infinite reward": (_with(f"{TRAJECTORY}.reward", float("inf")), f"{TRAJECTORY}.reward"),
    "null reward": (_with(f"{TRAJECTORY}.reward", None), f"{TRAJECTORY}.reward"),
    "true as reward": (_with(f"{TRAJECTORY}.reward", True), f"{TRAJECTORY}.reward"),
    "no reward": (
        rl_request(groups=[{"trajectories": [{"turns": [turn([1], [2])]}]}]),
        "groups.0.trajectories.0.reward",
    ),
    "no groups": (rl_request(groups=[]), "groups"),
    "empty group": (rl_request(groups=[*groups(), {"trajectories": []}]), "groups.1.trajectories"),
    "no turns": (_with(f"{TRAJECTORY}.turns", []), f"{TRAJECTORY}.turns"),
    "token outside the vocabulary": (
        _with(f"{TRAJECTORY}.turns.0.token_ids", [20, 320]),
        f"{TRAJECTORY}.turns.0.token_ids",
    ),
    "negative token": (
        _with(f"{TRAJECTORY}.turns.0.prompt_token_ids", [-1, 3]),
        f"{TRAJECTORY}.turns.0.prompt_token_ids",
    ),
    "token that is text": (_with(f"{TRAJECTORY}.turns.0.token_ids", ["20", 3]), f"{TRAJECTORY}.turns.0.token_ids.0"),
    "fewer log-probs than tokens": (_with(f"{TRAJECTORY}.turns.0.logprobs", [-1.0]), f"{TRAJECTORY}.turns.0.logprobs"),
    "positive log-prob": (_with(f"{TRAJECTORY}.turns.0.logprobs", [-1.0, 0.5]), f"{TRAJECTORY}.turns.0.logprobs"),
    "NaN log-prob": (_with(f"{TRAJECTORY}.turns.0.logprobs", [-1.0, float("nan")]), f"{TRAJECTORY}.turns.0.logprobs.1"),
    "unknown key": (_with(f"{TRAJECTORY}.rewards", 1.0), f"{TRAJECTORY}.rewards"),
    "unknown policy": (_with("loss.policy", "reinforce"), "loss.policy"),
    "negative reference step": (_with("loss.kl_reference", -1), "loss"),
    "reference step yet to come": (_with("loss.kl_reference", 1), "loss.kl_reference"),
    "reference step that is a list": (_with("loss.kl_reference", [1]), "loss.kl_reference"),
    "learning rate 0": (_with("optimizer.learning_rate", 0), "optimizer.learning_rate"),
    "row longer than the model": (_with("packing.sequence_length", 8192), "packing.sequence_length"),
    "trajectory longer than a row": (_with("packing.sequence_length", 3), "groups.0.trajectories.0"),
    "id that is no name": (rl_request(id="../x"), "id"),
    "no attempts": (rl_request(max_attempts=0), "max_attempts"),
    "negative base step": (rl_request(base_step=-1), "base_step"),
    "unknown kind": (rl_request(kind="dpo"), None),
    "example without assistant": (sft_request(examples=[{"messages": [{"role": "user", "content": "?"}]}]),
                                  "examples.0.messages"),
    "flags that don't fit": (sft_request(examples=[{"token_ids": [1, 2, 3], "trainable": [False, True]}]),
                             "examples.0.trainable"),
    "example token outside the vocabulary": (
        sft_request(examples=[{"token_ids": [1, 9999], "trainable": [False, True]}]),
        "examples.0.token_ids",
    ),
    "no examples": (sft_request(examples=[]), "examples"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TRAINING)
def test_bad_training_requests(name, http, idle_run, root):
    request, field = BAD_TRAINING[name]
    before = tree(root)
    answer = http.post(
        f"/v1/runs/{idle_run}/train", content=json.dumps(request), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["field"]) == ("invalid_input", field)
    assert error["message"]
    assert tree(root) == before


def test_groups_without_variance_are_nothing_to_learn(http, idle_run, root):
    before = tree(root)
    same = [{"trajectories": [{"turns": [turn([1], [2])], "reward": 1.0}, {"turns": [turn([1], [3])], "reward": 1.0}]}]
    answer = http.post(f"/v1/runs/{idle_run}/train", json=rl_request(groups=same))
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "nothing_to_learn")
    assert tree(root) == before


def test_not_json_and_not_declared_as_json(http, idle_run, root):
    before = tree(root)
    broken = http.post(f"/v1/runs/{idle_run}/train", content=b'{"kind": ', headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["field"]) == (422, "body")
    # A web page can send text/plain to another origin without asking.
    plain = http.post(
        f"/v1/runs/{idle_run}/train", content=json.dumps(rl_request()), headers={"Content-Type": "text/plain"}
    )
    assert plain.status_code == 415
    assert tree(root) == before


def test_unknown_runs_steps_and_jobs(http, idle_run, root):
    before = tree(root)
    for method, path, body, field in [
        ("POST", "/v1/runs/nobody/train", rl_request(), "run"),
        ("GET", "/v1/runs/nobody", None, "run"),
        ("POST", "/v1/runs/nobody/fork", {"step": 0, "name": "b"}, "run"),
        ("POST", "/v1/runs/nobody/rollback", {"step": 0}, "run"),
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
        answer = http.request(method, path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["field"]) == (404, "not_found", field), path
    assert http.get("/v1/nothing").json()["error"]["type"] == "not_found"
    for path in ("/v1/runs/%2e%2e/checkpoints", "/v1/runs/.hidden", "/v1/jobs/%2e%2e%2f%2e%2e%2fspool"):
        assert http.get(path).status_code in (404, 422), path
    assert tree(root) == before


def test_step_that_is_not_the_newest(http, run, server, root):
    assert http.post(f"/v1/runs/{run}/train", json=rl_request(base_step=0)).status_code == 202
    before = tree(root)
    answer = http.post(f"/v1/runs/{run}/train", json=rl_request(base_step=0))
    assert (answer.status_code, answer.json()["error"]["field"]) == (409, "base_step")
    assert "step 1" in answer.json()["error"]["message"]
    assert tree(root) == before
    run_one(server.spool)
    assert http.post(f"/v1/runs/{run}/train", json=rl_request(base_step=0)).status_code == 409
    assert http.post(f"/v1/runs/{run}/train", json=rl_request(base_step=1)).status_code == 202


BAD_RUNS = {
    "rank 0": ({"lora": {"rank": 0}}, 422, "lora.rank"),
    "rank above vLLM's": ({"lora": {"rank": 17}}, 422, "lora.rank"),
    "unknown target": ({"lora": {"targets": ["q_proj", "lm_head"]}}, 422, "lora.targets.1"),
    "a target twice": ({"lora": {"targets": ["q_proj", "q_proj"]}}, 422, "lora"),
    "infinite alpha": ({"lora": {"alpha": float("inf")}}, 422, "lora.alpha"),
    "another base model": ({"base_model": "somebody/else"}, 422, "base_model"),
    "merged weights": ({"weights": "merged"}, 422, "weights"),
    "a name that is a path": ({"name": "../up"}, 422, "name"),
    "capital letters": ({"name": "Alpha"}, 422, "name"),
    "a name in use": ({"name": "alpha", "seed": 5}, 409, "name"),
    "unknown key": ({"rank": 3}, 422, "rank"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_runs(name, http, idle_run, root):
    change, status, field = BAD_RUNS[name]
    before = tree(root)
    body = json.dumps({"name": "beta", "lora": {"rank": 2}} | change)
    answer = http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), answer.text
    assert tree(root) == before


def test_unknown_architecture(tmp_path):
    root = make_root(tmp_path / "spool")
    config = root / "models/tiny/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    with Server(root) as server, server.http() as http:
        before = tree(root)
        answer = http.post("/v1/runs", json={"name": "beta"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["field"]) == (422, "unknown_architecture", "base_model")
        assert "qwen3" in error["message"]
        assert tree(root) == before


def test_full_and_read_only_volume(http, idle_run, root, monkeypatch):
    """What a volume that refuses to write looks like from outside; the spool's own tests fill real disks."""
    import errno
    import os

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = tree(root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for path, body in [(f"/v1/runs/{idle_run}/train", rl_request()), ("/v1/runs", {"name": "beta"})]:
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "spool_unusable"), answer.text
            assert "full" in answer.json()["error"]["message"]
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200
    assert tree(root) == before
    assert http.get("/readyz").status_code == 200
