"""A log line, as text and as JSON."""

import json
import re

import pytest

from tandem.system import logs


@pytest.mark.parametrize("as_json", [False, True])
def test_a_line_has_time_level_program_message_and_fields(monkeypatch, capsys, as_json):
    monkeypatch.setenv("TANDEM_LOG_FORMAT", "json" if as_json else "text")
    root = logs.logging.getLogger()
    before = root.handlers[:], root.level
    monkeypatch.setattr(root, "handlers", [])
    logs.configure()
    try:
        logs.Log("runner").warning("100% done", job="a b", seconds=1.23456, absent=None)
    finally:
        root.handlers, root.level = before
    line = capsys.readouterr().err
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    if as_json:
        entry = json.loads(line)
        assert re.fullmatch(stamp, entry.pop("time"))
        fields = {"job": "a b", "seconds": 1.23456}
        assert entry == {
            "level": "warning",
            "logger": "runner",
            "message": "100% done",
            "fields": fields,
        }
    else:
        assert re.fullmatch(rf"{stamp} WARNING runner: 100% done job='a b' seconds=1\.235\n", line)
