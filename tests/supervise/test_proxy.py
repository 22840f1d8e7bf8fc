"""The real HAProxy with the rule of `tandem.supervise.proxy`, in front of servers that answer with
their names."""

import asyncio
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

import fake_vllm
from fake_vllm import FakeVllm
from free_ports import free_ports
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.supervise import drain, proxy
from tandem.supervise.supervisord import PROGRAMS, programs_of
from tandem.vllm_client.names import ADMIN_HEADER, GROUP_HEADER, READY_ROUTE, SESSION_HEADER
from waiting import until

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy") is None, reason=f"haproxy is not installed: {proxy.INSTALL}"
)


class Server:
    """A server that answers with its name and the request, or with 503 while it is not ready. A
    replica's vLLM also answers with 503 while it is not ready."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self.port = name, port
        self.ready = True
        self.seconds = 0.0
        self.asked: list[str] = []
        self.checks = 0  # answers to HAProxy's health checks
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", port, backlog=512)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *fields = head.strip().split("\r\n")
                headers = {
                    name.lower(): value for name, _, value in (f.partition(": ") for f in fields)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status = "200 OK" if self.ready else "503 Service Unavailable"
                if (path := line.split()[1]) == READY_ROUTE:
                    self.checks += 1
                else:
                    self.asked.append(path)
                    await asyncio.sleep(self.seconds)
                got = {"server": self.name, "headers": headers, "body": len(body)}
                answer = json.dumps(got).encode()
                start = f"HTTP/1.1 {status}\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(start.encode() + answer)
                await writer.drain()
        writer.close()

    def become(self, *, ready: bool) -> None:
        """Changes `ready`, and waits until HAProxy knows. HAProxy marks a server as ready or not
        ready after two health checks. HAProxy makes the third check only after it has read the
        second answer."""
        self.ready, before = ready, self.checks
        until("HAProxy has checked", lambda: self.checks >= before + 3)

    def die(self) -> None:
        """Stops listening, and closes the connections. A test may call `die` again for a dead
        server."""

        async def close() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)


class Proxied:
    def __init__(self, tmp_path: Path, count: int = 3) -> None:
        port, *ports = free_ports(1 + count)
        self.servers = {f"s{n}": Server(f"s{n}", port) for n, port in enumerate(ports)}
        settings = Settings(inference_port=port, device="cpu")
        path = tmp_path / "haproxy.cfg"
        path.write_text(proxy.haproxy_config(settings, [f"127.0.0.1:{p}" for p in ports]))
        self.process = subprocess.Popen(["haproxy", "-db", "-f", str(path)])
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        until("the proxy answers", self.up)

    def up(self) -> bool:
        try:
            return self.http.get("/v1/models").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, group: str | None = None, session: str | None = None, **more: Any) -> Any:
        """The request as the answering server got it. The key `server` has this server's name."""
        headers = {GROUP_HEADER: group, SESSION_HEADER: session} | more.pop("headers", {})
        given = {name: value for name, value in headers.items() if value is not None}
        answer = self.http.post("/v1/chat/completions", headers=given, **more)
        answer.raise_for_status()
        return answer.json()

    def ask_all(self, keys: list[tuple[str, str]]) -> list[str]:
        """The servers that answer one request for each (group, session). All requests are sent at
        once."""

        async def ask(client: aiohttp.ClientSession, group: str, session: str) -> str:
            headers = {GROUP_HEADER: group, SESSION_HEADER: session}
            async with client.post("/v1/chat/completions", headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return str((await answer.json(content_type=None))["server"])

        async def ask_all() -> list[str]:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(
                str(self.http.base_url), connector=connector
            ) as client:
                return await asyncio.gather(*(ask(client, *key) for key in keys))

        return asyncio.run(ask_all())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for server in self.servers.values():
            server.die()


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[Proxied]:
    running = Proxied(tmp_path)
    yield running
    running.close()


@pytest.mark.slow
@needs_haproxy
def test_a_group_starts_on_one_server_and_a_rollout_stays(proxied: Proxied) -> None:
    groups, samples = 48, 8
    keys = [(f"group-{g}", f"rollout-{g}-{s}") for g in range(groups) for s in range(samples)]
    random.Random(1).shuffle(keys)  # requests of all groups are mixed, as in continuous operation
    for server in proxied.servers.values():
        server.seconds = 1.0  # the requests of a step run at the same time
    first = proxied.ask_all(keys)
    on = {
        group: Counter(server for key, server in zip(keys, first, strict=True) if key[0] == group)
        for group, _ in keys
    }
    main = [max(servers.values()) / samples for servers in on.values()]
    assert sum(main) / groups >= 0.95, main
    requests = Counter(first)
    assert len(requests) == 3
    assert max(requests.values()) <= 1.6 * groups * samples / 3, requests
    for _turn in range(2):
        assert proxied.ask_all(keys) == first, "later turns are where the cache is"


@needs_haproxy
def test_requests_of_a_server_that_dies_or_is_not_ready_are_answered_by_the_others(
    proxied: Proxied,
) -> None:
    keys = [(f"group-{n}", f"rollout-{n}") for n in range(60)]
    first = proxied.ask_all(keys)
    mine = [key for key, server in zip(keys, first, strict=True) if server == "s0"][:10]
    proxied.servers["s0"].become(ready=False)
    asked = len(proxied.servers["s0"].asked)
    after = [proxied.ask(*key)["server"] for key in mine]
    assert "s0" not in after
    assert [proxied.ask(*key)["server"] for key in mine] == after, "they stay where they went"
    proxied.ask_all([(f"new-{n}", f"new-{n}") for n in range(30)])
    assert len(proxied.servers["s0"].asked) == asked
    proxied.servers["s0"].ready = True
    names = (f"{n}" for n in itertools.count())
    until(
        "it gets requests again",
        lambda: "s0" in [proxied.ask(name := next(names), name)["server"] for _ in range(8)],
    )
    # The server no longer listens, and no health check has failed yet.
    on = proxied.ask_all(keys)
    died = [key for key, server in zip(keys, on, strict=True) if server == "s1"]
    proxied.servers["s1"].die()
    assert proxied.ask(*died[0])["server"] != "s1"
    assert "s1" not in proxied.ask_all(died)


@needs_haproxy
def test_a_request_that_a_server_takes_to_its_grave_is_sent_to_another(tmp_path: Path) -> None:
    """All 20 requests are answered, although SIGKILL ends one of two servers while this server
    answers requests."""
    port, dying, living = free_ports(3)
    code = (
        "import socket, sys, time\n"
        f"s = socket.create_server(('127.0.0.1', {dying}), backlog=512)\n"
        "held = []\n"
        "while True:\n"
        "    c, _ = s.accept()\n"
        "    if c.recv(65536).startswith(b'GET /tandem/ready'):\n"
        "        c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n'); c.close()\n"
        "    else:\n"
        "        held.append(c); print(len(held), flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    other = Server("living", living)
    path = tmp_path / "haproxy.cfg"
    servers = [f"127.0.0.1:{dying}", f"127.0.0.1:{living}"]
    path.write_text(proxy.haproxy_config(Settings(inference_port=port, device="cpu"), servers))
    haproxy = subprocess.Popen(["haproxy", "-db", "-f", str(path)])
    try:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        def ask(number: int) -> int:
            # Requests with odd numbers are as long as a conversation.
            body = b"x" * (60_000 if number % 2 else 100)
            headers = {GROUP_HEADER: f"g{number}"}
            return httpx.post(url, content=body, headers=headers, timeout=60).status_code

        other.become(ready=False)  # all requests go to the server that dies
        with ThreadPoolExecutor(20) as pool:
            answers = [pool.submit(ask, number) for number in range(20)]
            assert process.stdout is not None
            while process.stdout.readline().strip() != "20":
                assert process.poll() is None
            other.become(ready=True)
            process.send_signal(signal.SIGKILL)
            assert [answer.result() for answer in answers] == [200] * 20
    finally:
        for one in (process, haproxy):
            one.kill()
            one.wait()
        other.die()


@needs_haproxy
def test_admin_routes_never_pass_and_requests_arrive_as_they_were_sent(proxied: Proxied) -> None:
    for path in (
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/sleep",
        "/pause",
        "/update_weights",
        "/tandem/merged",
        "/tandem/merged/swap",
        READY_ROUTE,
        "/reset_prefix_cache",
        "/is_sleeping",
        "//sleep",
        "/v1/models/../../sleep",
        "/rollout/sessions/a/b/finish",
    ):
        for method in ("GET", "POST"):
            url = f"{proxied.http.base_url}".rstrip("/") + path
            answer = proxied.http.request(method, url, headers={ADMIN_HEADER: "token"})
            assert answer.status_code == 404, (method, path)
    assert all(
        path in ("/v1/models", "/v1/chat/completions")
        for server in proxied.servers.values()
        for path in server.asked
    )
    assert proxied.http.post("/rollout/sessions/a-1/finish").status_code == 200
    headers = {ADMIN_HEADER: "token", "Authorization": "Bearer key", "X-Own": "1"}
    got = proxied.ask("g", "r", headers=headers, content=b"x" * 3_000_000)
    assert got["body"] == 3_000_000
    assert got["headers"].items() >= {"authorization": "Bearer key", "x-own": "1"}.items()
    assert got["headers"].items() >= {SESSION_HEADER: "r", GROUP_HEADER: "g"}.items()
    assert ADMIN_HEADER not in got["headers"], "no request from outside is the publisher's"
    assert "haproxy_server_status" in proxied.http.get("/metrics").text
    without = Counter(proxied.ask()["server"] for _ in range(30))
    assert len(without) == 3, "strangers are dealt round"


@needs_haproxy
def test_the_configuration_for_a_cluster_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    settings = Settings(inference_host="::", api_key="k")
    path.write_text(proxy.haproxy_config(settings, resolve="replicas.ns.svc.cluster.local:8000"))
    done = subprocess.run(
        ["haproxy", "-c", "-f", str(path)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_several_servers_need_haproxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InvalidInput, match="apt-get install haproxy"):
        proxy.check_installed()


def test_the_programs_of_several_servers_are_pairs_behind_one_proxy() -> None:
    one = Settings(device="cpu")
    assert programs_of(one, "inference") == PROGRAMS["inference"]
    two = Settings(device="cpu", inference_replicas=2, inference_port=9000)
    programs = {program.name: program for program in programs_of(two, "all")}
    assert list(programs) == [
        *("exporter", "controller", "proxy"),
        *("vllm-0", "publisher-0", "vllm-1", "publisher-1"),
        "runner",
    ]
    assert programs["vllm-1"].number == 9002
    for name in ("vllm-1", "publisher-1"):
        own = dict(programs[name].environment)
        assert own["TANDEM_REPLICA"] == "1"
        assert own["TANDEM_INFERENCE_URL"] == "http://127.0.0.1:9002"
        assert own["TANDEM_INFERENCE_PORT"] == "9002"
    assert programs_of(two, "trainer") == PROGRAMS["trainer"]


@pytest.mark.slow
def test_a_server_that_is_about_to_be_stopped_ends_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are replaced as in a rolling upgrade. No request fails or is cut off."""
    vllm = FakeVllm()
    vllm.start()
    vllm.ready_until, vllm.in_use = time.monotonic() + 3600, {"run@1"}
    leaving = tmp_path / "leaving"
    monkeypatch.setattr(drain, "leaving_file", lambda _root: leaving)
    keys = {"api_key": fake_vllm.API_KEY, "admin_token": fake_vllm.ADMIN_TOKEN}
    settings = Settings(root=tmp_path, inference_url=vllm.url, replica="a", device="cpu", **keys)
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(drain.drain(settings, 30)))
    thread.start()
    until("the publisher is told", leaving.exists)
    time.sleep(2)
    vllm.ready_until = 0.0  # the server's publisher has read the file
    time.sleep(2)
    assert not ended, "a request runs"
    vllm.in_use = set()
    begin = time.monotonic()
    thread.join(20)
    assert ended == [True]
    assert time.monotonic() - begin >= drain.CHECKED_SECONDS - 0.5, "the proxy has seen it"
    vllm.in_use = {"run@1"}
    assert not drain.drain(settings, 1.0), "it is stopped in any case"
    vllm.stop()
    assert drain.drain(settings, 30.0), "nobody to wait for"
