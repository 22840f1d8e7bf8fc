"""Runs and jobs through the client, while the test acts as the runner."""

import base64
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import api_server
from api_server import (
    BASE_MODEL,
    KEY,
    Server,
    claim,
    fail,
    groups,
    make_root,
    rl_request,
    run_one,
    serve,
    sft_request,
    tree,
)
from spool.volume_tools import refused
from tandem.client import Tandem
from tandem.controller import app
from tandem.data.packed_format import PackedBatch
from tandem.errors import Conflict, InvalidInput, JobFailed, NotFound, NotServed
from tandem.spool.schema import DELTA_NET_TARGETS, JobError, LoraShape
from tiny import GEMMA4_MOE, LATENT, SHAPE
from waiting import until


def test_a_run_is_created_once(client, root):
    lora = {"rank": 4, "alpha": 8}
    status = client.create_run("once", lora=lora, seed=3)
    assert (status.newest_step, status.served, status.pending) == (0, None, [])
    assert status.spec.base_model == "models/tiny"
    before = tree(root)
    assert client.create_run("once", lora=lora, seed=3) == status
    assert (
        client.create_run("once", base_model=str(root / "models/tiny"), lora=lora, seed=3) == status
    )
    with refused(Conflict, "name"):
        client.create_run("once", lora={"rank": 4, "alpha": 9}, seed=3)
    assert tree(root) == before
    assert "once" in [run.spec.name for run in client.list_runs()]
    (info,) = client.checkpoints("once")
    assert (info.step, info.job, info.damage) == (0, None, None)


def test_an_rl_job_from_queue_to_served(client, server, run):
    job = client.train_rl(
        run,
        groups(3),
        packing={"sequence_length": 64},
        labels={"who": "me"},
        loss={"policy": "ppo"},
    )
    assert (job.state, job.kind, job.run, job.attempt, job.spec.base_step) == (
        "queued",
        "rl",
        run,
        0,
        0,
    )
    assert (job.spec.data.num_groups, job.spec.loss.policy) == (3, "ppo")
    with PackedBatch.open(server.spool.paths.data_dir(job.spec.id)) as batch:
        assert len(batch) == job.spec.data.num_rows
    assert client.get_run(run).pending == [job.id]

    claimed = claim(server.spool)
    server.spool.leases.write(claimed, "test-runner", "forward")
    assert (client.get_job(job.id).state, client.get_job(job.id).phase) == ("running", "forward")
    api_server.work(server.spool, claimed)
    api_server.succeed(server.spool, claimed)
    done = client.wait_job(job.id, timeout=60)
    assert (done.state, done.step, done.error) == ("succeeded", 1, None)
    assert client.get_run(run).newest_step == 1
    types = [event.type for event in client.job_events(job.id)]
    assert types == ["claimed", "started", "loaded", "step", "step", "checkpoint", "succeeded"]
    assert client.logs(job.id) == f"rank 0 trains {job.id}\n"

    with pytest.raises(NotServed, match="not served within"):
        client.wait_served(run, 1, timeout=0)
    serve(server.spool, run, 0, refused_step=1, refused_reason="log-probs differ by 3 nats")
    with pytest.raises(NotServed, match="3 nats"):
        client.wait_served(run, 1)
    serve(server.spool, run, 1)
    assert client.wait_served(run, 1).model == f"{run}@1"


def test_train_and_wait_until_served(client, server, run):
    seen = []

    def runner_and_publisher() -> None:
        until("it is queued", lambda: server.spool.jobs.list(run=run))
        job = run_one(server.spool)
        serve(server.spool, run, 1)
        server.spool.events.append(job.spec.id, "served", step=1)

    thread = threading.Thread(target=runner_and_publisher)
    thread.start()
    examples = sft_request()["examples"]
    job = client.train_sft(
        run, examples, packing={"sequence_length": 64}, wait="served", on_event=seen.append
    )
    thread.join()
    assert job.state == "succeeded"
    assert "succeeded" in [e.type for e in seen]  # the list may also contain `served`
    assert client.job_events(job.id)[-1].type == "served"


def test_a_failed_job_raises_with_reason_and_log(client, server, run):
    job = client.train(run, rl_request())
    fail(
        server.spool,
        claim(server.spool),
        log_tail="line\u2028separator, \x85, \x0b, and \r\nTraceback: boom\n",
    )
    with pytest.raises(JobFailed) as failed:
        client.wait_job(job.id, timeout=60)
    assert (failed.value.job_id, failed.value.reason) == (job.id, "rank_crashed")
    assert "SIGSEGV" in failed.value.message
    assert failed.value.message.endswith("Traceback: boom")
    assert client.get_run(run).newest_step == 0


def test_a_log_ends_where_it_ends_however_far_one_reads(client, http, server, run):
    """File systems refuse to seek far beyond a file's end."""
    job = client.train(run, rl_request())
    server.spool.paths.log_file(job.id).write_text("hello")
    for offset, text in [(0, "hello"), (3, "lo"), (5, ""), (2**40, ""), (2**62, "")]:
        answer = http.get(f"/v1/jobs/{job.id}/log?offset={offset}")
        assert (answer.status_code, answer.text) == (200, text)


def test_a_log_and_events_that_are_links_or_fifos_show_nothing(client, http, server, run, tmp_path):
    """The ranks can replace the job's log and its file of events. A link could name a file that the
    controller can read and the ranks can't."""
    job = client.train(run, rl_request())
    (tmp_path / "secret").write_text("secret")
    log, events = server.spool.paths.log_file(job.id), server.spool.paths.events_file(job.id)
    events.unlink(missing_ok=True)
    for make in (lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo):
        make(log)
        make(events)
        assert http.get(f"/v1/jobs/{job.id}/log").text == ""
        assert client.job_events(job.id) == []
        log.unlink()
        events.unlink()


def test_a_retried_job_shows_the_previous_attempt(client, server, run):
    job = client.train(run, rl_request())
    server.spool.queue.requeue(
        claim(server.spool), JobError(type="rank_hung", message="no beat", retriable=True)
    )
    status = client.get_job(job.id)
    assert (status.state, status.attempt, status.error, status.last_error.type) == (
        "queued",
        1,
        None,
        "rank_hung",
    )
    run_one(server.spool)
    assert client.wait_job(job.id, timeout=60).attempt == 2


def test_cancel(client, server, run):
    queued = client.train(run, rl_request())
    assert client.cancel(queued.id).state == "cancelled"
    with pytest.raises(JobFailed) as failed:
        client.wait_job(queued.id, timeout=60)
    assert failed.value.reason == "cancelled"
    running = client.train(run, rl_request())
    claimed = claim(server.spool)
    status = client.cancel(running.id)
    assert (status.state, status.cancel_requested) == ("running", True)
    server.spool.queue.requeue(
        claimed, JobError(type="cancelled", message="asked for", retriable=True)
    )
    assert client.cancel(running.id).state == "cancelled"
    assert client.get_run(run).newest_step == 0


def test_the_same_id_is_the_same_job(http, server, run, root):
    request = rl_request(id="mine", labels={"a": "1", "b": "2"})
    first = http.post(f"/v1/runs/{run}/train", json=request)
    assert first.status_code == 202
    before = tree(root)
    # The same request in another form: it names the default values, and its keys have another
    # order.
    respelt = dict(
        reversed(
            list(
                (request | {"max_attempts": 3, "loss": {}, "labels": {"b": "2", "a": "1"}}).items()
            )
        )
    )
    again = http.post(f"/v1/runs/{run}/train", json=respelt)
    assert (again.status_code, again.json()) == (200, first.json())
    for other in (rl_request(id="mine", groups=groups(2)), sft_request(id="mine")):
        refused = http.post(f"/v1/runs/{run}/train", json=other)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["field"]) == (409, "conflict", "id")
    assert tree(root) == before
    run_one(server.spool)
    assert http.post(f"/v1/runs/{run}/train", json=request).json()["state"] == "succeeded"


def test_fork_and_rollback(client, server, run):
    for _ in range(2):
        client.train(run, rl_request())
        run_one(server.spool)
    fork = client.fork(run, 1, f"{run}-fork")
    assert (fork.newest_step, fork.spec.forked_from.step) == (0, 1)
    assert client.fork(run, 1, f"{run}-fork") == fork
    with refused(Conflict, "name"):
        client.fork(run, 2, f"{run}-fork")
    (info,) = client.checkpoints(f"{run}-fork")
    assert info.origin.run == run
    files = client.checkpoint(f"{run}-fork", 0).files
    assert files == client.checkpoint(run, 1).files
    assert "optimizer/adam.safetensors" in files

    pending = client.train(run, rl_request())
    with pytest.raises(Conflict):
        client.rollback(run, 0)
    client.cancel(pending.id)
    assert client.rollback(run, 0).discarded == [2, 1]
    assert client.get_run(run).newest_step == 0
    assert client.rollback(run, 0).discarded == []
    assert client.train(run, rl_request()).spec.base_step == 0


def test_a_run_is_deleted_with_its_jobs(client, server, run):
    done = client.train(run, rl_request())
    run_one(server.spool)
    size = client.get_run(run).size
    assert size > sum(entry.size for entry in client.checkpoint(run, 1).files.values())
    running, queued = client.train(run, rl_request()).id, client.train(run, rl_request()).id
    job = claim(server.spool)
    with refused(Conflict, "run", running):
        client.delete_run(run)
    assert client.get_job(queued).state == "queued"
    with pytest.raises(Conflict, match=running):
        # the runner has not stopped the job yet
        client.delete_run(run, cancel_jobs=True, timeout=0)
    assert client.get_job(queued).state == "cancelled"

    def runner() -> None:
        until("it is to stop", lambda: server.spool.jobs.cancel_requested(running))
        server.spool.queue.requeue(job, JobError(type="cancelled", message="stopped"))

    thread = threading.Thread(target=runner)
    thread.start()
    client.delete_run(run, cancel_jobs=True, timeout=60)
    thread.join()
    for ask in (client.get_run, client.delete_run, lambda _: client.get_job(done.id)):
        with pytest.raises(NotFound):
            ask(run)

    def left() -> list[str]:
        return [path for path in tree(server.spool.root) if run in path]

    until(lambda: f"these files are gone: {left()}", lambda: not left())
    assert client.create_run(run, lora={"rank": 4}).spec.lora.rank == 4
    assert client.train(run, rl_request(id=done.id)).spec.base_step == 0


def test_a_checkpoint_is_pinned_and_deleted_alone(client, server, run):
    for _ in range(2):
        client.train_rl(run, groups(1))
        run_one(server.spool)
    for _ in range(2):
        client.pin(run, 1)
        assert [info.pinned for info in client.checkpoints(run)] == [False, True, False]
    with refused(Conflict, "step", "pinned"):
        client.delete_checkpoint(run, 1)
    client.unpin(run, 1)
    for step, reason in ((0, "beginning"), (2, "newest")):
        with refused(Conflict, "step", reason):
            client.delete_checkpoint(run, step)
    client.delete_checkpoint(run, 1)
    assert [info.step for info in client.checkpoints(run)] == [0, 2]
    directory = server.spool.checkpoints.path(run, 2).parent
    until(
        "its files are gone",
        lambda: [path.name for path in sorted(directory.iterdir())] == ["00000000", "00000002"],
    )


MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}


@pytest.fixture
def deploy(tmp_path) -> Iterator[Callable[..., tuple[Server, Tandem]]]:
    """Starts a controller on this test's spool. `model` changes fields of the base model's
    config.json."""
    with ExitStack() as stack:

        def start(model: dict[str, Any] | None = None, **settings: Any) -> tuple[Server, Tandem]:
            config = make_root(tmp_path / "spool") / BASE_MODEL / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | (model or {})))
            server = stack.enter_context(Server(tmp_path / "spool", **settings))
            return server, stack.enter_context(Tandem(server.url, KEY))

        yield start


@pytest.mark.slow
def test_the_controller_removes_what_the_settings_do_not_keep_and_goes_on_after_an_error(
    deploy, monkeypatch
):
    failures, prune = [RuntimeError("a bug")], app.prune

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        prune(*arguments)

    monkeypatch.setattr(app, "SWEEP_SECONDS", 0.05)
    monkeypatch.setattr(app, "prune", fail_once)
    server, client = deploy(keep_checkpoints=1, keep_every=2)
    old, young = server.spool.root / "jobs/live/.tmp-old", server.spool.root / "jobs/.tmp-young"
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 4000,) * 2)
    client.create_run("a", lora={"rank": 2})
    for _ in range(4):
        client.train("a", rl_request())
        run_one(server.spool)
    until("old ones are gone", lambda: [info.step for info in client.checkpoints("a")] == [0, 2, 4])
    until("the stale one is gone", lambda: not old.exists())
    assert young.exists()


def test_rows_that_do_not_divide_over_the_ranks_are_refused(deploy):
    _, client = deploy({"num_key_value_heads": 2}, trainer_ranks=4, tensor_parallel=2)
    client.create_run("a", lora={"rank": 2})
    with refused(InvalidInput, "optimizer.grad_accumulation_sequences"):
        client.train("a", rl_request(optimizer={"grad_accumulation_sequences": 3}))
    client.train("a", rl_request(optimizer={"grad_accumulation_sequences": 4}))


def test_a_run_of_another_base_model_is_not_trained(deploy, tmp_path):
    """If the controller accepted the job, it would render the examples with the tokenizer of the
    deployment's model."""
    server, client = deploy()
    client.create_run("a", lora={"rank": 2})
    path = server.spool.root / "runs/a/run.json"
    path.write_text(path.read_text().replace(server.spool.runs.get("a").base_model, "/other/model"))
    with refused(InvalidInput, "run", "TANDEM_BASE_MODEL"):
        client.train("a", rl_request())
    assert client.list_jobs() == []


@pytest.mark.parametrize(
    ("family", "why"), [("glm4_moe", "fp32"), ("gpt_oss", "all experts in one tensor")]
)
def test_families_without_merged_weights_are_refused(deploy, family, why):
    shape = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 0,
    }
    shape |= {
        "model_type": family,
        "num_local_experts": 4,
        "layer_types": None,
        "rope_parameters": None,
    }
    shape["attention_bias"] = family == "gpt_oss"
    _, client = deploy(
        shape | {"sliding_window": 8 if family == "gpt_oss" else None}, weights="merged"
    )
    with refused(InvalidInput, "weights", why):
        client.create_run("merged", weights="merged")


def test_merged_weights_of_a_part_of_a_checkpoint_are_refused(deploy):
    """The merged files would lack the vision tower, or would have two tensors for keys and values.
    Merged weights of Gemma's mixtures have no test."""
    text = {
        **SHAPE,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
    }
    for config, why in (
        ({"model_type": "qwen3_vl", "text_config": text}, "a vision tower beside its text model"),
        ({"model_type": "gemma4_text", **text}, "values made of keys"),
        (
            {"model_type": "gemma4_text", **text, **GEMMA4_MOE, "attention_k_eq_v": False},
            "experts beside MLPs",
        ),
    ):
        _, client = deploy(
            {"layer_types": None, "rope_parameters": None, **config}, weights="merged"
        )
        with refused(InvalidInput, "weights", why):
            client.create_run("merged", weights="merged")


def test_of_runs_with_merged_weights_that_are_created_at_the_same_time_one_is_made(deploy):
    server, client = deploy(weights="merged")

    def create(name: str) -> str | None:
        try:
            client.create_run(name, lora={"rank": 2})
        except Conflict as error:
            return error.field
        return None

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(create, "abcd"), key=str) == [None, "weights", "weights", "weights"]
    assert len(server.spool.runs.list()) == 1


def test_a_delta_net_has_targets_of_its_own(deploy):
    nets = {**MIXTURE, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
    nets |= {"full_attention_interval": 100}
    _, client = deploy(nets)
    targets = client.create_run("default").spec.lora.targets
    assert set(DELTA_NET_TARGETS) < set(targets)
    with refused(InvalidInput, "lora.targets", "in_proj_z without one on in_proj_qkv"):
        client.create_run("z", lora={"targets": ["in_proj_z"]})
    with refused(InvalidInput, "lora.targets", "its targets are q_proj"):
        deploy(MIXTURE)[1].create_run("none", lora={"targets": ["out_proj"]})


def test_latent_attention_has_targets_of_its_own(deploy):
    latent = {**LATENT, "model_type": "deepseek_v3", "num_key_value_heads": 2}
    latent |= {"num_hidden_layers": 2, "architectures": ["DeepseekV3ForCausalLM"]}
    _, client = deploy(latent)
    targets = client.create_run("default").spec.lora.targets
    assert targets == ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    with refused(InvalidInput, "lora.targets", "vLLM ignores LoRA on kv_b_proj"):
        client.create_run("kv_b", lora={"targets": ["o_proj", "kv_b_proj"]})
    with refused(InvalidInput, "lora.targets", "has no q_proj; its targets are q_a_proj"):
        client.create_run("q", lora={"targets": ["q_proj"]})
    without = latent | {"q_lora_rank": None}
    targets = deploy(without)[1].create_run("without").spec.lora.targets
    assert targets == ("q_proj", "kv_a_proj_with_mqa", "o_proj")


def test_a_mixture_of_experts_has_adapters_on_attention_by_default(deploy):
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    _, client = deploy(MIXTURE)
    assert client.create_run("default").spec.lora.targets == attention
    assert client.create_run("shape", lora=LoraShape(rank=2)).spec.lora == LoraShape(
        rank=2, targets=attention
    )
    assert client.create_run("some", lora={"targets": ["v_proj"]}).spec.lora.targets == ("v_proj",)
    with refused(InvalidInput, "lora.targets", "TANDEM_EXPERT_LORA=1"):
        client.create_run("experts", lora={"targets": ["q_proj", "up_proj"]})
    server, client = deploy(MIXTURE, expert_lora=True)
    client.create_run("experts", lora={"rank": 2, "targets": ["q_proj", "up_proj"]})
    keys = load_file(server.spool.checkpoints.path("experts", 0) / "adapter_model.safetensors")
    assert keys["base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_B.weight"].shape == (
        8,
        2,
    )
    assert len(keys) == 2 * (1 + 5)
    _, client = deploy(MIXTURE, trainer_ranks=2, tensor_parallel=2)
    with pytest.raises(
        InvalidInput, match="nearest that works on 2 ranks: TANDEM_TENSOR_PARALLEL=1"
    ):
        client.create_run("a")


def routed(experts: np.ndarray) -> dict[str, Any]:
    """A request whose turns have `experts`. Each turn has 4 tokens, and `experts` covers 3 of these
    tokens."""
    buffer = io.BytesIO()
    np.save(buffer, experts)
    made = rl_request()
    for trajectory in made["groups"][0]["trajectories"]:
        trajectory["turns"][0]["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
    return made


def test_a_job_of_a_mixture_has_the_experts_of_its_turns(deploy, client, run):
    with pytest.raises(InvalidInput, match="not a mixture of experts"):
        client.train(run, routed(np.zeros((3, 1, 2), np.uint8)))
    experts = np.array([[[4, 1]], [[0, 3]], [[2, 0]]], np.uint8)
    server, client = deploy(MIXTURE)
    client.create_run("r", lora={"rank": 2})
    with refused(InvalidInput, "groups.0.trajectories.0.turns.0.routed_experts", "outside"):
        client.train("r", routed(experts + 1))
    job = client.train("r", routed(experts))
    with PackedBatch.open(server.spool.paths.root / job.spec.data.path) as batch:
        assert np.array_equal(batch.row(0).slot_experts[:3], experts)


def test_a_run_of_all_weights_needs_a_deployment_that_serves_whole_weights(deploy, tmp_path):
    for settings in ({}, {"weights": "merged"}):
        _, client = deploy(**settings)
        with refused(InvalidInput, "trainable", "TANDEM_TRANSPORT=volume"):
            client.create_run("all", trainable="full")
        assert client.list_runs() == []
    server, client = deploy(weights="merged", transport="volume")
    with refused(InvalidInput, "lora"):
        client.create_run("all", trainable="full", lora={"rank": 2})
    spec = client.create_run("all", trainable="full").spec
    assert (spec.trainable, spec.lora, spec.weights) == ("full", None, "merged")
    # A repetition of the same request changes nothing.
    assert client.create_run("all", trainable="full").newest_step == 0
    assert server.spool.checkpoints.manifest("all", 0).files == {}
    with pytest.raises(Conflict, match="'all'"):
        client.create_run("adapter")
    client.cancel(client.train_rl("all", groups(1)).id)

    staged = server.spool.root / "staged"
    (staged / "optimizer").mkdir(parents=True)
    (staged / "model.safetensors").write_bytes(b"weights")
    (staged / "optimizer" / "adam.json").write_text("{}")
    made = server.spool.checkpoints.commit(staged, "all", 1, "a-job")
    client.fork("all", 1, "fork")
    assert client.create_run("all", trainable="full").newest_step == 1
    manifest = server.spool.checkpoints.manifest("fork", 0)
    assert manifest.files == made.files
    assert manifest.weights_sha256 == made.files["model.safetensors"].sha256
    weights = client.download("fork", 0, tmp_path / "weights", weights_only=True)
    assert set(weights.files) == {"model.safetensors"}
    assert {path.name for path in (tmp_path / "weights").rglob("*")} == {
        "model.safetensors",
        "manifest.json",
    }
    for run in ("all", "fork"):
        client.delete_run(run)
    assert client.create_run("adapter").newest_step == 0  # no other run is left
