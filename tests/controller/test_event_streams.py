"""Streams of Server-Sent Events over real connections are resumed, kept alive and ended."""

import asyncio
import json
import threading
import time

import anyio
import httpx
import pytest

from api_server import KEY, rl_request, run_one
from tandem.client import AsyncTandem
from tandem.controller import event_streams, routes_jobs
from tandem.controller.event_streams import PART_BYTES, EventStreams
from tandem.errors import NotFound


def blocks(text: str) -> list[dict[str, str]]:
    """The events of a stream's text, field by field, without comments and `retry`."""
    parsed = [
        dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        for block in text.split("\n\n")
    ]
    return [block for block in parsed if "data" in block]


@pytest.fixture
def job(client, server, run):
    """A job that has succeeded: seven events, 0 to 6."""
    job = client.train(run, rl_request())
    run_one(server.spool)
    return job


def test_the_bytes_of_a_stream_which_is_resumed_also_behind_the_terminal_event(http, job, server):
    answer = http.get(f"/v1/jobs/{job.id}/events")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == (
        "no-store",
        "no",
    )
    assert answer.text.startswith("retry: 1000\n\nid: 0\nevent: claimed\ndata: {")
    events = blocks(answer.text)
    assert [int(e["id"]) for e in events] == list(range(7))
    assert [e["event"] for e in events][-1] == "succeeded"
    assert [json.loads(e["data"])["type"] for e in events] == [e["event"] for e in events]
    assert json.loads(events[3]["data"])["data"]["metrics"] == {"loss": 1.0}

    def resumed(**how: dict[str, str]) -> list[str]:
        return [event["id"] for event in blocks(http.get(f"/v1/jobs/{job.id}/events", **how).text)]

    assert resumed(headers={"Last-Event-ID": "3"}) == ["4", "5", "6"]
    assert resumed(params={"after": "5"}) == ["6"]
    assert resumed(headers={"Last-Event-ID": "6"}) == []
    server.spool.events.append(job.id, "served", step=1)
    assert resumed(headers={"Last-Event-ID": "6"}) == ["7"]
    answer = http.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "x"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "last-event-id")


def test_sixty_open_streams_are_kept_alive_and_block_no_request(client, server, run, monkeypatch):
    monkeypatch.setattr(routes_jobs, "KEEP_ALIVE_SECONDS", 0.3)
    job = client.train(run, rl_request())
    texts = [""] * 60

    async def scene() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, limits=limits, trust_env=False
        ) as http:

            async def listen(index: int) -> None:
                async with http.stream("GET", f"/v1/jobs/{job.id}/events", timeout=60) as response:
                    async for text in response.aiter_text():
                        texts[index] += text

            tasks = [asyncio.create_task(listen(i)) for i in range(60)]
            while not all(": keep-alive\n\n" in text for text in texts):
                await asyncio.sleep(0.05)
            for path in ("/healthz", f"/v1/runs/{run}"):
                assert (await http.get(path, timeout=30)).status_code == 200
            for task in tasks[:30]:  # half of the clients disconnect
                task.cancel()
            await asyncio.to_thread(run_one, server.spool)
            await asyncio.gather(*tasks[30:])

    asyncio.run(asyncio.wait_for(scene(), 120))
    assert all(blocks(text)[-1]["event"] == "succeeded" for text in texts[30:])


def test_the_server_stops_reading_when_a_client_hangs_up(server, client, run, monkeypatch):
    ended = threading.Event()
    follow = EventStreams.follow

    async def noted(*arguments, **more):
        try:
            async for event in follow(*arguments, **more):
                yield event
        finally:
            ended.set()

    monkeypatch.setattr(EventStreams, "follow", noted)
    job = client.train(run, rl_request())
    with server.http() as http, http.stream("GET", f"/v1/jobs/{job.id}/events") as response:
        # The variable keeps the iterator alive. If the iterator ended, httpx would close the
        # connection.
        parts = response.iter_text()
        assert next(parts).startswith("retry")
        assert not ended.is_set()
    assert ended.wait(120)


def test_a_stream_ends_with_its_job_even_without_a_terminal_event(client, server, run, monkeypatch):
    """If the writer was killed before it wrote the terminal event, the stream ends because the
    job's state is final."""
    monkeypatch.setattr(event_streams, "STATE_SECONDS", 0.2)
    job = client.train(run, rl_request())
    client.cancel(job.id)
    server.spool.paths.events_file(job.id).unlink()
    assert list(client.events(job.id)) == []


def test_waiting_for_a_job_times_out(client, run):
    job = client.train(run, rl_request())
    with pytest.raises(TimeoutError, match=job.id):
        client.wait_job(job.id, timeout=0)
    with pytest.raises(NotFound):
        next(client.events("nothing"))


def test_async_client(server, run):
    async def scene() -> list[str]:
        async with AsyncTandem(server.url, KEY) as tandem:
            job = await tandem.train_rl(
                run, rl_request()["groups"], packing={"sequence_length": 64}
            )
            waiting = asyncio.create_task(tandem.wait_job(job.id))
            await asyncio.to_thread(run_one, server.spool)
            assert (await waiting).state == "succeeded"
            assert [job.id for job in await tandem.list_jobs(run)] == [job.id]
            assert "trains" in await tandem.logs(job.id)
            last = [event.type async for event in tandem.events(job.id, after=4)]
            return last + [event.type for event in await tandem.job_events(job.id, after=5)]

    assert asyncio.run(scene()) == ["checkpoint", "succeeded", "succeeded"]


@pytest.fixture
def reads(server, monkeypatch) -> list[int]:
    """The sizes, in bytes, of the parts in which event files were read."""
    noted, events = [], type(server.spool.events)
    since = events.since

    def note(*arguments):
        read = since(*arguments)
        noted.append(read[2] - arguments[2])
        return read

    monkeypatch.setattr(events, "since", note)
    return noted


def test_a_stream_reads_its_file_in_parts_and_only_as_its_client_takes_them(
    client, server, run, reads
):
    job = client.train(run, rl_request()).id
    for number in range(300):
        server.spool.events.append(job, "step", metrics={"text": "x" * 1000}, step=number)
    # The event is longer than PART_BYTES.
    server.spool.events.append(job, "step", metrics={"text": "x" * 3 * PART_BYTES}, step=300)

    async def scene() -> int:
        blocks = EventStreams(server.spool).follow(job, -1, wait=False, stopping=anyio.Event())
        received = b""
        for taken in range(10):
            received += await anext(blocks)
            await asyncio.sleep(0.01)
            assert len(reads) == taken
        async for block in blocks:
            received += block
        return received.count(b"event: step")

    assert asyncio.run(scene()) == 301
    assert sorted(reads)[-2] <= PART_BYTES
    assert max(reads) <= 4 * PART_BYTES


def test_many_readers_of_many_jobs_cost_one_look_at_their_files(
    client, server, run, reads, monkeypatch
):
    jobs = [client.train(run, rl_request()).id for _ in range(5)]
    looks, look = [], EventStreams._look
    monkeypatch.setattr(
        EventStreams, "_look", lambda *arguments: looks.append(1) or look(*arguments)
    )

    async def scene() -> None:
        streams = EventStreams(server.spool)
        readers = [streams.follow(job, -1, wait=True, stopping=anyio.Event()) for job in jobs * 10]
        for reader in readers:
            assert await anext(reader) == b"retry: 1000\n\n"
        for number in (1, 2):
            coming = [asyncio.create_task(anext(reader)) for reader in readers]
            looks.clear()
            begin = time.monotonic()
            while (
                len(reads) < 50 * (2 * number - 1) or not looks
            ) and time.monotonic() < begin + 60:
                await asyncio.sleep(0.05)
            await asyncio.sleep(1)
            assert len(reads) == 50 * (2 * number - 1)  # unchanged files are not read
            assert 0 < len(looks) <= 1 + (time.monotonic() - begin) / event_streams.POLL_SECONDS
            for job in jobs:
                await asyncio.to_thread(server.spool.events.append, job, "step", step=number)
            assert len(set(await asyncio.wait_for(asyncio.gather(*coming), 20))) == len(jobs)
        for reader in readers:
            await reader.aclose()  # type: ignore[attr-defined]
        del readers, reader, coming
        assert len(streams._files) == 0

    asyncio.run(scene())


def test_a_reader_that_is_ahead_of_the_last_look_waits_for_the_next_one(
    client, server, run, reads, monkeypatch
):
    monkeypatch.setattr(event_streams, "POLL_SECONDS", 0.5)
    job = client.train(run, rl_request()).id
    append, size = server.spool.events.append, EventStreams._size
    appended = []

    def look(streams: EventStreams, job: str) -> int:
        seen = size(streams, job)
        # the second event is written after the read that saw the first one
        if seen and not appended:
            appended.append(append(job, "step", step=2))
        return seen

    monkeypatch.setattr(EventStreams, "_size", look)

    async def scene() -> None:
        blocks = EventStreams(server.spool).follow(job, -1, wait=True, stopping=anyio.Event())
        await anext(blocks)
        for number in (1, 3):
            coming = asyncio.create_task(anext(blocks))
            await asyncio.sleep(1.5)
            assert len(reads) == number
            await asyncio.to_thread(append, job, "step", step=number)
            assert (await asyncio.wait_for(coming, 20)).count(b"event: step") == (
                2 if number == 1 else 1
            )
        await blocks.aclose()  # type: ignore[attr-defined]

    asyncio.run(scene())
