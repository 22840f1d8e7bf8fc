"""Experts of turns at the door: a mixture's are taken, its sizes come from the base model's configuration."""

import base64
import io
import json

import numpy as np
import pytest

from api_server import BASE_MODEL, KEY, Server, make_root, rl_request
from tandem.client import Tandem
from tandem.data.packed_format import PackedBatch
from tandem.errors import InvalidInput

MIXTURE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5,
           "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}  # fmt: skip


def request(experts: np.ndarray) -> dict:
    """Each turn has 4 tokens, so experts for 3."""
    buffer = io.BytesIO()
    np.save(buffer, experts)
    made = rl_request()
    for trajectory in made["groups"][0]["trajectories"]:
        trajectory["turns"][0]["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
    return made


def test_a_job_of_a_mixture_has_the_experts_of_its_turns(tmp_path):
    root = make_root(tmp_path / "spool")
    config = root / BASE_MODEL / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MIXTURE))
    experts = np.array([[[4, 1]], [[0, 3]], [[2, 0]]], np.uint8)
    with Server(root) as server, Tandem(server.url, KEY) as client:
        client.create_run("r", lora={"rank": 2})
        with pytest.raises(InvalidInput, match="outside") as refused:
            client.train("r", request(experts + 1))
        assert refused.value.field == "groups.0.trajectories.0.turns.0.routed_experts"
        job = client.train("r", request(experts))
        with PackedBatch.open(server.spool.paths.root / job.spec.data.path) as batch:
            assert np.array_equal(batch.row(0).slot_experts[:3], experts)


def test_experts_for_a_dense_model_are_refused(client, run):
    with pytest.raises(InvalidInput, match="no mixture of experts"):
        client.train(run, request(np.zeros((3, 1, 2), np.uint8)))
    assert client.list_jobs(run) == []
