"""A job's events have no gaps and no duplicates, and readers see no torn event. (`test_spool_crash`
kills writers at every system call.)"""

import json
import multiprocessing
import threading
import time

import pytest

from spool.spool_tools import submit
from tandem.errors import NotFound
from tandem.spool import Spool

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def spool(spool: Spool) -> Spool:
    """A spool with the job `j`."""
    submit(spool, "j")
    return spool


def seqs(spool: Spool) -> list[int]:
    return [event.seq for event in spool.events.read("j")]


def test_append_read(spool):
    assert spool.events.read("j") == spool.events.read("nobody") == []
    with pytest.raises(NotFound):
        spool.events.append("nobody", "step")
    first = spool.events.append("j", "claimed", attempt=1, runner="me")
    second = spool.events.append(
        "j", "step", attempt=1, loss=0.5, nothing=float("nan"), text="a\nb\u2028é"
    )
    assert spool.events.read("j") == [first, second]
    assert (first.seq, second.seq, first.job, first.attempt, first.data) == (
        0,
        1,
        "j",
        1,
        {"runner": "me"},
    )
    assert spool.events.read("j")[1].data["text"] == "a\nb\u2028é"
    lines = [json.loads(line) for line in spool.paths.events_file("j").read_text().splitlines()]
    assert [line["seq"] for line in lines] == [0, 1]
    assert lines[1]["data"]["nothing"] is None
    assert abs(first.time - time.time()) < 5


@pytest.mark.parametrize("size", [10, 100, 70_000])
def test_a_torn_last_line_is_skipped_and_then_closed(spool, size):
    spool.events.append("j", "claimed", filler="x" * 70_000)
    whole = spool.events.append("j", "step", filler="y" * size)
    path = spool.paths.events_file("j")
    content = path.read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    for cut in {last + 1, last + 5, (last + len(content)) // 2, len(content) - 2}:
        path.write_bytes(content[:cut])
        assert seqs(spool) == [0]
        assert spool.events.append("j", "step", filler="z").seq == 1
        assert [event.data["filler"][0] for event in spool.events.read("j")] == ["x", "z"]
        assert spool.events.append("j", "step", filler="").seq == 2
    # Only the newline of the event is missing. Readers don't see the event until the next writer
    # has written the newline.
    path.write_bytes(content[:-1])
    assert seqs(spool) == [0]
    assert spool.events.append("j", "step").seq == 2
    assert spool.events.read("j")[1] == whole
    path.write_bytes(b'{"seq":0,"ti')  # the file has nothing but a torn line
    assert seqs(spool) == []
    assert spool.events.append("j", "claimed").seq == 0
    assert seqs(spool) == [0]


def test_several_processes_and_threads_append_while_others_read(spool):
    """Four processes with two threads each append events. The events' seq are 0, 1, 2, …. Every
    reader sees a growing prefix of the events, without gaps."""

    def write(marker):
        for i in range(25):
            Spool(spool.root).events.append("j", "step", marker=marker, i=i, filler="x" * (i * 97))

    def two_threads(process):
        threads = [threading.Thread(target=write, args=(f"{process}.{t}",)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    processes = [FORK.Process(target=two_threads, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    seen = 0
    while any(process.is_alive() for process in processes):
        found = seqs(spool)
        assert found == list(range(len(found)))
        assert len(found) >= seen
        seen = len(found)
    events = spool.events.read("j")
    assert [event.seq for event in events] == list(range(200))
    for marker in (f"{process}.{thread}" for process in range(4) for thread in range(2)):
        assert [event.data["i"] for event in events if event.data["marker"] == marker] == list(
            range(25)
        )
    assert len(spool.paths.events_file("j").read_text().splitlines()) == 200


def test_since_goes_on_where_it_was_and_waits_for_the_rest_of_a_line(spool):
    assert spool.events.since("j", 0) == ([], 0, 0)
    written = [spool.events.append("j", "step", number=number) for number in range(3)]
    path = spool.paths.events_file("j")
    offset = path.stat().st_size
    assert spool.events.since("j", 0) == (written, offset, offset)
    more = spool.events.append("j", "step", number=3)
    whole = path.read_bytes()
    for end, found in ((offset, []), (len(whole) - 5, []), (len(whole), [more])):
        path.write_bytes(whole[:end])
        assert spool.events.since("j", offset) == (found, len(whole) if found else offset, end)


def test_since_reads_in_parts_and_a_long_line_whole(spool):
    written = [spool.events.append("j", "step", number=number) for number in range(3)]
    long = spool.events.append("j", "step", text="x" * 1000)
    events, offset = [], 0
    for _ in range(10):
        found, offset, _ = spool.events.since("j", offset, 150)
        assert len(found) <= 1
        events += found
    assert events == [*written, long]
