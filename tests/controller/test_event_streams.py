"""Server-Sent Events over real connections: resumed, kept alive, ended, and in nobody's way."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from api_server import KEY, claim, fail, rl_request, run_one, succeed, work
from tandem.client import AsyncTandem, Tandem
from tandem.controller import event_stream
from tandem.errors import NotFound, Unreachable

pytestmark = pytest.mark.usefixtures("no_jobs_left")


def blocks(text: str) -> list[dict[str, str]]:
    """The events of a stream's text, field by field; comments and `retry` left out."""
    found = [dict(line.split(": ", 1) for line in block.split("\n") if ": " in line) for block in text.split("\n\n")]
    return [block for block in found if "data" in block]


@pytest.fixture
def job(client, server, run):
    """A job that has succeeded: seven events, 0 to 6."""
    job = client.train(run, rl_request())
    run_one(server.spool)
    return job


def test_what_is_on_the_wire(http, job):
    answer = http.get(f"/v1/jobs/{job.id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.text.startswith("retry: ")
    events = blocks(answer.text)
    assert [int(e["id"]) for e in events] == list(range(7))
    assert [e["event"] for e in events][-1] == "succeeded"
    assert [json.loads(e["data"])["type"] for e in events] == [e["event"] for e in events]
    assert json.loads(events[3]["data"])["data"]["metrics"] == {"loss": 1.0}


@pytest.mark.parametrize(("how", "first"), [({"headers": {"Last-Event-ID": "3"}}, 4), ({"params": {"after": 5}}, 6)])
def test_resumed(http, job, how, first):
    events = blocks(http.get(f"/v1/jobs/{job.id}/events", **how).text)
    assert [int(e["id"]) for e in events] == list(range(first, 7))


def test_resumed_behind_the_end_ends_at_once(http, job, server):
    started = time.monotonic()
    assert blocks(http.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "6"}).text) == []
    server.spool.events.append(job.id, "served", step=1)
    events = blocks(http.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "6"}).text)
    assert [e["event"] for e in events] == ["served"]
    assert time.monotonic() - started < 5


def test_a_bad_last_event_id_is_named(http, job):
    answer = http.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "x"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "last-event-id")


def test_events_arrive_as_they_happen(client, server, run):
    job = client.train(run, rl_request())
    with ThreadPoolExecutor() as threads:
        events = client.events(job.id)
        claimed = claim(server.spool)
        assert threads.submit(next, events).result(timeout=20).type == "claimed"
        work(server.spool, claimed)
        rest = threads.submit(lambda: [event.type for event in events])
        succeed(server.spool, claimed)
        assert rest.result(timeout=20) == ["started", "loaded", "step", "step", "checkpoint", "succeeded"]


def test_keep_alive_and_open_streams_block_nobody(client, server, run, monkeypatch):
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.3)
    job = client.train(run, rl_request())

    async def scene() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, headers=headers, limits=limits, trust_env=False) as http:
            texts = ["" for _ in range(60)]

            async def listen(index: int) -> None:
                async with http.stream("GET", f"/v1/jobs/{job.id}/events", timeout=60) as response:
                    async for text in response.aiter_text():
                        texts[index] += text

            tasks = [asyncio.create_task(listen(i)) for i in range(60)]
            while not all(": keep-alive\n\n" in text for text in texts):
                await asyncio.sleep(0.05)
            slowest = 0.0
            for _ in range(5):
                started = time.monotonic()
                assert (await http.get("/healthz")).status_code == 200
                assert (await http.get(f"/v1/runs/{run}", timeout=30)).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
            for task in tasks[:30]:  # half of them hang up
                task.cancel()
            await asyncio.to_thread(run_one, server.spool)
            await asyncio.wait_for(asyncio.gather(*tasks[30:]), 60)
            assert all([b["event"] for b in blocks(t)][-1] == "succeeded" for t in texts[30:])
            assert slowest < 5

    asyncio.run(asyncio.wait_for(scene(), 120))


def test_the_server_stops_reading_when_a_client_hangs_up(server, client, run, monkeypatch):
    ended = threading.Event()
    follow = event_stream._follow

    async def noted(*arguments):
        try:
            async for event in follow(*arguments):
                yield event
        finally:
            ended.set()

    monkeypatch.setattr(event_stream, "_follow", noted)
    job = client.train(run, rl_request())
    with server.http() as http, http.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        next(response.iter_text())
        assert not ended.is_set()
    assert ended.wait(20)


def test_a_job_that_ended_without_a_terminal_event_ends_the_stream(client, server, run, monkeypatch):
    """Its writer was killed between two writes; the state counts."""
    monkeypatch.setattr(event_stream, "STATE_SECONDS", 0.2)
    job = client.train(run, rl_request())
    client.cancel(job.id)
    server.spool.paths.events_file(job.id).unlink()
    started = time.monotonic()
    assert list(client.events(job.id)) == []
    assert time.monotonic() - started < 10


def test_the_client_waits_only_so_long(client, server, run):
    job = client.train(run, rl_request())
    with pytest.raises(TimeoutError, match=job.id):
        client.wait_job(job.id, timeout=0)
    with pytest.raises(NotFound):
        next(client.events("nothing"))


def test_async_client(server, run):
    async def scene() -> list[str]:
        async with AsyncTandem(server.url, KEY) as tandem:
            job = await tandem.train_rl(run, rl_request()["groups"], packing={"sequence_length": 64})
            waiting = asyncio.create_task(tandem.wait_job(job.id))
            await asyncio.to_thread(run_one, server.spool)
            assert (await waiting).state == "succeeded"
            listed = [job.id for job in await tandem.list_jobs(run)]
            assert listed == [job.id]
            assert "trains" in await tandem.logs(job.id)
            return [e.type async for e in tandem.events(job.id, after=4)] + [
                e.type for e in await tandem.job_events(job.id, after=5)
            ]

    assert asyncio.run(scene()) == ["checkpoint", "succeeded", "succeeded"]


def test_unicode_line_separators_in_data_do_not_break_lines(client, server, run):
    job = client.train(run, rl_request())
    tail = "a\u2028b\x85c\x0bd\n"
    fail(server.spool, claim(server.spool), log_tail=tail)
    assert list(client.events(job.id))[-1].data["error"]["log_tail"] == tail


def test_a_controller_that_is_gone_is_unreachable_within_bounds(server, run, client):
    job = client.train(run, rl_request())
    with Tandem("http://127.0.0.1:9", KEY, patience=0.5) as lost:
        started = time.monotonic()
        with pytest.raises(Unreachable, match="TANDEM_URL"):
            list(lost.events(job.id))
        with pytest.raises(Unreachable):
            lost.get_run(run)
        assert time.monotonic() - started < 5
