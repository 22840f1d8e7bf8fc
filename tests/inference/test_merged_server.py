"""`MergedServer` around a fake vLLM. The engine of the fake vLLM answers, answers late, fails or
dies as a test says."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tandem.config import Settings
from tandem.inference.server.middleware import merged_server
from tandem.inference.server.middleware.guard import ADMIN
from tandem.inference.server.middleware.merged_server import MergedServer
from tandem.vllm_client.client import VllmClient

pytestmark = pytest.mark.anyio

ROUTE = "/tandem/merged"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RANDOM = "0a1b2c3d"  # vLLM appends a random text like this one to each sequence's id.


class Engine:
    """vLLM's engine client. `on`: for each method, the workers' answer, an error to raise or a
    function to run. `tokens`: the number of tokens of each sequence."""

    def __init__(self) -> None:
        self.errored = False
        self.tokens: dict[str, int] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.on: dict[str, list[dict[str, Any]] | Exception | Callable[..., Awaitable[Any]]] = {}
        self.generated: list[str] = []

    async def collective_rpc(
        self, call: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> Any:
        assert call == "tandem_call"
        method, *arguments = args
        self.calls.append((method, tuple(arguments)))
        answer = self.on.get(method)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            return await answer(*arguments) if callable(answer) else answer
        if method == "swap":
            return [{"seconds": 0.01, "tokens": dict(self.tokens)}]
        return [{"result": {"staged": "merge", "rows": []}.get(method)}] * 2

    async def add_request(self, request_id: str) -> None:
        self.generated.append(request_id)

    def swaps(self) -> list[str]:
        return [args[1] for method, args in self.calls if method == "swap"]


FAULTS: dict[str, Any] = {
    "error": [{"error": "no such file"}, {}],
    "raises": RuntimeError("broken"),
    "hangs": lambda *_: asyncio.sleep(1000),
    "never ready": [{"result": "merge"}, {"result": ""}],
    "late": [{"late": True}],
    "torn": [{"torn": "both failed"}],
}


@dataclass
class Path:
    """vLLM's BaseModelPath."""

    name: str
    model_path: str


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class World:
    """The server around a fake vLLM. A request reaches the engine when the event `tokenised` is
    set, and ends when the event `proceed` is set. The events `tokenised` and `proceed` are set at
    the beginning."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.proceed, self.tokenised, self.streamed = (
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )
        for event in (self.proceed, self.tokenised, self.streamed):
            event.set()
        self.paths = [Path("base", "/model")]
        registry = SimpleNamespace(base_model_paths=self.paths)
        self.state = SimpleNamespace(
            engine_client=self.engine, openai_serving_models=SimpleNamespace(registry=registry)
        )
        self.server = MergedServer(self._vllm)
        self.admin = False
        self.status = 200
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://vllm"
        )  # type: ignore

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Hands a request to the server as the guard does."""
        await self.server(
            {**scope, "app": SimpleNamespace(state=self.state), ADMIN: self.admin}, receive, send
        )

    async def _vllm(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.json()
        await self.tokenised.wait()
        request_id = request.headers.get("x-request-id", "?")
        if body.get("stream"):
            answer = StreamingResponse(
                self._events(request_id, body.get("echo", "x")), media_type="text/event-stream"
            )
        else:
            await self.engine.add_request(request_id)
            await self.proceed.wait()
            content = (
                {"id": request_id, "choices": []}
                if self.status == 200
                else {"error": {"message": "no"}}
            )
            text = json.dumps(content)
            headers = {"content-length": str(len(text))}
            answer = StreamingResponse(
                iter([text[:5], text[5:]]), self.status, headers, "application/json"
            )
        await answer(scope, receive, send)

    async def _events(self, request_id: str, text: str) -> AsyncIterator[str]:
        """The events of a streamed answer. The real vLLM first sends the answer's headers. It gives
        the request to the engine when the reader requests the first event."""
        await self.streamed.wait()
        await self.engine.add_request(request_id)
        event = f"data: {json.dumps({'choices': [{'text': text}]})}\n\n"
        yield event
        await self.proceed.wait()
        yield event
        yield "data: [DONE]\n\n"

    async def order(self, action: str, **values: Any) -> httpx.Response:
        return await self.http.post(f"{ROUTE}/{action}", json=values)

    async def swap(self, step: int, requests: str = "keep", seconds: float = 5.0) -> httpx.Response:
        order = {
            "name": f"run@{step}",
            "path": f"/{step}",
            "scale": 2.0,
            "source": None,
            "again": None,
        }
        return await self.order("swap", **order, requests=requests, seconds=seconds)

    async def publish(self, step: int, requests: str = "keep") -> None:
        assert (await self.swap(step, requests)).status_code == 200
        assert (await self.order("announce", path=f"/{step}")).status_code == 200

    def sample(
        self, path: str = COMPLETIONS, name: str = "", **body: Any
    ) -> asyncio.Task[httpx.Response]:
        """A running request. If `name` is empty, the request has no id from the client."""
        headers = {"x-request-id": name.encode()} if name else {}
        return asyncio.create_task(self.http.post(path, json=body, headers=headers))

    async def running(
        self, path: str = COMPLETIONS, name: str = "mine", **body: Any
    ) -> asyncio.Task[httpx.Response]:
        """A request that is in the engine and stays there until `proceed` is set."""
        self.proceed.clear()
        count = len(self.engine.generated)
        task = self.sample(path, name, **body)
        await self.until(lambda: len(self.engine.generated) > count)
        return task

    async def end(
        self, running: asyncio.Task[httpx.Response], tokens: dict[str, int], step: int = 2
    ) -> httpx.Response:
        """The answer to a running request, after a swap to `step`. At the swap each sequence has
        `tokens` tokens."""
        self.engine.tokens = tokens
        await self.publish(step)
        self.proceed.set()
        return await running

    async def until(self, check: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not check():
                await asyncio.sleep(0.001)

    async def sampled(self) -> str:
        """The name of the weights that answer a new request."""
        answer = await self.sample()
        assert answer.status_code == 200
        return answer.headers["x-tandem-weights"]

    async def phase(self) -> tuple[str, str]:
        state = (await self.http.get(ROUTE)).json()
        return state["phase"], state["name"]


@pytest.fixture
def world() -> World:
    return World()


async def settled(task: asyncio.Task[Any]) -> bool:
    """Whether the task ends within 0.05 s."""
    await asyncio.wait([task], timeout=0.05)
    return task.done()


def refused(answer: httpx.Response, why: str) -> None:
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    error = answer.json()["error"]
    assert (error["type"], why in error["message"]) == ("inference_unavailable", True)


async def test_nothing_is_sampled_before_the_first_announcement(world: World) -> None:
    refused(await world.sample(), "no checkpoint is served yet")
    assert world.engine.generated == []
    assert await world.phase() == ("empty", "base")
    await world.publish(1)
    answer = await world.sample()
    assert (answer.status_code, answer.headers["x-tandem-weights"]) == (200, "run@1")
    assert world.paths == [Path("run@1", "/1"), Path("run", "/1")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_new_requests_wait_from_the_swap_to_the_announcement(world: World, path: str) -> None:
    await world.publish(1)
    await world.swap(2)
    held = [world.sample(path) for _ in range(3)]
    assert not await settled(held[0])
    assert world.engine.generated == []
    assert (await world.http.post("/v1/models", json={})).status_code == 200, (
        "other routes never wait"
    )
    world.admin = True  # the publisher's own requests pass
    assert (await world.sample(path)).status_code == 200
    world.admin = False
    await world.order("announce", path="/2")
    assert [(await task).headers["x-tandem-weights"] for task in held] == ["run@2"] * 3


async def test_a_request_waits_no_longer_than_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_server, "HOLD_SECONDS", 0.2)
    await world.publish(1)
    await world.swap(2)
    refused(await world.sample(), "not verified")
    assert world.engine.generated == []
    await world.order("announce", path="/2")
    assert await world.sampled() == "run@2"


@pytest.mark.parametrize(
    ("method", "told", "status"),
    [
        ("stage", "error", 422),
        ("staged", "error", 422),
        ("stage", "raises", 503),
        ("staged", "raises", 503),
        ("stage", "hangs", 503),
        ("staged", "hangs", 503),
        ("staged", "never ready", 503),
        ("swap", "error", 422),
        ("swap", "late", 503),
    ],
)
async def test_a_swap_that_fails_leaves_the_old_weights(
    world: World, method: str, told: str, status: int
) -> None:
    """422 means that the same order would fail again; 503 means that the order may succeed
    later."""
    await world.publish(1)
    running = await world.running()
    world.engine.on[method] = FAULTS[told]
    never = told in ("hangs", "never ready")
    assert (await world.swap(2, seconds=0.2 if never else 60)).status_code == status
    assert await world.phase() == ("served", "run@1")
    world.proceed.set()
    assert (await running).headers["x-tandem-weights"] == await world.sampled() == "run@1"
    world.engine.on.clear()
    await world.publish(2)
    assert await world.sampled() == "run@2"


@pytest.mark.parametrize(("told", "status"), [("error", 422), ("raises", 503)])
async def test_rows_that_cannot_be_read(world: World, told: str, status: int) -> None:
    world.engine.on["rows"] = FAULTS[told]
    assert (await world.order("rows", rows={})).status_code == status


@pytest.mark.parametrize("how", ["torn", "raises", "hangs"])
async def test_torn_weights_answer_nobody_until_a_swap_succeeds(
    world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_server, "GRACE_SECONDS", 0.1)
    await world.publish(1)
    running = await world.running()
    world.engine.on["swap"] = FAULTS[how]
    assert (await world.swap(2, seconds=0.2)).status_code == 503
    assert await world.phase() == ("torn", "run@1")
    await world.until(running.done)
    assert running.cancelled()
    world.proceed.set()
    refused(await world.sample(), "the last swap of weights failed")
    assert (await world.order("announce", path="/1")).status_code == 409
    world.engine.on["stage"] = FAULTS["error"]
    assert (await world.swap(2)).status_code == 422
    assert await world.phase() == ("torn", "run@1")
    world.engine.on.clear()
    await world.publish(1)
    assert await world.sampled() == "run@1"


@pytest.mark.parametrize("method", ["stage", "staged", "swap", "drain"])
async def test_a_dead_engine_ends_every_wait(
    world: World, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the engine dies during a call, vLLM never answers this call."""
    monkeypatch.setattr(merged_server, "_CHECK_SECONDS", 0.05)
    await world.publish(1)
    running = await world.running()
    await world.swap(1)
    world.engine.calls.clear()
    world.engine.on[method] = FAULTS["hangs"]
    requests = "wait" if method == "drain" else "keep"
    swap, held = asyncio.create_task(world.swap(2, requests, seconds=1000)), world.sample()
    at_last = "staged" if method == "drain" else method
    await world.until(lambda: world.engine.calls and world.engine.calls[-1][0] == at_last)
    assert not await settled(held)
    assert not swap.done()
    world.engine.errored = True
    async with asyncio.timeout(60):
        assert [(await task).status_code for task in (swap, held)] == [503, 503]
    running.cancel()


async def test_wait_swaps_when_the_running_requests_have_ended(world: World) -> None:
    await world.publish(1)
    running = [await world.running(name=str(i)) for i in range(2)]
    swap, new = asyncio.create_task(world.swap(2, "wait")), None
    await world.until(lambda: world.server.phase == "swapping")
    new = world.sample()
    assert not await settled(swap)
    assert world.engine.swaps() == ["run@1"]
    world.proceed.set()
    assert [(await task).headers["x-tandem-weights"] for task in running] == ["run@1"] * 2
    assert (await swap).json()["drain_seconds"] > 0
    await world.order("announce", path="/2")
    assert (await new).headers["x-tandem-weights"] == "run@2"


async def test_wait_that_takes_too_long_changes_nothing(world: World) -> None:
    await world.publish(1)
    running = await world.running()
    swap = asyncio.create_task(world.swap(2, "wait", seconds=0.3))
    await world.until(lambda: world.server.phase == "swapping")
    held = world.sample(name="held")
    answer = await swap
    assert answer.status_code == 503
    assert "1 requests still run" in answer.json()["error"]["message"]
    assert world.engine.swaps() == ["run@1"]
    world.proceed.set()
    assert [(await task).headers["x-tandem-weights"] for task in (running, held)] == ["run@1"] * 2
    assert (await running).json() == {"id": "mine", "choices": []}


async def test_two_swaps_at_once_come_one_after_the_other(world: World) -> None:
    await world.publish(1)
    inside, begin, deadlines = 0, time.monotonic(), []

    async def swap(*order: Any) -> list[dict[str, Any]]:
        nonlocal inside
        inside += 1
        assert inside == 1
        deadlines.append(order[2])
        await asyncio.sleep(0.05)
        inside -= 1
        return [{"seconds": 0.0, "tokens": {}}]

    world.engine.on["swap"] = swap
    answers = await asyncio.gather(world.swap(2), world.swap(3))
    assert [answer.status_code for answer in answers] == [200, 200]
    # The engine may take an order much later, after the server has given up, so each order has a
    # deadline.
    assert all(begin + 5 <= deadline <= time.monotonic() + 5 for deadline in deadlines)
    assert await world.phase() == ("unverified", "run@3")
    # The first of two publishers can neither announce nor undo the second publisher's swap.
    assert (await world.order("announce", path="/2")).status_code == 409
    assert (await world.order("revert", path="/2")).status_code == 200
    assert await world.phase() == ("unverified", "run@3")
    assert (await world.order("announce", path="/3")).status_code == 200


async def test_a_refused_step_is_reverted(world: World) -> None:
    await world.swap(1)
    assert (await world.order("revert", path="/1")).json()["phase"] == "empty", (
        "nothing was served before"
    )
    refused(await world.sample(), "no checkpoint is served yet")
    await world.publish(1)
    await world.swap(2)
    held = world.sample()
    assert not await settled(held)
    answer = await world.order("revert", path="/2")
    assert (answer.status_code, answer.json()["phase"]) == (200, "served")
    assert (await held).headers["x-tandem-weights"] == world.paths[0].name == "run@1"
    # A second publisher swaps to the announced weights again, and may find that the weights fail
    # verification.
    await world.swap(1)
    assert await world.phase() == ("unverified", "run@1")
    await world.order("revert", path="/1")
    assert await world.phase() == ("served", "run@1")
    await world.order("revert", path="/1")  # A revert does not change served weights.
    assert world.engine.swaps() == ["run@1", "base", "run@1", "run@2", "run@1", "run@1", "run@1"]
    await world.order("revert", path="/1", to_base=True)
    assert (await world.phase(), world.engine.swaps()[-1]) == (("empty", "base"), "base")


async def test_an_answer_that_saw_no_swap_is_vllms_own(world: World) -> None:
    await world.publish(1)
    assert (await world.sample(name="mine")).json() == {"id": "mine", "choices": []}
    answer = await world.sample(name="mine", stream=True)
    assert answer.text == 'data: {"choices": [{"text": "x"}]}\n\n' * 2 + "data: [DONE]\n\n"
    assert answer.headers["x-tandem-weights"] == "run@1"
    world.status = 404
    answer = await world.end(await world.running(), {f"cmpl-mine-0-{RANDOM}": 5})
    assert (answer.status_code, answer.json()) == (404, {"error": {"message": "no"}})
    assert "x-tandem-weights" not in answer.headers


# Maps ids of sequences to the numbers of the prompt and of the sample. vLLM 0.26 and 0.32 give
# these ids to the sequences of the request "{id}". vLLM makes the ids in
# v1/engine/parallel_sampling.py, input_processor.py and entrypoints/openai/*/serving.py.
SEQUENCES = {
    COMPLETIONS: {
        "cmpl-{id}-0-{r}": (0, 0),
        "cmpl-{id}-1-{r}": (1, 0),
        "cmpl-{id}-12-{r}": (12, 0),
        "0_cmpl-{id}-3-{r}": (3, 0),
        "2_cmpl-{id}-3-{r}": (3, 2),
        "cmpl-{id}-7": (7, 0),
    },
    CHAT: {"chatcmpl-{id}-{r}": (0, 0)},
    GENERATE: {"generate-tokens-{id}-{r}": (0, 0)},
}


@pytest.mark.parametrize("random", [RANDOM, "12345678"])
@pytest.mark.parametrize(
    "name", ["", "run-7", "550e8400-e29b-41d4-a716-446655440000", "7", "a-1-12345678", "ü.*", "0_x"]
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_each_sequence_is_recognised(world: World, path: str, name: str, random: str) -> None:
    await world.publish(1)
    running = await world.running(path, name)
    used = world.engine.generated[-1]
    assert used == name.encode().decode("latin-1") or not name
    others = [f"{used}-1", f"1-{used}", f"{used}x", used[1:] or "8"]
    strangers = {
        f"{kind}-{other}-0-{RANDOM}": 99
        for other in others
        for kind in ("cmpl", "chatcmpl", "generate-tokens")
    }
    mine = {kind.format(id=used, r=random): of for kind, of in SEQUENCES[path].items()}
    if path == CHAT:
        mine |= {f"{sample}_chatcmpl-{used}-{random}": (0, sample) for sample in (1, 2)}
    expected = {of: 10 + i for i, of in enumerate(mine.values())}
    answer = await world.end(
        running, strangers | {sequence: 10 + i for i, sequence in enumerate(mine)}
    )
    assert answer.headers.get_list("content-length") == [str(len(answer.content))]
    told = answer.json()["weight_versions"]
    assert {(entry["prompt"], entry["sample"]): entry["spans"] for entry in told} == {
        of: [["run@1", 0], ["run@2", count]] for of, count in expected.items()
    }
    assert [(entry["prompt"], entry["sample"]) for entry in told] == sorted(expected)


async def test_requests_with_the_same_id_are_told_apart(world: World) -> None:
    await world.publish(1)
    first, second = await world.running(name="same"), await world.running(name="same")
    ids = world.engine.generated[-2:]
    assert ids[0] == "same"
    assert ids[1].startswith("same-")
    world.engine.tokens = {f"cmpl-{used}-0-{RANDOM}": 5 + i for i, used in enumerate(ids)}
    await world.publish(2)
    world.proceed.set()
    for task, count in ((first, 5), (second, 6)):
        [told] = (await task).json()["weight_versions"]
        assert told["spans"] == [["run@1", 0], ["run@2", count]]
    assert (await world.sample(name="same")).json()["id"] == "same"


async def test_a_stream_tells_its_versions_before_its_end(world: World) -> None:
    await world.publish(1)
    text = "a page that ends with\n\ndata: [DONE]\n\n"
    running = await world.running(stream=True, echo=text)
    answer = await world.end(running, {f"cmpl-mine-0-{RANDOM}": 57})
    *events, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    token = {"choices": [{"text": text}]}
    versions = [{"prompt": 0, "sample": 0, "spans": [["run@1", 0], ["run@2", 57]]}]
    told = {"object": "tandem.weight_versions", "choices": [], "weight_versions": versions}
    assert [json.loads(event) for event in events] == [token, token, told]


async def test_several_swaps_in_one_request(world: World) -> None:
    await world.publish(1)
    running = await world.running()
    world.engine.tokens = {"cmpl-mine-0": 0, "cmpl-mine-1": 4, "cmpl-mine-2": 6}
    await world.publish(2)
    world.engine.tokens = {"cmpl-mine-0": 3, "cmpl-mine-1": 4}
    await world.swap(3)
    await world.order("revert", path="/3")
    answer = await world.end(running, world.engine.tokens, 1)
    assert answer.headers["x-tandem-weights"] == "run@1,run@2,run@3,run@2,run@1"
    assert {entry["prompt"]: entry["spans"] for entry in answer.json()["weight_versions"]} == {
        # Sequence 0 waited in the queue at the first swap.
        0: [["run@2", 0], ["run@1", 3]],
        # Sequence 1 got no tokens between the first swap and the last swap. The last swap returned
        # to the weights that sequence 1 had at first.
        1: [["run@1", 0]],
        # Sequence 2 ended before the second swap.
        2: [["run@1", 0], ["run@2", 6]],
    }


@pytest.mark.parametrize(
    ("tokens", "step", "way"),
    [({"cmpl-mine-0": 5}, 1, "merge"), ({"cmpl-mine-0": 5}, 1, "nccl"), ({}, 2, "merge")],
    ids=["the same weights are written again", "they come another way", "its sequences have ended"],
)
async def test_a_request_that_saw_no_other_weights_has_only_the_old_ones(
    world: World, tokens: dict[str, int], step: int, way: str
) -> None:
    await world.publish(1)
    running = await world.running()
    world.engine.on["staged"] = [{"result": way}]
    answer = await world.end(running, tokens, step)
    assert (answer.headers["x-tandem-weights"], "weight_versions" in answer.json()) == (
        "run@1",
        False,
    )


async def test_a_request_that_was_not_in_the_engine_has_only_the_new_weights(world: World) -> None:
    await world.publish(1)
    world.tokenised.clear()
    early = world.sample(name="early")
    await world.until(lambda: world.server._in_flight)
    await world.publish(2)
    world.tokenised.set()
    answer = await early
    assert (answer.headers["x-tandem-weights"], "weight_versions" in answer.json()) == (
        "run@2",
        False,
    )


async def test_a_stream_that_has_not_reached_the_engine_has_only_the_new_weights(
    world: World,
) -> None:
    await world.publish(1)
    world.streamed.clear()
    early = world.sample(name="early", stream=True)
    await world.until(lambda: world.server._in_flight)
    await asyncio.sleep(0.05)
    await world.publish(2)
    world.streamed.set()
    answer = await early
    assert (answer.headers["x-tandem-weights"], "weight_versions" in answer.text) == (
        "run@2",
        False,
    )


async def test_a_request_that_ends_right_behind_the_swap_tells_it(world: World) -> None:
    """The engine's answer to the swap and the request's last token reach the API server at the same
    time."""
    await world.publish(1)
    running = await world.running(stream=True)
    swapped = asyncio.get_running_loop().create_future()

    async def swap(*_: Any) -> Any:
        return await swapped

    world.engine.on["swap"] = swap
    order = asyncio.create_task(world.swap(2))
    await world.until(lambda: len(world.engine.swaps()) == 2)
    swapped.set_result([{"seconds": 0.01, "tokens": {f"cmpl-mine-0-{RANDOM}": 1}}])
    world.proceed.set()
    answer = await running
    assert '"spans": [["run@1", 0], ["run@2", 1]]' in answer.text
    assert (await order).status_code == 200


async def test_an_order_that_is_cut_off_changes_nothing(world: World) -> None:
    await world.publish(1)
    parts = iter(
        [
            {"type": "http.request", "body": b'{"name": "run@2",', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(parts)

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    calls = len(world.engine.calls)
    scope = {"type": "http", "method": "POST", "path": f"{ROUTE}/swap", "headers": []}
    await world.app(scope, receive, send)
    assert len(world.engine.calls) == calls
    assert await world.phase() == ("served", "run@1")


async def test_unknown_orders_are_refused(world: World) -> None:
    assert (await world.order("nothing")).status_code == 404
    assert (await world.http.get(f"{ROUTE}/swap")).status_code == 404
    assert world.engine.calls == []


SWAP = {
    "name": "run@2",
    "path": "/2",
    "scale": 1.0,
    "requests": "keep",
    "seconds": 5.0,
    "source": None,
    "again": None,
}


@pytest.mark.parametrize(
    ("action", "body", "field"),
    [
        ("swap", "", None),
        ("swap", "no JSON", None),
        ("swap", "[]", None),
        ("swap", "\xff", None),
        (
            "swap",
            json.dumps({name: value for name, value in SWAP.items() if name != "path"}),
            "path",
        ),
        ("swap", json.dumps(SWAP | {"scale": "large"}), "scale"),
        ("swap", json.dumps(SWAP | {"seconds": None}), "seconds"),
        ("swap", json.dumps(SWAP | {"seconds": float("nan")}), "seconds"),
        ("swap", json.dumps(SWAP | {"requests": "end"}), "requests"),
        ("swap", json.dumps(SWAP | {"source": 3}), "source"),
        ("announce", "{}", "path"),
        ("revert", '{"path": 3, "to_base": true}', "path"),
        ("rows", '{"rows": {"weight": "first"}}', "rows.weight"),
    ],
)
async def test_an_order_that_is_none_is_refused_by_its_field(
    world: World, action: str, body: str, field: str | None
) -> None:
    await world.publish(1)
    calls = len(world.engine.calls)
    answer = await world.http.post(f"{ROUTE}/{action}", content=body.encode("latin-1"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["field"]) == ("invalid_input", field)
    assert f"no order to {action}" in error["message"]
    assert len(world.engine.calls) == calls
    assert await world.phase() == ("served", "run@1")


async def test_the_client_gives_the_orders_that_the_server_takes(world: World) -> None:
    asked: list[httpx.Request] = []

    def take(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"rows": []})

    client = VllmClient(Settings())
    client._http._transport = httpx.MockTransport(take)
    client.swap_merged("run@1", "/1", 2.0, "keep", 5, source={"way": "nccl"})
    client.merged_rows({"weight": 0})
    client.announce_merged("/1")
    client.merged()
    client.revert_merged("/1", to_base=True)
    for request in asked:
        answer = await world.http.request(request.method, request.url.path, content=request.content)
        assert answer.status_code == 200
    assert world.engine.calls[0] == ("stage", ("/1", 2.0, {"way": "nccl"}))
    assert await world.phase() == ("empty", "base")
