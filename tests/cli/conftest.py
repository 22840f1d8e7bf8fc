import sys
from collections.abc import Callable

import pytest

from api_server import KEY, Server, no_jobs_left, root, server  # noqa: F401
from tandem.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch, capsys) -> Command:
    """Runs `tandem <arguments>` in this process; returns exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run


@pytest.fixture
def tandem(command: Command, server: Server, monkeypatch) -> Command:  # noqa: F811
    """The fixture `command`, with a running controller."""
    monkeypatch.setenv("TANDEM_URL", server.url)
    monkeypatch.setenv("TANDEM_API_KEY", KEY)
    monkeypatch.setenv("COLUMNS", "200")
    return command
