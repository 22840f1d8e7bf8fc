"""The tests check how many connections to vLLM a client opens, which servers get the key, and what
ends a connection. The servers listen on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from rl.mock_vllm import MockVllm
from tandem.client.rl import sampler as sampler_module
from tandem.client.rl.sampler import Sampler
from tandem.client.vllm import HttpAnswer, Vllm
from tandem.errors import Unreachable
from tandem.system import ports

HEADERS = {"Authorization": "Bearer secret"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Starts a server that answers every route by `handler`. Yields the URL of the server's /v1."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


def test_many_requests_at_once_have_a_connection_each_and_later_ones_use_these() -> None:
    peers, at_once, most = set[object](), 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal at_once, most
        at_once, most = at_once + 1, max(most, at_once + 1)
        peers.add(request.transport and request.transport.get_extra_info("peername"))
        assert request.headers["Authorization"] == "Bearer secret"
        assert (await request.json())["model"] == "r@1"
        await asyncio.sleep(0.5)
        at_once -= 1
        return web.json_response({"text": "schön \ud83d".encode("utf-8", "replace").decode()})

    async def scene() -> list[HttpAnswer]:
        async with serving(handler) as url, Vllm(url, HEADERS) as vllm:
            for _ in range(2):
                asked = [
                    vllm.request("POST", "chat/completions", {"model": "r@1"}) for _ in range(150)
                ]
                answers = await asyncio.gather(*asked)
            return answers

    answers = asyncio.run(scene())
    assert most > 100  # by default a pool of httpx or aiohttp has at most 100 connections
    assert len(peers) <= 150
    assert {answer.json()["text"] for answer in answers} == {"schön ?"}


def test_the_key_does_not_follow_a_redirect() -> None:
    told: list[str] = []

    async def thief(request: web.Request) -> web.Response:
        told.append(request.headers.get("Authorization", ""))
        return web.Response()

    async def scene() -> HttpAnswer:
        async with serving(thief) as other:

            async def moved(request: web.Request) -> web.Response:
                answer = web.Response(status=307, headers={"Location": f"{other}/models"})
                answer.set_cookie("session", "1")
                told.append(request.headers.get("Cookie", "no cookie"))
                return answer

            async with serving(moved) as url, Vllm(url, HEADERS) as vllm:
                await vllm.request("GET", "models")
                return await vllm.request("GET", "models")

    assert asyncio.run(scene()).status == 307
    assert told == ["no cookie"] * 2


def test_neither_a_proxy_for_other_hosts_nor_netrc_changes_a_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    got: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        got.append((str(request.raw_path), request.headers.get("Authorization", "none")))
        return web.Response()

    async def scene() -> None:
        async with serving(handler) as url:
            for bypass in ("127.0.0.1", "example.com"):
                monkeypatch.setenv("http_proxy", url.removesuffix("/v1"))
                monkeypatch.setenv("no_proxy", bypass)
                async with Vllm(url, {}) as vllm:
                    await vllm.request("GET", "models")

    asyncio.run(scene())
    assert [authorization for _, authorization in got] == ["none", "none"]
    assert got[0][0] == "/v1/models"
    assert got[1][0].endswith("/v1/models")
    assert got[1][0].startswith("http://127.0.0.1:")  # a proxy gets the whole URL of a request


async def _half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"{")
    assert request.transport is not None
    request.transport.close()
    return response


async def _never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (None, "ClientConnectorError: Cannot connect to host"),
        (_half, "Client.*Error"),
        (_never, "TimeoutError"),
    ],
    ids=["nobody listens", "an answer that is cut off", "too late"],
)
def test_a_vllm_that_does_not_answer_is_told_in_words(handler: Handler | None, kind: str) -> None:
    async def scene() -> None:
        async with serving(handler or _never) as url:
            with ports.reserve() as free:
                nobody = f"http://127.0.0.1:{free.port}/v1"
            url = url if handler else nobody
            async with Vllm(url, HEADERS) as vllm:
                await vllm.request("GET", "models", seconds=1.0)

    with pytest.raises(Unreachable, match=rf"^http://.*/v1/models does not answer \({kind}"):
        asyncio.run(scene())


def test_a_rollout_that_is_cancelled_ends_its_request() -> None:
    """When a rollout is cancelled, the client closes its request. The closed connection makes vLLM
    stop the answer."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            return await _never(request)
        except asyncio.CancelledError:
            ended.set()
            raise

    async def scene() -> None:
        async with serving(handler) as url, Vllm(url, HEADERS) as vllm:
            sampler = Sampler(vllm, "r", lambda: 1, None, {})
            rollout = asyncio.create_task(sampler.chat([{"role": "user", "content": "x"}]))
            async with asyncio.timeout(30):
                await begun.wait()
                rollout.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await rollout
                await ended.wait()

    asyncio.run(scene())


def test_a_turn_is_asked_for_again_while_vllm_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = [Unreachable("it is away"), Unreachable("still")]

    def answer(request: object) -> None:
        raise failures.pop(0) if failures else KeyError("it was asked again")

    async def rollout(patience: float) -> None:
        monkeypatch.setattr(sampler_module, "PATIENCE", patience)
        sampler = Sampler(MockVllm(answer), "r", lambda: 1, None, {})
        await sampler.chat([{"role": "user", "content": "x"}])

    with pytest.raises(KeyError, match="it was asked again"):
        asyncio.run(rollout(60))
    failures.append(Unreachable("for long"))
    with pytest.raises(Unreachable, match="for long"):
        asyncio.run(rollout(0))
