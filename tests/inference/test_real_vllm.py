"""The guard, the admin client and retention with the real vLLM."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from published_runs import LORA
from tandem.errors import Unauthorized
from tandem.families.arch import read_arch
from tandem.families.identity import write_identity_adapter
from tandem.inference.publisher.retention import Retention
from tandem.inference.server.guard import KEYED, PUBLIC
from tandem.spool.schema import LoraShape
from tandem.supervise.watchdog import parse
from tandem.vllm_client.admin import AdminClient, InferenceRefused, InferenceUnavailable
from tandem.vllm_client.names import ADMIN_HEADER
from vllm_server import ADMIN_TOKEN, API_KEY, VllmServer

pytestmark = pytest.mark.slow

API = {"Authorization": f"Bearer {API_KEY}"}
names = (f"real@{i}" for i in itertools.count())


@pytest.fixture
def admin(vllm: VllmServer) -> Iterator[AdminClient]:
    with AdminClient(vllm.url, api_key=API_KEY, admin_token=ADMIN_TOKEN) as client:
        yield client


@pytest.fixture
def identity(vllm: VllmServer, tmp_path: Path) -> Path:
    write_identity_adapter(tmp_path, read_arch(str(vllm.model)), LORA, base_model=str(vllm.model), seed=0)
    return tmp_path


def test_guard_covers_every_route_of_the_app(vllm: VllmServer) -> None:
    routes = re.findall(r"Route: (\S+), Methods: (.+)", vllm.log.read_text())
    paths = {re.sub(r"\{[^}]*\}", "x", path) for path, _ in routes}
    # Guards against a log line that changed: these are what the guard is for.
    known = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/pause", "/sleep", "/update_weights"]
    assert {*known, "/collective_rpc", "/reset_prefix_cache", "/v1/models", "/v1/chat/completions"} <= paths
    assert len(paths) > 40
    with httpx.Client(base_url=vllm.url, timeout=60) as http:
        for path in sorted(paths - PUBLIC - KEYED):
            around = (f"/{path}", f"{path}/", path.upper(), f"/health/..{path}", f"/v1/models/../..{path}")
            for spelling in (path, *around):
                for method in ("GET", "POST", "DELETE", "OPTIONS"):
                    # As written: httpx would tidy the path up.
                    url = httpx.URL(vllm.url).copy_with(raw_path=spelling.encode())
                    assert http.request(method, url, headers=API).status_code == 401, (method, spelling)
        for path in ("/is_paused", "/is_sleeping", "/get_world_size"):
            assert http.get(path, headers={**API, ADMIN_HEADER: ADMIN_TOKEN}).status_code == 200, path
        for path in ("/health", "/version", "/metrics"):
            assert http.get(path).status_code == 200, path
        # The API key is vLLM's own affair on /v1, the guard's on the two routes that vLLM leaves open.
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=API).status_code == 200
        body = {"model": "base", "prompt": "yes"}
        assert http.post("/tokenize", json=body).status_code == 401
        assert http.post("/tokenize", json=body, headers=API).json()["tokens"] == [88, 68, 82]


def test_secrets_are_on_no_command_line_and_in_no_log(vllm: VllmServer) -> None:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes()
        except OSError:
            continue
        assert API_KEY.encode() not in line
        assert ADMIN_TOKEN.encode() not in line
    log = vllm.log.read_text()
    assert API_KEY not in log
    assert ADMIN_TOKEN not in log


def test_admin_client(vllm: VllmServer, admin: AdminClient, identity: Path) -> None:
    name = next(names)
    assert admin.healthy()
    assert admin.version() >= (0, 26)
    assert admin.models()["base"] == str(vllm.model)
    admin.load_lora(name, str(identity))
    assert admin.models()[name] == str(identity)
    with pytest.raises(InferenceRefused, match="already been loaded"):
        admin.load_lora(name, str(identity))
    tokens = list(range(1, 40))
    assert admin.prompt_logprobs(name, tokens) == pytest.approx(admin.prompt_logprobs("base", tokens), abs=1e-6)
    assert admin.reset_prefix_cache()
    assert admin.unload_lora(name)
    assert not admin.unload_lora(name)
    assert name not in admin.models()


def test_admin_client_says_what_is_wrong(vllm: VllmServer, admin: AdminClient, tmp_path: Path) -> None:
    with pytest.raises(InferenceRefused):
        admin.load_lora(next(names), str(tmp_path / "nothing"))
    for what in ("weights", "config", "rank"):
        with pytest.raises(InferenceRefused):
            admin.load_lora(next(names), str(_broken_adapter(tmp_path / what, vllm.model, what)))
    with pytest.raises(InferenceRefused, match="does not exist"):
        admin.prompt_logprobs("nobody@1", [1, 2, 3])
    with AdminClient(vllm.url, api_key=API_KEY, admin_token="wrong") as other, pytest.raises(Unauthorized):
        other.load_lora("x@1", str(tmp_path))
    with (
        AdminClient("http://127.0.0.1:9", api_key=None, admin_token=None) as other,
        pytest.raises(InferenceUnavailable),
    ):
        other.models()
    # None of this has hurt it.
    assert admin.healthy()
    assert len(admin.prompt_logprobs("base", [1, 2, 3])) == 2


def _broken_adapter(directory: Path, model: Path, what: str) -> Path:
    directory.mkdir()
    lora = LoraShape(rank=128) if what == "rank" else LORA
    write_identity_adapter(directory, read_arch(str(model)), lora, base_model=str(model), seed=0)
    weights = directory / "adapter_model.safetensors"
    if what == "weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "config":
        (directory / "adapter_config.json").write_text("{")
    return directory


def test_adapter_in_use_is_not_retired(vllm: VllmServer, admin: AdminClient, identity: Path) -> None:
    name = next(names)
    admin.load_lora(name, str(identity))
    retention = Retention(admin, grace=0.0, max_listed=99)
    body = {"model": name, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{vllm.url}/v1/completions", headers=API, json=body, timeout=120) as stream:
        lines = stream.iter_lines()
        next(lines)
        _until(lambda: name in admin.adapters_in_use())
        assert retention.retire({name: str(identity)}, runs={"real"}, wanted=(), existing={name}) == []
        # A step that a rollback discarded goes at once; the request that uses it goes on.
        assert retention.retire({name: str(identity)}, runs={"real"}, wanted=(), existing=()) == [name]
        admin.unload_lora(name)
        assert name not in admin.models()
        for _ in range(20):
            assert next(lines) is not None
    _until(lambda: name not in admin.adapters_in_use())


def test_prompt_logprobs_while_others_sample(vllm: VllmServer, admin: AdminClient, identity: Path) -> None:
    """Publication verifies while clients sample, with adapters and without."""
    name = next(names)
    admin.load_lora(name, str(identity))
    tokens = list(range(1, 40))
    alone = admin.prompt_logprobs("base", tokens)
    with ExitStack() as stack:
        for model in ("base", name, name):
            body = {"model": model, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            call = httpx.stream("POST", f"{vllm.url}/v1/completions", headers=API, json=body, timeout=120)
            next(stack.enter_context(call).iter_lines())
        for model in (name, "base"):
            assert admin.prompt_logprobs(model, tokens) == pytest.approx(alone, abs=1e-4)
    assert admin.healthy()
    admin.unload_lora(name)


def _until(check, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_requests_of_a_sleeping_vllm_wait_and_end_as_if_nothing_had_been(
    vllm: VllmServer, admin: AdminClient, identity: Path
) -> None:
    """On the CPU no memory moves, but the engine stops, forgets its cache and goes on as it does on a GPU."""
    name = next(names)
    admin.load_lora(name, str(identity))

    def complete(model: str, tokens: int) -> dict[str, object]:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        answer = httpx.post(f"{vllm.url}/v1/completions", json=body, headers=API, timeout=120).json()
        return {key: answer["choices"][0][key] for key in ("text", "finish_reason")}

    undisturbed = complete("base", 2000), complete(name, 8)
    assert not admin.is_sleeping()
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(complete, "base", 2000)
        time.sleep(0.3)
        admin.sleep()
        assert admin.is_sleeping()
        assert admin.healthy()
        coming = pool.submit(complete, name, 8)
        time.sleep(2)
        assert not running.done()
        assert not coming.done()
        assert parse(httpx.get(f"{vllm.url}/metrics").text).asleep
        admin.sleep()  # once more changes nothing
        admin.wake_up()
        assert not admin.is_sleeping()
        assert (running.result(), coming.result()) == undisturbed
    admin.wake_up()  # nor does this
    assert not parse(httpx.get(f"{vllm.url}/metrics").text).asleep
    assert undisturbed[0]["finish_reason"] == "length"
