"""Events: no gaps, no duplicates, nothing torn."""

import json
import os
import threading
import time

import pytest

from spool.spool_tools import dying_at, in_child, killed, records
from tandem.spool import Spool


def test_append_read(spool):
    assert spool.events.read("j") == []
    first = spool.events.append("j", "claimed", attempt=1, runner="me")
    second = spool.events.append("j", "step", attempt=1, loss=0.5, nothing=float("nan"), text="a\nb\u2028é")
    assert spool.events.read("j") == [first, second]
    assert (first.seq, second.seq, first.job, first.attempt, first.data) == (0, 1, "j", 1, {"runner": "me"})
    assert spool.events.read("j", after=0)[0].data["text"] == "a\nb\u2028é"
    assert spool.events.read("j", after=1) == []
    lines = records(spool.paths.events_file("j"))
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
        assert [event.seq for event in spool.events.read("j")] == [0]
        again = spool.events.append("j", "step", filler="z")
        assert again.seq == 1
        assert [event.data["filler"][0] for event in spool.events.read("j")] == ["x", "z"]
        assert spool.events.append("j", "step", filler="").seq == 2
    # Only the newline is missing: the event was not there for readers; it counts once a writer has closed it.
    path.write_bytes(content[:-1])
    assert [event.seq for event in spool.events.read("j")] == [0]
    assert spool.events.append("j", "step").seq == 2
    assert spool.events.read("j")[1] == whole


def test_a_file_of_nothing_but_a_torn_line(spool):
    path = spool.paths.events_file("j")
    path.write_bytes(b'{"seq":0,"ti')
    assert spool.events.read("j") == []
    assert spool.events.append("j", "claimed").seq == 0
    assert [event.seq for event in spool.events.read("j")] == [0]


def test_several_processes_and_threads_append_while_others_read(spool):
    """4 processes of 2 threads; seq is 0, 1, 2, …; every reader sees a growing, gapless prefix."""

    def write(marker):
        for i in range(25):
            Spool(spool.root).events.append("j", "step", marker=marker, i=i, filler="x" * (i * 97))

    def two(process):
        threads = [threading.Thread(target=write, args=(f"{process}.{t}",)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    children = []
    for process in range(4):
        if (pid := os.fork()) == 0:
            two(process)
            os._exit(0)
        children.append(pid)
    seen = 0
    deadline = time.monotonic() + 60
    while seen < 200 and time.monotonic() < deadline:
        events = spool.events.read("j")
        assert [event.seq for event in events] == list(range(len(events)))
        assert len(events) >= seen
        seen = len(events)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    events = spool.events.read("j")
    assert [event.seq for event in events] == list(range(200))
    for process in range(4):
        for thread in range(2):
            own = [event.data["i"] for event in events if event.data["marker"] == f"{process}.{thread}"]
            assert own == list(range(25))
    for line in spool.paths.events_file("j").read_text().splitlines():
        json.loads(line)


def test_writers_that_are_killed_leave_no_gap(spool):
    """Every writer dies somewhere in its append; the numbers stay whole."""

    def append(count):
        with dying_at(count, killed):
            spool.events.append("j", "step", filler="x" * 50)

    for count in range(1, 30):
        code = in_child(lambda count=count: append(count))
        events = spool.events.read("j")
        assert [event.seq for event in events] == list(range(len(events)))
        if code == 0:
            break
    else:
        pytest.fail("append never ended")
    assert spool.events.append("j", "succeeded").seq == len(events)


def test_since_goes_on_where_it_was_and_waits_for_the_rest_of_a_line(spool):
    assert spool.events.since("j", 0) == ([], 0)
    written = [spool.events.append("j", "step", number=number) for number in range(3)]
    seen, offset = spool.events.since("j", 0)
    assert seen == written
    assert spool.events.since("j", offset) == ([], offset)
    path = spool.paths.events_file("j")
    content = path.read_bytes()
    more = spool.events.append("j", "step", number=3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert spool.events.since("j", offset) == ([], offset)
    path.write_bytes(whole)
    assert spool.events.since("j", offset) == ([more], len(whole))
    assert len(content) == offset
