"""Processes are found by their environment."""

import os
import signal
import subprocess

import pytest

from tandem.system import processes


def test_a_process_that_is_about_to_execute_a_program_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment of a process reads as empty during its exec. An earlier search missed 20 of
    300 such processes."""
    for number in range(100):
        mark = ("TANDEM_TEST_MARK", str(number))
        shell = subprocess.Popen(
            ["sh", "-c", "setsid sleep 60 & echo $!; wait"],
            env=os.environ | dict([mark]),
            stdout=subprocess.PIPE,
            text=True,
        )
        with shell:
            assert shell.stdout is not None
            child = processes.read_process(int(shell.stdout.readline()))
            assert child is not None
            with monkeypatch.context() as patched:
                patched.setattr(processes, "all_processes", lambda child=child: [child])
                found = processes.marked(*mark)
            processes.send(child, signal.SIGKILL)
            shell.kill()
        assert [one.pid for one in found] == [child.pid]
