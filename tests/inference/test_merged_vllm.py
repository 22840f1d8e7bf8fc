"""The real vLLM on the CPU with merged weights. The tests check what vLLM serves and refuses, and
the effect of a swap on requests."""

import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import tiny_model

from inference.stage import commit, make_run
from inference.test_real_vllm import SEQUENCES, Trainer, distance
from inference.vllm_server import ADMIN_TOKEN, API_KEY, VllmServer
from tandem.config import Settings
from tandem.data.inputs import Trajectory, policy_step_of, turn_from_openai
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.spot_check import SpotCheck
from tandem.metrics.policy import PARTS
from tandem.spool.removal import delete_run
from tandem.spool.schema import LoraShape
from tandem.vllm_client.client import VllmClient
from tiny import write_random_model
from waiting import until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.one_of("vllm"),
]

EVERYWHERE = LoraShape(rank=4, alpha=10.0)
API = {"Authorization": f"Bearer {API_KEY}"}
names = (f"merged-{i}" for i in itertools.count())


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2"])
def vllm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server of a mixture of experts, and a server of a dense model with biases and tied
    embeddings."""
    directory = tmp_path_factory.mktemp("merged")
    tiny_model.write_tokenizer(directory / "model")
    sizes: dict[str, Any] = {
        "tie_word_embeddings": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    if request.param == "qwen3_moe":
        sizes = {"moe_intermediate_size": 32}
    write_random_model(
        directory / "model",
        family=request.param,
        vocab_size=320,
        hidden_size=64,
        head_dim=32,
        max_position_embeddings=4096,
        **sizes,
    )
    with VllmServer(
        directory, directory / "model", TANDEM_WEIGHTS="merged", TANDEM_EXPERT_LORA="1"
    ) as server:
        yield server


@pytest.fixture
def client(vllm: VllmServer) -> VllmClient:
    return vllm.client()


class MergedTrainer(Trainer):
    """The trainer of one run with merged weights. The run's adapters are on every linear layer."""

    def __init__(self, vllm: VllmServer, directory: Path, **settings: Any) -> None:
        super().__init__(vllm, directory)
        self.client = vllm.client()
        self.run = make_run(self.spool, next(names), self.model, EVERYWHERE).name
        path = self.spool.root / "runs" / self.run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": "merged"}))
        self.settings = Settings(
            root=self.spool.root,
            inference_url=vllm.url,
            base_model=str(self.model),
            device="cpu",
            weights="merged",
            **settings,
        )
        self._publisher = Publisher(self.settings, self.client, grace=0.5)
        self.adapters = [self.adapter(0, 0.0, EVERYWHERE)]

    def step(self, seed: int, *, probe_of: int | None = None) -> Path:
        """Commit a checkpoint with the random adapter of `seed`. The checkpoint's probe has the
        log-probs of this adapter. If `probe_of` is given, the probe has the log-probs of the
        adapter of seed `probe_of`."""
        adapter = self.adapter(seed, lora=EVERYWHERE)
        told = adapter if probe_of is None else self.adapter(probe_of, lora=EVERYWHERE)
        commit(self.spool, self.run, adapter, self.probe(told, lora=EVERYWHERE))
        self.adapters.append(adapter)
        return adapter

    def publisher_environment(self, vllm: VllmServer, directory: Path) -> dict[str, str]:
        """The environment of a publisher in a process of its own. `directory` is the directory of
        the publisher's temporary files."""
        return os.environ | {
            "TANDEM_ROOT": str(self.spool.root),
            "TANDEM_INFERENCE_URL": vllm.url,
            "TANDEM_WEIGHTS": "merged",
            "TANDEM_TRANSPORT": self.settings.transport,
            "TANDEM_BASE_MODEL": str(vllm.model),
            "TANDEM_DEVICE": "cpu",
            "TANDEM_API_KEY": API_KEY,
            "TANDEM_ADMIN_TOKEN": ADMIN_TOKEN,
            "TMPDIR": str(directory),
        }

    def check_bits(self, adapter: Path) -> None:
        """Random rows of every adapted tensor in vLLM equal the merge in float64, rounded once."""
        check = SpotCheck(str(self.model), "float32")
        for _ in range(20):
            expected = check.adapter_rows(adapter, EVERYWHERE)
            assert expected.wrong(self.client.merged_rows(expected.rows)) == ""


@pytest.fixture
def trainer(
    vllm: VllmServer, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MergedTrainer:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return MergedTrainer(vllm, tmp_path)


def complete(
    vllm: VllmServer, model: str, tokens: Sequence[int] = (5, 6, 7), **options: Any
) -> httpx.Response:
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
        **options,
    }
    return httpx.post(f"{vllm.url}/v1/completions", headers=API, json=body, timeout=120)


def stream(vllm: VllmServer, model: str, tokens: Sequence[int], begun: Event) -> str:
    """Requests a stream of 1500 tokens, and sets `begun` at the first token. Returns all events."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 1500,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    lines = list[str]()
    url = f"{vllm.url}/v1/completions"
    with httpx.stream(
        "POST", url, headers=API, json=body | {"stream": True}, timeout=120
    ) as response:
        for line in response.iter_lines():
            begun.set()
            lines.append(line)
    return "\n".join(lines)


def before_the_swap(
    monkeypatch: pytest.MonkeyPatch, client: VllmClient, ask: Callable[[], None]
) -> None:
    """The publisher calls `ask` immediately before it orders the swap. Requests that are started
    earlier can end while the publisher prepares the swap on a busy machine."""
    swap = client.swap_merged

    def ask_and_swap(*arguments: Any, **options: Any) -> dict[str, Any]:
        ask()
        return swap(*arguments, **options)

    monkeypatch.setattr(client, "swap_merged", ask_and_swap)


def check_session(vllm: VllmServer, body: dict[str, Any], model: str) -> None:
    """In each API, the next turn of a session continues the sampled tokens of the first turn, and
    has log-probs."""
    url, messages = f"{vllm.url}/rollout", [{"role": "user", "content": "?"}]
    headers, more = API | {"X-Session-ID": "real"}, {"role": "user", "content": "more"}
    ask = {**body, "logprobs": False}
    for stream in (False, True):
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            headers=headers,
            json={**ask, "messages": messages, "stream": stream},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        if not stream:
            messages += [answer.json()["choices"][0]["message"], more]
    answer = httpx.post(
        f"{url}/v1/messages",
        headers=headers,
        json={"model": body["model"], "messages": messages, "max_tokens": 3},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    asked = {"model": body["model"], "input": messages, "max_output_tokens": 3}
    answer = httpx.post(f"{url}/v1/responses", headers=headers, json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    made = httpx.post(f"{url}/sessions/real/finish", headers=API, json={"reward": 1}).json()
    first, *others = Trajectory.model_validate(made).turns
    begin = first.prompt_token_ids + first.token_ids
    assert len(others) == 3
    for turn in others:
        assert turn.prompt_token_ids[: len(begin)] == begin
        assert turn.prompt_token_ids == others[0].prompt_token_ids
        assert len(turn.logprobs) == len(turn.token_ids) > 0
        assert turn.policy_step == policy_step_of(model)


def test_a_choice_that_came_through_the_rollout_door_is_a_turn(
    vllm: VllmServer, trainer: MergedTrainer
) -> None:
    trainer.step(1)
    served = trainer.publish(trainer.run)
    body = {
        "model": trainer.run,
        "messages": [{"role": "user", "content": "?"}],
        "max_tokens": 3,
    }
    answer = httpx.post(
        f"{vllm.url}/rollout/v1/chat/completions", headers=API, json=body, timeout=120
    ).json()
    turn = turn_from_openai(answer["choices"][0])
    assert answer["choices"][0]["model"] == served.model
    assert 1 <= len(turn.logprobs) <= 3
    check_session(vllm, body, served.model)
    generate = {
        "model": trainer.run,
        "token_ids": turn.prompt_token_ids,
        "sampling_params": {"max_tokens": 3, "temperature": 0.0, "logprobs": 1},
    }
    answer = httpx.post(
        f"{vllm.url}/inference/v1/generate", headers=API, json=generate, timeout=120
    )
    assert answer.headers["x-tandem-weights"] == served.model
    assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 3


def test_a_deleted_run_is_served_no_more_and_makes_room_for_another(
    vllm: VllmServer, trainer: MergedTrainer, client: VllmClient, tmp_path: Path
) -> None:
    trainer.step(1)
    served = trainer.publish(trainer.run)
    assert complete(vllm, served.model).status_code == 200
    shutil.rmtree(delete_run(trainer.spool, trainer.run))
    trainer._publisher.once()
    assert (client.merged()["phase"], client.merged()["path"]) == ("empty", "base")
    assert complete(vllm, served.model).status_code == 503
    trainer._publisher.once()
    another = MergedTrainer(vllm, tmp_path)
    adapter = another.step(2)
    assert complete(vllm, another.publish(another.run).model).status_code == 200
    another.check_bits(adapter)


def test_one_name_serves_each_step_bit_by_bit(
    vllm: VllmServer, trainer: MergedTrainer, client: VllmClient
) -> None:
    if client.merged()["phase"] == "empty":
        assert complete(vllm, "base").status_code == 503, "nothing was verified yet"
    assert "the second copy is on the device (auto)" in vllm.log.read_text()
    first = trainer.publish(trainer.run)
    assert (first.step, first.weights, first.transport) == (0, "merged", "merge")
    assert distance(client.prompt_logprobs(first.model, *SEQUENCES), trainer.base) < 1e-4
    for step in (1, 2):
        adapter = trainer.step(step)
        served = trainer.publish(trainer.run)
        assert (served.step, served.refused_step) == (step, None)
        assert served.seconds.keys() == set(PARTS)
        assert (
            sum(served.seconds[part] for part in ("stage", "drain", "swap"))
            < served.seconds["load"]
        )
        assert served.mean_abs_logprob_error < 1e-4
        trainer.check_bits(adapter)
        answer = complete(vllm, served.model)
        assert answer.headers["x-tandem-weights"] == answer.json()["model"] == served.model
        assert complete(vllm, trainer.run).json()["choices"] == answer.json()["choices"]
        assert complete(vllm, f"{trainer.run}@{step - 1}").status_code == 404
        assert complete(vllm, "base").status_code == 404
    trainer.step(3, probe_of=4)
    served = trainer.publish(trainer.run)
    assert (served.step, served.refused_step) == (2, 3)
    assert "differ from the trainer's" in str(served.refused_reason)
    trainer.check_bits(adapter)
    assert complete(vllm, f"{trainer.run}@2").headers["x-tandem-weights"] == f"{trainer.run}@2"
    for number in range(100):
        path, scale = trainer.adapters[number % 3], 2.5
        client.swap_merged(f"{trainer.run}@{number}", str(path), scale, "keep", 60)
    trainer.check_bits(path)
    trainer.spool.checkpoints.rollback(trainer.run, 0)
    assert trainer.publish(trainer.run).step == 0
    assert distance(client.prompt_logprobs(first.model, *SEQUENCES), trainer.base) < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("requests", ["keep", "wait"])
def test_requests_that_run_during_a_swap(
    vllm: VllmServer,
    trainer: MergedTrainer,
    client: VllmClient,
    requests: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer._publisher = Publisher(
        trainer.settings.model_copy(update={"swap_requests": requests}), client, grace=0.5
    )
    trainer.step(1)
    trainer.publish(trainer.run)
    trainer.step(2)
    prompt = SEQUENCES[1]
    undisturbed = complete(
        vllm, trainer.run, prompt, max_tokens=1500, return_token_ids=True
    ).json()["choices"][0]
    with ThreadPoolExecutor(2) as pool:
        streamed, running = list[Future[str]](), list[Future[httpx.Response]]()

        def ask() -> None:
            begun = Event()
            streamed.append(pool.submit(stream, vllm, trainer.run, prompt, begun))
            assert begun.wait(120)
            running.append(
                pool.submit(
                    complete, vllm, trainer.run, prompt, max_tokens=1500, return_token_ids=True
                )
            )
            until("both run", lambda: client.merged()["in_flight"] == 2)

        before_the_swap(monkeypatch, client, ask)
        assert trainer.publish(trainer.run).step == 2
        text, answer = streamed[0].result(), running[0].result()
    body, tokens = answer.json(), answer.json()["choices"][0]["token_ids"]
    first, second = f"{trainer.run}@1", f"{trainer.run}@2"
    if requests == "wait":
        assert "weight_versions" not in body
        assert "weight_versions" not in text
        assert answer.headers["x-tandem-weights"] == first
        assert tokens == undisturbed["token_ids"]
        return
    assert answer.headers["x-tandem-weights"] == f"{first},{second}"
    [sequence] = body["weight_versions"]
    assert (sequence["prompt"], sequence["sample"]) == (0, 0)
    (old, begin), (new, change) = sequence["spans"]
    assert (old, begin, new) == (first, 0, second)
    assert 0 < change < 1500
    assert tokens[:change] == undisturbed["token_ids"][:change]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [
        event["weight_versions"][0]["spans"][1][0] for event in events if "weight_versions" in event
    ] == [second]


def test_every_sequence_of_a_request_tells_its_versions(
    vllm: VllmServer, trainer: MergedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests have several prompts, several samples or chat messages. Each request's id has
    the form of vLLM's own ids of sequences."""
    trainer.step(1)
    trainer.publish(trainer.run)
    trainer.step(2)
    body = {
        "model": trainer.run,
        "max_tokens": 2000,
        "temperature": 1.0,
        "ignore_eos": True,
        "n": 2,
    }
    headers = API | {"x-request-id": "run-7-12345678"}
    prompts = {"prompt": [[5, 6, 7], [8, 9]]}
    messages = {"messages": [{"role": "user", "content": "yes"}]}
    with ThreadPoolExecutor(2) as pool:
        futures = []

        def ask() -> None:
            futures.extend(
                pool.submit(
                    httpx.post,
                    f"{vllm.url}/v1/{path}",
                    headers=headers,
                    json=body | what,
                    timeout=200,
                )
                for path, what in (("completions", prompts), ("chat/completions", messages))
            )
            metrics = f"{vllm.url}/metrics"
            running = re.compile(r"^vllm:num_requests_running{.*} 6", re.MULTILINE)
            until("all six sequences run", lambda: running.search(httpx.get(metrics).text))
            time.sleep(0.5)

        before_the_swap(monkeypatch, trainer.client, ask)
        assert trainer.publish(trainer.run).step == 2
        several, chat = futures
    for request, expected in (
        (several, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (chat, [(0, 0), (0, 1)]),
    ):
        answer = request.result()
        assert answer.headers["x-tandem-weights"] == f"{trainer.run}@1,{trainer.run}@2"
        told = answer.json()["weight_versions"]
        assert [(entry["prompt"], entry["sample"]) for entry in told] == expected
        assert all(0 < entry["spans"][1][1] < 2000 for entry in told)


def test_a_prefix_that_other_weights_computed_is_not_used(
    vllm: VllmServer, trainer: MergedTrainer
) -> None:
    for seed in (1, 2):
        adapter = trainer.step(seed)
        trainer.check_cached_prefix(vllm, trainer.publish(trainer.run).model, adapter, EVERYWHERE)
