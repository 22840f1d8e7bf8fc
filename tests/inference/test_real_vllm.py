"""The real vLLM on the CPU serves a mixture of experts. The tests check the guard, the client, the
retention of steps, and the served weights.

All tests share one server, so each test gives its runs names of its own. Tests in tests/stack serve
dense models.
"""

import itertools
import json
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
import tiny_model
from safetensors.torch import load_file, save_file

from inference.stage import commit, make_run, write_identity
from inference.vllm_server import ADMIN_TOKEN, API_KEY, VllmServer
from policies import linear_row, make_policy, write_random_adapter
from tandem.config import Settings
from tandem.errors import Unauthorized
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.usage import Retention
from tandem.inference.server.middleware.guard import API_KEY_PATHS
from tandem.spool import Spool
from tandem.spool.schema import LoraShape, Probe, Served
from tandem.supervise.watchdog import parse
from tandem.vllm_client.client import InferenceRefused, InferenceUnavailable, VllmClient
from tandem.vllm_client.names import ADMIN_HEADER, PUBLIC_PATHS
from tiny import write_random_model
from waiting import until

pytestmark = [pytest.mark.sample(1, of="vLLM and whole stacks"), pytest.mark.slow]

API = {"Authorization": f"Bearer {API_KEY}"}
ATTENTION = LoraShape(rank=4, alpha=10.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
EVERYWHERE = LoraShape(rank=4, alpha=10.0)
SEQUENCES = [np.random.default_rng(5).integers(0, 256, size).tolist() for size in (150, 33, 64)]
names = (f"real-{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("vllm")
    tiny_model.write_tokenizer(directory / "model")
    write_random_model(
        directory / "model",
        family="qwen3_moe",
        vocab_size=320,
        hidden_size=64,
        head_dim=32,
        moe_intermediate_size=32,
        max_position_embeddings=4096,
    )
    with VllmServer(directory, directory / "model") as server:
        yield server


@pytest.fixture
def client(vllm: VllmServer) -> VllmClient:
    return vllm.client()


@pytest.fixture
def identity(vllm: VllmServer, tmp_path: Path) -> Path:
    write_identity(tmp_path, vllm.model, ATTENTION)
    return tmp_path


def test_the_guard_closes_every_route_of_the_app(vllm: VllmServer) -> None:
    routes = re.findall(r"Route: (\S+), Methods: (.+)", vllm.log.read_text())
    paths = {re.sub(r"\{[^}]*\}", "x", path) for path, _ in routes}
    # The comparison with these routes fails if vLLM prints its routes in another form.
    known = [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/adapters",
        "/pause",
        "/sleep",
        "/update_weights",
    ]
    assert {
        *known,
        "/collective_rpc",
        "/reset_prefix_cache",
        "/v1/models",
        "/v1/chat/completions",
    } <= paths
    assert len(paths) > 40
    with httpx.Client(base_url=vllm.url, timeout=60) as http:
        for path in sorted(paths - PUBLIC_PATHS - API_KEY_PATHS):
            around = (
                f"/{path}",
                f"{path}/",
                path.upper(),
                f"/health/..{path}",
                f"/v1/models/../..{path}",
            )
            for spelling in (path, *around):
                for method in ("GET", "POST", "DELETE", "OPTIONS"):
                    # httpx would normalise the path of a URL that is a string.
                    url = httpx.URL(vllm.url).copy_with(raw_path=spelling.encode())
                    assert http.request(method, url, headers=API).status_code == 401, (
                        method,
                        spelling,
                    )
        for path in ("/is_paused", "/is_sleeping", "/get_world_size"):
            assert http.get(path, headers={**API, ADMIN_HEADER: ADMIN_TOKEN}).status_code == 200, (
                path
            )
        for path in ("/health", "/version", "/metrics"):
            assert http.get(path).status_code == 200, path
        # vLLM checks the API key on routes below /v1. The guard checks the API key on the two
        # routes that vLLM leaves open.
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=API).status_code == 200
        body = {"model": "base", "prompt": "yes"}
        assert http.post("/tokenize", json=body).status_code == 401
        assert http.post("/tokenize", json=body, headers=API).json()["tokens"] == [88, 68, 82]


@pytest.mark.parametrize("piece", [b"X-A: b\r\n" * 2**13, b"a" * 2**16])
def test_headers_that_never_end_take_no_memory(vllm: VllmServer, piece: bytes) -> None:
    """A request whose headers never end needs no key, because the server parses headers before the
    guard runs."""
    server, sent = psutil.Process(vllm.pid), 0
    before = server.memory_info().rss
    address = urlsplit(vllm.url)
    for _ in range(3):
        with socket.create_connection((address.hostname, address.port), timeout=10) as peer:
            peer.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: ")
            with suppress(ConnectionError, TimeoutError):
                while sent < 300 * 2**20:
                    peer.sendall(piece)
                    sent += len(piece)
    assert sent < 60 * 2**20
    assert server.memory_info().rss - before < 16 * 2**20


def test_a_half_sent_request_is_closed(vllm: VllmServer) -> None:
    address = urlsplit(vllm.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b")
        assert b" 408 " in peer.recv(2**16)


def test_what_the_processes_of_vllm_show(vllm: VllmServer) -> None:
    """No command line and no log contains a secret. The engine is forked from the server, but does
    not listen on the server's port. If an engine outlived its server and still listened on the
    server's port, clients would hang."""
    port, server = int(vllm.url.rpartition(":")[2]), psutil.Process(vllm.pid)
    children = server.children(recursive=True)
    assert children
    for process in (server, *children):
        listens = [
            one.laddr.port
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        assert (port in listens) == (process == server)
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    for secret in (API_KEY, ADMIN_TOKEN):
        assert not [text for text in (vllm.log.read_text(), *lines) if secret in text]


def test_the_client_loads_scores_and_unloads(
    vllm: VllmServer, client: VllmClient, identity: Path
) -> None:
    name = f"{next(names)}@1"
    assert client.healthy()
    assert client.prefix_cache_keyed_by_path()  # vLLM 0.32
    assert client.models()["base"] == str(vllm.model)
    longest = client.longest_prompt()
    assert list(map(len, client.prompt_logprobs("base", [1] * longest, [1, 2]))) == [longest - 1, 1]
    with pytest.raises(InferenceRefused):
        client.prompt_logprobs("base", [1] * (longest + 1))
    client.load_lora(name, str(identity))
    assert client.models()[name] == str(identity)
    with pytest.raises(InferenceRefused, match="already been loaded"):
        client.load_lora(name, str(identity))
    tokens = list(range(1, 40))
    assert (
        distance(client.prompt_logprobs(name, tokens), client.prompt_logprobs("base", tokens))
        < 1e-6
    )
    assert client.reset_prefix_cache()
    client.unload_lora(name)
    assert name not in client.models()
    client.unload_lora(name)  # unloading an unknown name is not an error


def test_the_client_reports_what_is_wrong(
    vllm: VllmServer, client: VllmClient, tmp_path: Path
) -> None:
    write_identity(tmp_path / "rank", vllm.model, LoraShape(rank=128, targets=ATTENTION.targets))
    broken = {
        "weights": ("adapter_model.safetensors", b"x"),
        "config": ("adapter_config.json", b"{"),
    }
    for fault, (file, content) in broken.items():
        write_identity(tmp_path / fault, vllm.model, ATTENTION)
        (tmp_path / fault / file).write_bytes(content)
    for fault in ("missing", "rank", "weights", "config"):
        with pytest.raises(InferenceRefused):
            client.load_lora(f"{fault}@1", str(tmp_path / fault))
    with pytest.raises(InferenceRefused, match="does not exist"):
        client.prompt_logprobs("nobody@1", [1, 2, 3])
    with pytest.raises(Unauthorized, match="TANDEM_ADMIN_TOKEN"):
        vllm.client(admin_token="wrong").load_lora("x@1", str(tmp_path))
    with pytest.raises(InferenceUnavailable):
        vllm.client(inference_url="http://127.0.0.1:9").models()
    assert client.healthy()
    assert list(map(len, client.prompt_logprobs("base", [1, 2, 3]))) == [2]


def stream(vllm: VllmServer, model: str) -> AbstractContextManager[httpx.Response]:
    """A request that runs for a while."""
    body = {"model": model, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{vllm.url}/v1/completions", headers=API, json=body, timeout=120)


def test_an_adapter_in_use_is_not_unloaded(
    vllm: VllmServer, client: VllmClient, identity: Path
) -> None:
    run = next(names)
    name = f"{run}@1"
    client.load_lora(name, str(identity))
    retention = Retention(client, grace=0.0, most=99)
    with stream(vllm, name) as answer:
        lines = answer.iter_lines()
        next(lines)
        until("the request runs", lambda: name in client.adapters_in_use())
        assert (
            retention.expired({name: str(identity)}, runs={run}, wanted=(), existing={name}) == []
        )
        # A step that a rollback discarded is unloaded at once. A request that runs on the discarded
        # step still runs to its end.
        assert retention.expired({name: str(identity)}, runs={run}, wanted=(), existing=()) == [
            name
        ]
        client.unload_lora(name)
        assert name not in client.models()
        for _ in range(20):
            assert next(lines) is not None
    until("the request ends", lambda: name not in client.adapters_in_use())
    assert time.time() - 60 < client.adapters_last_used()[name] <= time.time()


def test_prompt_logprobs_are_right_while_others_sample(
    vllm: VllmServer, client: VllmClient, tmp_path: Path
) -> None:
    """The publisher verifies a step while clients sample and all adapter slots of vLLM are in
    use."""
    adapters = [f"{next(names)}@1" for _ in range(Settings().max_loras)]
    for seed, name in enumerate(adapters):
        client.load_lora(
            name, str(write_random_adapter(tmp_path / str(seed), vllm.model, ATTENTION, seed=seed))
        )
    models = ["base", *adapters]
    alone = {model: client.prompt_logprobs(model, SEQUENCES[1]) for model in models}
    assert distance(alone["base"], alone[adapters[0]]) > 0.5
    for model in models:
        with stream(vllm, adapters[-1]) as answer:
            # The variable keeps the iterator alive. Without the variable the request would end.
            lines = answer.iter_lines()
            next(lines)
            assert distance(client.prompt_logprobs(model, SEQUENCES[1]), alone[model]) < 1e-4
            assert client.adapters_in_use() == {adapters[-1]}, "the requests did not share a batch"
    for name in adapters:
        client.unload_lora(name)


def arrivals(vllm: VllmServer) -> float:
    """How often the API server has got more tokens of a request, after the first ones."""
    text = httpx.get(f"{vllm.url}/metrics").text
    (count,) = re.findall(r"inter_token_latency_seconds_count\{[^}]*\} (\S+)", text)
    return float(count)


def test_the_engine_sends_the_tokens_of_an_answer_together(vllm: VllmServer) -> None:
    """The engine sends each token of a stream at once. An answer that is not a stream has the same
    tokens and log-probs."""
    body = {
        "model": "base",
        "prompt": [5, 6, 7],
        "max_tokens": 60,
        "min_tokens": 60,
        "temperature": 0.0,
        "logprobs": 3,
        "return_tokens_as_token_ids": True,
    }
    url, before = f"{vllm.url}/v1/completions", arrivals(vllm)
    whole = httpx.post(url, json=body, headers=API, timeout=60).json()["choices"][0]["logprobs"]
    together = arrivals(vllm)
    lines = httpx.post(url, json=body | {"stream": True}, headers=API, timeout=60).text.splitlines()
    parts = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    one_by_one = [choice["logprobs"] for (choice,) in parts]
    assert together - before == pytest.approx(59 / 16, abs=1)
    assert arrivals(vllm) - together == 59
    for name in ("tokens", "token_logprobs"):
        streamed = [item for part in one_by_one for item in part[name]]
        assert len(whole[name]) == 60
        assert whole[name] == (streamed if name == "tokens" else pytest.approx(streamed, abs=1e-4))
    assert [len(top) for top in whole["top_logprobs"]] == [3] * 60


def test_requests_to_a_sleeping_vllm_wait_and_end_as_without_the_sleep(
    vllm: VllmServer, client: VllmClient, identity: Path
) -> None:
    """On the CPU a sleep frees no memory. The engine stops, drops its cache and continues as it
    does on a GPU."""
    name = f"{next(names)}@1"
    client.load_lora(name, str(identity))

    def complete(model: str, tokens: int) -> dict[str, object]:
        body = {
            "model": model,
            "prompt": [5, 6, 7],
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        answer = httpx.post(
            f"{vllm.url}/v1/completions", json=body, headers=API, timeout=120
        ).json()
        return {key: answer["choices"][0][key] for key in ("text", "finish_reason")}

    def asleep() -> bool:
        return parse(httpx.get(f"{vllm.url}/metrics").text).asleep

    undisturbed = complete("base", 1200), complete(name, 8)
    assert not client.is_sleeping()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, "base", 1200)
        until("it runs", client.has_requests)
        client.sleep()
        assert client.is_sleeping()
        assert client.healthy()
        coming = pool.submit(complete, name, 8)
        time.sleep(1)
        assert not running.done()
        assert not coming.done()
        assert asleep()
        client.sleep()  # a second sleep changes nothing
        client.wake_up()
        assert not client.is_sleeping()
        assert (running.result(), coming.result()) == undisturbed
    client.wake_up()  # a second wake changes nothing
    assert not asleep()
    assert undisturbed[0]["finish_reason"] == "length"


class Trainer:
    """The trainer's side: a spool, adapters, the adapters' log-probs on fixed sequences, and a
    publisher that loads the adapters into vLLM."""

    def __init__(self, vllm: VllmServer, directory: Path) -> None:
        self.model, self.directory = vllm.model, directory
        self.spool = Spool.create(directory / "spool")
        settings = Settings(root=self.spool.root, inference_url=vllm.url, device="cpu")
        self._publisher = Publisher(settings, vllm.client(), grace=0.5)
        self.base = self.logprobs(None)

    def adapter(self, seed: int, scale: float = 1.0, lora: LoraShape = ATTENTION) -> Path:
        """A random adapter. `scale` multiplies B."""
        path = write_random_adapter(
            self.directory / f"{seed}-{scale}-{len(lora.targets)}", self.model, lora, seed=seed
        )
        file = path / "adapter_model.safetensors"
        save_file({k: v * scale if "lora_B" in k else v for k, v in load_file(file).items()}, file)
        return path

    def logprobs(self, adapter: Path | None, lora: LoraShape = ATTENTION) -> list[list[float]]:
        policy = make_policy(self.model, lora, adapter)
        return [policy(linear_row(tokens)).logprobs.tolist() for tokens in SEQUENCES]

    def probe(
        self, adapter: Path, previous: Path | None = None, lora: LoraShape = ATTENTION
    ) -> Probe:
        before = self.base if previous is None else self.logprobs(previous)
        return Probe(
            tokens=SEQUENCES, logprobs=self.logprobs(adapter, lora), previous=before, base=self.base
        )

    def check_cached_prefix(
        self, vllm: VllmServer, model: str, adapter: Path, lora: LoraShape = ATTENTION
    ) -> None:
        """A token that `model` samples has the log-prob of `adapter`. The second of two requests
        finds the prompt in the prefix cache."""
        # The prompt is longer than a block of the prefix cache. A block has 128 tokens on the CPU.
        prompt = SEQUENCES[0][:140]
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        for _ in range(2):
            answer = httpx.post(
                f"{vllm.url}/v1/completions", headers=API, json=body, timeout=120
            ).json()["choices"][0]
            row = linear_row([*prompt, *answer["token_ids"]], trained=[len(prompt)])
            expected = float(make_policy(self.model, lora, adapter)(row).logprobs[0])
            assert answer["logprobs"]["token_logprobs"][0] == pytest.approx(expected, abs=1e-3)

    def publish(self, run: str) -> Served:
        self._publisher.once()
        served = self.spool.served.get(run)
        assert served is not None
        return served


@pytest.fixture
def trainer(
    vllm: VllmServer, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Trainer:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Trainer(vllm, tmp_path)


def distance(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> float:
    return float(np.mean(np.abs(np.concatenate(a) - np.concatenate(b))))


def test_adapters_on_attention_are_served_and_those_on_experts_are_refused(
    trainer: Trainer, client: VllmClient
) -> None:
    assert distance(client.prompt_logprobs("base", *SEQUENCES), trainer.base) < 1e-4
    served = {}
    for lora in (ATTENTION, EVERYWHERE):
        run = make_run(trainer.spool, next(names), trainer.model, lora).name
        first = trainer.publish(run)
        assert (first.step, first.refused_step) == (0, None)
        assert first.mean_abs_logprob_error < 1e-6
        adapter = trainer.adapter(1, lora=lora)
        probe = trainer.probe(adapter, lora=lora)
        assert distance(probe.logprobs, probe.base) > 0.5, (
            "an adapter that changes little proves little"
        )
        commit(trainer.spool, run, adapter, probe)
        served[lora] = trainer.publish(run)
    assert (served[ATTENTION].step, served[ATTENTION].refused_step) == (1, None)
    assert served[ATTENTION].tokens_checked == 149 + 32 + 63
    # The trainer and vLLM compute in float32, so the error is far below the allowed 0.02.
    assert served[ATTENTION].mean_abs_logprob_error < 1e-4
    # vLLM (0.32, CPU) loads the file without an error and leaves the experts' adapters out.
    assert (served[EVERYWHERE].step, served[EVERYWHERE].refused_step) == (0, 1)
    reason = str(served[EVERYWHERE].refused_reason)
    assert "ValueError: vLLM does not hold the adapter of " in reason
    assert "no layer took model.layers.0.mlp.experts.0.down_proj" in reason
    assert client.healthy()


def test_a_small_step_is_told_apart_from_the_step_before(
    trainer: Trainer, client: VllmClient
) -> None:
    """The two steps' weights differ so little that the log-probs differ by less than the tolerance
    and no token moves to other experts."""
    run = make_run(trainer.spool, next(names), trainer.model, ATTENTION).name
    right, small = trainer.adapter(1), trainer.adapter(1, 1.0001)
    commit(trainer.spool, run, right, trainer.probe(right))
    trainer.publish(run)
    probe = trainer.probe(small, right)
    assert distance(probe.logprobs, probe.previous) < 0.02
    commit(trainer.spool, run, right, probe)
    served = trainer.publish(run)
    assert (served.step, served.refused_step) == (1, 2)
    assert "nearer to those of the checkpoint before" in str(served.refused_reason)
    assert f"{run}@2" not in client.models()
    assert f"{run}@1" in client.models()
    trainer.spool.checkpoints.rollback(run, 1)
    commit(trainer.spool, run, small, probe)
    served = trainer.publish(run)
    assert (served.step, served.refused_step) == (2, None)


def test_after_a_rollback_the_name_serves_neither_the_old_adapter_nor_its_cached_blocks(
    vllm: VllmServer, trainer: Trainer, client: VllmClient
) -> None:
    run = make_run(trainer.spool, next(names), trainer.model, ATTENTION).name

    def cache_hits() -> float:
        text = httpx.get(f"{vllm.url}/metrics", timeout=60).text
        return sum(
            float(n)
            for n in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)", text, re.MULTILINE)
        )

    for seed in (1, 2):
        adapter = trainer.adapter(seed)
        commit(trainer.spool, run, adapter, trainer.probe(adapter))
        assert trainer.publish(run).model == f"{run}@1"
        before = cache_hits()
        trainer.check_cached_prefix(vllm, f"{run}@1", adapter)
        assert cache_hits() > before, (
            "the prefix cache was not used, so this test proves nothing about it"
        )
        trainer.spool.checkpoints.rollback(run, 0)
        assert trainer.publish(run).step == 0
        assert f"{run}@1" not in client.models()
