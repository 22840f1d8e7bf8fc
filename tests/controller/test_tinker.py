"""Tinker's API, called by Tinker's own package. The tests cover a program that trains and samples,
retries, and refusals. The test acts as the ranks, and a fake server takes the place of vLLM."""

import ast
import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tinker
from tinker import types

from api_server import BASE_MODEL, KEY, Process, claim, fail, make_root, sft_request
from fake_vllm import API_KEY, FakeVllm
from tandem.controller.tinker import futures
from tandem.controller.tinker.models import Numbers
from tandem.controller.tinker.names import model_of
from tandem.data.packed_format import PackedBatch
from tandem.spool import Spool
from tandem.spool.schema import PassRequest, RequestError, StepRequest, VoidRequest
from tinker_client import TINKER_KEY, PlayedRanks, datum, refused, serve, service
from waiting import until


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("tinker") / "spool")


@pytest.fixture(scope="module")
def vllm() -> Iterator[FakeVllm]:
    fake = FakeVllm()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def process(root: Path, vllm: FakeVllm) -> Iterator[Process]:
    # vLLM's key is the first key of the deployment.
    keys = f"{API_KEY},{KEY}"
    with Process(root, TANDEM_API_KEY=keys, TANDEM_INFERENCE_URL=vllm.url) as process:
        yield process


@pytest.fixture(scope="module")
def spool(process: Process, root: Path) -> Spool:
    return Spool(root)


@pytest.fixture(scope="module")
def ranks(spool: Spool) -> Iterator[PlayedRanks]:
    with PlayedRanks(spool) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def client(process: Process, ranks: PlayedRanks) -> Iterator[tinker.ServiceClient]:
    with service(process.url) as client:
        yield client


@pytest.fixture
def model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=BASE_MODEL, rank=4, seed=1).result()


def run_of(model: tinker.TrainingClient) -> str:
    return str(model.model_id).replace(":", "-")


def serve_in(vllm: FakeVllm, spool: Spool, run: str, step: int) -> None:
    """Serves a step in the fake vLLM, as the publisher does."""
    vllm.adapters[f"{run}@{step}"] = ("", 0.0)


def test_a_program_trains_saves_and_samples(
    client: tinker.ServiceClient, spool: Spool, vllm: FakeVllm, model: tinker.TrainingClient
) -> None:
    run = run_of(model)
    info = model.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (BASE_MODEL, 4, True)
    spec = spool.runs.get(run)
    assert spec.lora is not None
    assert (spec.lora.rank, spec.lora.alpha, spec.seed) == (4, 32.0, 1)

    step = model.forward_backward([datum([5, 6, 7]), datum([8, 9])], "cross_entropy")
    adam = types.AdamParams(learning_rate=2e-4, grad_clip_norm=1.0)
    done = model.optim_step(adam)
    result = step.result(timeout=60)
    assert [one["logprobs"].data for one in result.loss_fn_outputs] == [[-0.0, -1.0], [-2.0]]
    assert result.metrics == {"loss:sum": 3.0}
    done.result(timeout=60)
    logged = [spool.requests.get(run, seq).request for seq in (1, 2)]
    assert isinstance(logged[0], PassRequest)
    assert (logged[0].kind, logged[0].lengths) == ("forward_backward", (2, 1))
    assert logged[1] == StepRequest(learning_rate=2e-4, max_grad_norm=1.0)

    only = model.forward([datum([5, 6])], "cross_entropy").result(timeout=60)
    assert len(only.loss_fn_outputs) == 1
    assert spool.requests.get(run, 3).request.kind == "forward"

    saved = model.save_state("first").result(timeout=60)
    assert saved.path == f"tinker://{model.model_id}/weights/first"
    serve_in(vllm, spool, run, 2)
    path = model.save_weights_for_sampler("sampler").result(timeout=60).path
    assert path == f"tinker://{model.model_id}/sampler_weights/sampler"
    sampler = client.create_sampling_client(model_path=path).result()
    found = sampler.sample(
        types.ModelInput.from_ints([5, 6]), 2, types.SamplingParams(max_tokens=3, stop=[8])
    ).result(timeout=60)
    assert [one.tokens for one in found.sequences] == [[7, 8]] * 2
    assert [one.logprobs for one in found.sequences] == [[-1.0, -1.0]] * 2
    assert {one.stop_reason for one in found.sequences} == {"stop"}
    assert len({one.sequence_id for one in found.sequences}) == 2
    assert vllm.calls[-1][1]["model"] == f"{run}@2"


def test_a_snapshot_is_sampled_from(
    spool: Spool, vllm: FakeVllm, model: tinker.TrainingClient
) -> None:
    serve_in(vllm, spool, run_of(model), 1)
    sampler = model.save_weights_and_get_sampling_client().result()
    found = sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7])).result(timeout=60)
    assert found[0] is None
    assert all(value < 0 for value in found[1:])
    assert vllm.calls[-1][1]["model"] == f"{run_of(model)}@1"


def test_a_step_that_vllm_does_not_have_is_asked_for(
    client: tinker.ServiceClient, spool: Spool, vllm: FakeVllm, model: tinker.TrainingClient
) -> None:
    run = run_of(model)
    path = model.save_weights_for_sampler("old").result(timeout=60).path
    sampler = client.create_sampling_client(model_path=path).result()
    pending = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
    until("it is asked for", lambda: spool.served.wanted(run) == [1])
    serve_in(vllm, spool, run, 1)
    assert pending.result(timeout=60).sequences[0].tokens == [2]


def test_snapshots_are_forgotten_that_nobody_samples(
    spool: Spool, vllm: FakeVllm, model: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(model)
    model.save_weights_for_sampler("kept").result(timeout=60)
    serve_in(vllm, spool, run, 2)
    sampler = model.save_weights_and_get_sampling_client().result()
    futures.forget_snapshots(spool)
    assert [one.name[0] for one in spool.names.list(run)] == ["k", futures.SNAPSHOT]
    assert spool.checkpoints.pinned(run) == [1, 2]
    monkeypatch.setattr(futures, "SNAPSHOT_SECONDS", 0.0)
    futures.forget_snapshots(spool)
    assert spool.checkpoints.pinned(run) == [1]
    with refused(404, "no checkpoint"):
        sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams()).result(60)


def test_what_is_asked_of_vllm(client: tinker.ServiceClient, vllm: FakeVllm) -> None:
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    prompt = types.ModelInput.from_ints([1, 2, 3])
    asked = types.SamplingParams(
        max_tokens=2, seed=5, stop=["a"], temperature=0.5, top_k=7, top_p=0.9
    )
    found = sampler.sample(
        prompt,
        1,
        asked,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        prompt_logprobs_last_n=1,
    ).result(timeout=60)
    body = vllm.calls[-1][1]
    assert {name: body[name] for name in ("model", "n", "seed", "stop", "top_k", "top_p")} == {
        "model": "base",
        "n": 1,
        "seed": 5,
        "stop": ["a"],
        "top_k": 7,
        "top_p": 0.9,
    }
    assert (body["temperature"], body["logprobs"], body["prompt_logprobs"]) == (0.5, 3, 2)
    assert found.prompt_logprobs is not None
    assert [value is None for value in found.prompt_logprobs] == [True, True, False]
    assert found.topk_prompt_logprobs is not None
    assert found.topk_prompt_logprobs[:2] == [None, None]
    assert [token for token, _ in found.topk_prompt_logprobs[2] or ()] == [3, 4]
    first, second = [(4, -1.0), (5, -2.0), (6, -3.0)], [(5, -1.0), (6, -2.0), (7, -3.0)]
    assert found.sequences[0].topk_logprobs == [first, second]
    # Without a limit the sample fills the rest of the context, because no stop token ends it.
    sampler.sample(prompt, 1, types.SamplingParams(stop=[])).result(timeout=60)
    body = vllm.calls[-1][1]
    assert (body["max_tokens"], body["ignore_eos"]) == (vllm.max_model_len - 3, True)


def test_a_model_begins_from_a_checkpoint(
    client: tinker.ServiceClient, spool: Spool, model: tinker.TrainingClient
) -> None:
    path = model.save_state("here").result(timeout=60).path
    for make, optimizer in (
        (client.create_training_client_from_state, False),
        (client.create_training_client_from_state_with_optimizer, True),
    ):
        other = make(path).result()
        run = run_of(other)
        load = spool.requests.get(run, 1).request
        assert (load.kind, load.run, load.step) == ("load", run_of(model), 1)
        assert load.optimizer is optimizer
        assert spool.runs.get(run).lora == spool.runs.get(run_of(model)).lora
        # Request 1 of the run loads the weights, so the client's first request becomes request 2.
        other.forward_backward([datum([1, 2])], "cross_entropy").result(timeout=60)
        assert spool.requests.get(run, 2).request.kind == "forward_backward"
    with refused(404, "no checkpoint"):
        client.create_training_client_from_state(f"{path}-else").result()


def test_large_data_go_in_parts_side_by_side(spool: Spool, model: tinker.TrainingClient) -> None:
    """The client sends the first part of large data last, and the ranks wait for this part."""
    data = [datum([1, 2, 3]) for _ in range(2500)]
    result = model.forward_backward(data, "cross_entropy").result(timeout=120)
    assert len(result.loss_fn_outputs) == 2500
    assert spool.requests.last(run_of(model)) == 3


def test_a_custom_loss_is_computed_by_the_client(
    spool: Spool, model: tinker.TrainingClient
) -> None:
    def loss(data, logprobs):
        total = sum((one * one).sum() for one in logprobs)
        return total, {"mine": 1.0}

    result = model.forward_backward_custom([datum([1, 2, 3])], loss).result(timeout=60)
    assert result.metrics["loss:sum"] == 1.0
    kinds = [spool.requests.get(run_of(model), seq).request.kind for seq in (1, 2)]
    assert kinds == ["forward", "forward_backward"]


def test_a_created_custom_loss_is_computed_by_the_client(
    client: tinker.ServiceClient, spool: Spool, model: tinker.TrainingClient
) -> None:
    """The client sends the gradients of its own loss as the weights of a cross-entropy loss."""

    def mine(logprobs, advantages):
        loss = (advantages * logprobs * logprobs).sum()
        return loss, {"custom/mine:sum": 2 * loss}

    ranks = {"logprobs": 1, "advantages": 1}
    handle = client.create_custom_loss(mine, input_ranks=ranks).result(timeout=60)
    data = [datum([1, 2, 3, 4], advantages=[1.0, 0.5, -3.0])]
    found = model.forward_backward_custom(data, handle).result(timeout=60)
    # The log-probs of `PlayedRanks` are 0, -1, -2.
    assert found.metrics["loss:sum"] == 0.5 - 3.0 * 4
    assert found.metrics["custom/mine:sum"] == 2 * (0.5 - 3.0 * 4)
    sent = spool.requests.get(run_of(model), 2)
    assert isinstance(sent.request, PassRequest)
    assert sent.request.loss_name == "cross_entropy"
    with PackedBatch.open(spool.requests.data_dir(run_of(model), 2), sent.sha256) as batch:
        weights = batch.row(0).item_weight
    assert weights.tolist() == [0.0, 1.0, -12.0]  # each weight is -2 * advantage * log-prob


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_losses_of_samples(spool: Spool, model: tinker.TrainingClient, name: str) -> None:
    one = datum([1, 2, 3], logprobs=[-1.0, -2.0], advantages=[0.5, -0.5])
    if name == "gspo":
        with refused(422, "data.0.loss_fn_inputs.sequence_ratio_mask"):
            model.forward_backward([one], name).result(timeout=60)
        one.loss_fn_inputs["sequence_ratio_mask"] = types.TensorData(data=[0, 1], dtype="int64")
    config = {"beta": 0.1} if name == "dro" else None
    model.forward_backward([one], name, config).result(timeout=60)
    run = run_of(model)
    logged = spool.requests.get(run, spool.requests.last(run)).request
    assert isinstance(logged, PassRequest)
    assert (logged.loss_name, logged.loss.normalisation) == (name, "sum")


def test_a_refused_request_leaves_no_gap(spool: Spool, model: tinker.TrainingClient) -> None:
    with refused(422, "stable_reinforce is not served"):
        model.forward_backward([datum([1, 2])], "stable_reinforce").result(timeout=60)
    with refused(422, "data.0.targets"):
        model.forward_backward([datum([1, 10**6])], "cross_entropy").result(timeout=60)
    with refused(422, "optimizer_params.type"):
        model.optim_step(types.DimuonParams(learning_rate=1.0)).result(timeout=60)
    assert isinstance(spool.requests.get(run_of(model), 3).request, VoidRequest)
    model.forward_backward([datum([1, 2])], "cross_entropy").result(timeout=60)


def test_failures_of_the_ranks_are_told(ranks: PlayedRanks, model: tinker.TrainingClient) -> None:
    ranks.problem = RequestError(category="server", message="out of memory")
    with pytest.raises(tinker.RequestFailedError, match="out of memory") as caught:
        model.optim_step(types.AdamParams()).result(timeout=60)
    assert caught.value.category is types.RequestErrorCategory.Server


def test_a_step_that_vllm_refuses_is_told(
    spool: Spool, ranks: PlayedRanks, model: tinker.TrainingClient
) -> None:
    ranks.serves = False
    saving = model.save_weights_for_sampler("x")
    run = run_of(model)
    until("it is saved", lambda: spool.checkpoints.newest(run) == 1)
    time.sleep(0.3)
    assert not saving.future().done()  # vLLM has not loaded the step
    serve(spool, run, 0, refused_step=1, refused_reason="its log-probs differ")
    with pytest.raises(tinker.RequestFailedError, match="its log-probs differ"):
        saving.result(timeout=60)
    ranks.serves = True


def test_the_controller_dies_while_a_client_waits(
    process: Process, spool: Spool, ranks: PlayedRanks, model: tinker.TrainingClient
) -> None:
    ranks.held.set()
    step = model.forward_backward([datum([1, 2])], "cross_entropy")
    until("it is logged", lambda: spool.requests.last(run_of(model)) == 1)
    process.kill_and_restart()
    ranks.held.clear()
    assert len(step.result(timeout=120).loss_fn_outputs) == 1
    assert spool.requests.last(run_of(model)) == 1


@pytest.mark.slow
def test_a_sample_is_sent_again_after_the_controllers_death(
    process: Process, client: tinker.ServiceClient, vllm: FakeVllm
) -> None:
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    vllm.statuses["/v1/completions"] = [503] * 3
    pending = sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
    until("vLLM was asked", lambda: len(vllm.statuses["/v1/completions"]) < 3)
    process.kill_and_restart()
    assert pending.result(timeout=120).sequences[0].tokens == [2]


def post(process: Process, route: str, body: dict, key: str | None = TINKER_KEY) -> httpx.Response:
    headers = {"X-API-Key": key} if key else {}
    return httpx.post(
        f"{process.url}/api/v1/{route}", json=body, headers=headers, timeout=60, trust_env=False
    )


def test_a_repeated_request_is_the_same_one(
    process: Process, spool: Spool, model: tinker.TrainingClient
) -> None:
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    first, second = (post(process, "optim_step", body) for _ in range(2))
    assert (
        first.json()
        == second.json()
        == {"request_id": f"{model.model_id}:1", "model_id": model.model_id}
    )
    other = body | {"adam_params": {"learning_rate": 2e-4}}
    # After status 409 the package would repeat the request for five minutes.
    assert post(process, "optim_step", other).status_code == 400
    save = {"model_id": model.model_id, "seq_id": 2, "path": "a"}
    assert [post(process, "save_weights", save).status_code for _ in range(2)] == [200, 200]
    until("it is saved", lambda: spool.names.list(run_of(model)))
    assert post(process, "save_weights", save).status_code == 200
    again = post(process, "save_weights", save | {"seq_id": 3})
    assert again.status_code == 422
    assert "choose another name" in again.json()["error"]["message"]
    allowed = post(process, "save_weights", save | {"seq_id": 4, "overwrite": True})
    assert allowed.status_code == 200


def test_a_request_that_never_comes_is_given_up(
    root: Path, spool: Spool, vllm: FakeVllm, model: tinker.TrainingClient, process: Process
) -> None:
    run = run_of(model)
    for seq in (3, 4):
        body = {"model_id": model.model_id, "seq_id": seq, "adam_params": {}}
        assert post(process, "optim_step", body).status_code == 200
    for seq in (3, 4):  # the requests get a creation time 61 s ago
        logged = spool.requests.get(run, seq)
        path = spool.requests.data_dir(run, seq) / "request.json"
        path.write_text(logged.model_copy(update={"created": time.time() - 61}).model_dump_json())
    retrieve = {"request_id": f"{model.model_id}:4"}
    assert "metrics" in post(process, "retrieve_future", retrieve).json()
    gaps = [spool.requests.get(run, seq).request for seq in (1, 2)]
    assert all(isinstance(one, VoidRequest) for one in gaps)
    told = post(process, "retrieve_future", {"request_id": f"{model.model_id}:1"}).json()
    assert told["category"] == "user"
    assert "never came" in told["error"]


def test_a_request_that_waits_for_another_job_says_so(
    spool: Spool, ranks: PlayedRanks, model: tinker.TrainingClient, process: Process
) -> None:
    ranks.held.set()
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {}}
    assert post(process, "optim_step", body).status_code == 200
    deployment = SimpleNamespace(spool=spool)
    looking = futures.Futures(deployment, Numbers(deployment))
    name = model_of(str(model.model_id))
    assert looking.look(name, 1) == futures.Unfinished("")
    with httpx.Client(base_url=process.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        http.post("/v1/runs", json={"name": "another", "lora": {"rank": 2}}).raise_for_status()
        http.post("/v1/runs/another/train", json=sft_request()).raise_for_status()
    job = claim(spool)
    assert looking.look(name, 1) == futures.Unfinished("another job has the trainer")
    fail(spool, job)
    ranks.held.clear()


def test_only_the_deployments_keys_open_it(process: Process) -> None:
    for key in (None, "tml-else", "tml-"):
        answer = post(process, "create_session", {}, key=key)
        assert answer.status_code == 401, key
    assert post(process, "create_session", {}, key=KEY).status_code == 200
    with httpx.Client(base_url=process.url, trust_env=False) as http:
        # Only Tinker's API uses the header X-API-Key.
        assert http.get("/v1/runs", headers={"X-API-Key": TINKER_KEY}).status_code == 401


def test_a_session_ends(process: Process, spool: Spool, ranks: PlayedRanks) -> None:
    with service(process.url) as client:
        model = client.create_lora_training_client(base_model=BASE_MODEL, rank=4).result()
        session = str(model.model_id).partition(":")[0]
        assert spool.sessions.ended(session) is None
    assert spool.sessions.ended(session) is not None
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {}}
    refusal = post(process, "optim_step", body)
    assert refusal.status_code == 400
    assert "has ended" in refusal.json()["error"]["message"]
    assert post(process, "session_heartbeat", {"session_id": session}).status_code == 410
    assert post(process, "session_heartbeat", {"session_id": "0" * 26}).status_code == 404


def test_listings(process: Process, client: tinker.ServiceClient, model: tinker.TrainingClient):
    path = model.save_state("listed").result(timeout=60).path
    rest = tinker.RestClient(base_url=process.url, api_key=TINKER_KEY)
    (supported,) = rest.get_server_capabilities().result().supported_models
    assert (supported.model_name, supported.trainable) == (BASE_MODEL, True)
    runs = rest.list_training_runs().result()
    assert model.model_id in [one.training_run_id for one in runs.training_runs]
    assert runs.cursor.total_count >= len(runs.training_runs)
    one = rest.get_training_run(model.model_id).result()
    assert one.last_checkpoint is not None
    assert one.last_checkpoint.tinker_path == path
    (checkpoint,) = rest.list_checkpoints(model.model_id).result().checkpoints
    assert checkpoint.checkpoint_id == "weights/listed"
    assert path in [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    weights = rest.get_weights_info_by_tinker_path(path).result()
    assert (weights.lora_rank, weights.train_unembed, weights.train_mlp) == (4, False, True)
    rest.delete_checkpoint(model.model_id, "weights/listed").result()
    assert rest.list_checkpoints(model.model_id).result().checkpoints == []
    with refused(404, "there is no checkpoint"):
        rest.delete_checkpoint(model.model_id, "weights/listed").result()
    with refused(404, "is not served"):
        rest.publish_checkpoint_from_tinker_path(path).result()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ({"base_model": "Qwen/Qwen3-8B"}, "supported_models"),
        ({"rank": 128}, "TANDEM_MAX_LORA_RANK"),
        ({"train_mlp": False, "train_attn": False}, "no layer is left"),
        ({"optimizer": types.DimuonOptimizerConfig()}, "AdamW is the only optimizer"),
    ],
)
def test_models_that_are_not_made(client: tinker.ServiceClient, make: dict, words: str) -> None:
    arguments = {"base_model": BASE_MODEL, "rank": 4} | make
    with refused(422, words):
        client.create_lora_training_client(**arguments).result()


def test_samples_that_are_not_drawn(client: tinker.ServiceClient, vllm: FakeVllm) -> None:
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    prompt, one = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=1)
    with refused(422, "vLLM draws no tokens within a prompt"):
        sampler.sample(prompt, 1, one, prompt_alt_tokens_k=1).result(timeout=60)
    target = types.TensorData(data=[1], dtype="int64", shape=[1, 1])
    with refused(422, "target_prompt_logprobs"):
        sampler.sample(prompt, 1, one, target_prompt_logprobs=target).result(timeout=60)
    long = types.SamplingParams(max_tokens=vllm.max_model_len)
    with pytest.raises(tinker.RequestFailedError, match="the prompt is too long") as caught:
        sampler.sample(prompt, 1, long).result(timeout=60)
    assert caught.value.category is types.RequestErrorCategory.User
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    with refused(422, "only text"):
        sampler.sample(image, 1, one).result(timeout=60)


def routes_of_the_package() -> set[tuple[str, str]]:
    """`(method, path)` of every request in the sources of Tinker's package."""
    found, texts = set(), set()
    for source in Path(tinker.__file__).parent.rglob("*.py"):
        if source.name.endswith("_test.py"):
            continue
        text = source.read_text()
        texts |= set(re.findall(r'"/api/v1/([^"]*)"', text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                given = [ast.unparse(value) for value in node.args]
                paths = [re.findall("/api/v1/([^'\"]*)", value) for value in given]
                method = node.func.attr.strip("_").upper()
                method = given[0].strip("'") if method == "REQUEST" and given else method
                if method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                    found |= {(method, path) for one in paths for path in one}
    assert {path for _, path in found} == texts
    return found


def test_every_route_of_the_package_is_served_or_refused_in_words(process: Process) -> None:
    """If a new version of the package has a new route, the document or the list of refusals must
    contain it."""
    found = routes_of_the_package()
    assert len(found) >= 46
    document = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    told = set(re.findall(r"[`/]([a-z_]+)", document.split("## Routes")[1]))
    with httpx.Client(
        base_url=f"{process.url}/api/v1/", headers={"X-API-Key": TINKER_KEY}, trust_env=False
    ) as http:
        for method, route in found:
            assert route.partition("/")[0] in told, route
            path = re.sub(r"\{[^}]*\}", "x", route.replace("{checkpoint_id}", "weights/x"))
            answer = http.request(method, path, json={})
            assert answer.status_code in (200, 400, 404, 422), (method, path)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"], (method, path)
                assert "lists what is" not in error["message"], (method, path)
                assert error["type"] != "not_found" or "{" in route, (method, path)


@pytest.mark.slow
def test_a_cancelled_sample_is_given_up(client: tinker.ServiceClient, vllm: FakeVllm) -> None:
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
    vllm.statuses["/v1/completions"] = [503] * 1000

    async def give_up() -> None:
        waiting = sampler.sample(
            types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)
        )
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiting.result_async(), 2)

    asyncio.run(give_up())
    asked = len(vllm.calls)
    until("nobody asks vLLM", lambda: _quiet(vllm), poll=0.1)
    assert len(vllm.calls) - asked < 100
    vllm.statuses.clear()


def _quiet(vllm: FakeVllm) -> bool:
    before = len(vllm.calls)
    time.sleep(2.5)
    return len(vllm.calls) == before
