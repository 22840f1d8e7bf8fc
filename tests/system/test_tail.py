"""Followed files: whole lines, across truncation and rotation, and the end of a file."""

from tandem.system.tail import Tail, last_lines


def test_lines_are_followed_across_truncation_and_rotation(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    assert Tail(path).lines() == ["before"]
    tail, absent = Tail(path, from_end=True), Tail(tmp_path / "absent")
    assert (tail.lines(), absent.lines()) == ([], [])
    with path.open("a") as file:
        file.write("one\ntw")
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    path.rename(tmp_path / "log.1")
    path.write_text("three\n")  # rotated: the rest of the old file comes first
    assert tail.lines() == ["two", "three"]
    path.write_text("4\nx")  # truncated
    assert tail.lines() == ["4"]
    assert tail.lines(final=True) == ["x"]


def test_the_end_of_a_file_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "log"
    assert last_lines(path) == ""
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    assert last_lines(path, lines=2) == "line 98\nline 99"
    assert last_lines(path, most_bytes=20) == "line 98\nline 99"
    path.write_text("one long line")
    assert last_lines(path, most_bytes=4) == "line"
