"""The tests follow a file in whole lines, across truncation and rotation, and read the end of a
file."""

import itertools

from tandem.system import tail
from tandem.system.tail import Tail, last_lines


def test_lines_are_followed_across_truncation_and_rotation(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    assert Tail(path).lines() == ["before"]
    follower, absent = Tail(path, from_end=True), Tail(tmp_path / "absent")
    assert (follower.lines(), absent.lines()) == ([], [])
    with path.open("a") as file:
        file.write("one\ntw")
    assert follower.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    path.rename(tmp_path / "log.1")
    path.write_text("three\n")  # the file was rotated, so the rest of the old file comes first
    assert follower.lines() == ["two", "three"]
    path.write_text("4\nx")  # truncated
    assert follower.lines() == ["4"]
    assert follower.lines(final=True) == ["x"]


def test_a_writer_that_is_faster_than_its_reader_keeps_no_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "_MOST", 1000)
    monkeypatch.setattr(tail, "_CHUNK", 100)
    path, lines = tmp_path / "log", [f"line {n}" for n in range(900)]
    path.write_text("".join(f"{line}\n" for line in lines[:800]))
    follower, parts = Tail(path), []
    parts.append(follower.lines())
    path.rename(tmp_path / "log.1")  # the file is rotated before all of it is read
    path.write_text("".join(f"{line}\n" for line in lines[800:]))
    while part := follower.lines():
        parts.append(part)
    assert list(itertools.chain(*parts)) == lines
    assert max(len("".join(part)) for part in parts) <= 1100
    assert Tail(path).lines(final=True) == lines[800:]


def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path) == ""
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    assert last_lines(path, lines=2) == "line 98\nline 99"
    assert last_lines(path, most_bytes=20) == "line 98\nline 99"
    path.write_text("one long line")
    assert last_lines(path, most_bytes=4) == "line"
