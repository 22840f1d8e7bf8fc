"""Before vLLM starts: leftovers of the last one end, its devices are free, and there is no other one."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.system import processes

MIB = 2**20
# Becomes, as `tandem.inference.server.serve` does, a "vLLM" that leaves a child in a session of its own.
START = """
import os, sys
from tandem.config import load_settings
from tandem.errors import TandemError
from tandem.inference.server.room import make_room
from tandem.system.logs import configure
configure()
try:
    variables = make_room(load_settings(), free_seconds=float(os.environ["FREE_SECONDS"]))
except TandemError as error:
    sys.exit(str(error))
print("starts", flush=True)
os.execvpe("sh", ["sh", "-c", "setsid sleep 3600 & echo child $!; wait"], os.environ | variables)
"""


class Rooms:
    def __init__(self, directory: Path, **variables: str) -> None:
        self.table = directory / "table"
        program = directory / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\nexec cat {self.table}\n")
        program.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{program.parent}:{os.environ['PATH']}", "TANDEM_ROOT": str(directory / "root"),
            "TANDEM_DEVICE": "cuda", "TANDEM_INFERENCE_DEVICES": "1", "FREE_SECONDS": "20",
            "XDG_RUNTIME_DIR": str(directory), **variables,
        }  # fmt: skip
        self.marker = ("TANDEM_VLLM_OF", f"{directory / 'root'}:8000")
        self.running: list[subprocess.Popen[str]] = []

    def use(self, mib: int) -> None:
        """Of the second device; the first, which is not vLLM's, is always full."""
        self.table.write_text(f"0, GPU-aaaa, 80000\n1, GPU-bbbb, {mib}\n")

    def start(self) -> subprocess.Popen[str]:
        self.running.append(
            subprocess.Popen(
                [sys.executable, "-c", START],
                env=self.environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return self.running[-1]

    def child(self, running: subprocess.Popen[str]) -> int:
        assert running.stdout is not None
        assert running.stdout.readline() == "starts\n"
        return int(running.stdout.readline().split()[1])


@pytest.fixture
def rooms(tmp_path):
    made = Rooms(tmp_path)
    made.use(5)
    yield made
    for running in made.running:
        running.kill()
    # Before anybody reads to the end of the pipes, which the children have open.
    processes.kill_all(lambda: processes.marked(*made.marker), timeout=5)
    for running in made.running:
        running.communicate(timeout=10)


def test_a_child_that_outlived_its_vllm_is_ended_before_the_next_starts(rooms):
    first = rooms.start()
    child = rooms.child(first)
    first.kill()
    first.wait()
    assert processes.read(child) is not None
    second = rooms.start()
    assert rooms.child(second) != child
    now = processes.read(child)
    assert now is None or now.zombie


def test_a_second_one_is_refused_and_ends_nothing_of_the_first(rooms):
    child = rooms.child(rooms.start())
    second = rooms.start()
    assert "runs already" in second.communicate(timeout=20)[1]
    assert second.returncode == 1
    alive = processes.read(child)
    assert alive is not None
    assert not alive.zombie


def test_it_waits_until_its_device_is_free(rooms):
    rooms.use(70000)
    waiting = rooms.start()
    assert waiting.stderr is not None
    assert "waiting until the devices are free" in waiting.stderr.readline()
    time.sleep(1)
    assert waiting.poll() is None
    rooms.use(5)
    assert rooms.child(waiting)


def test_it_gives_up_naming_device_and_bytes(rooms):
    rooms.use(70000)
    rooms.environment["FREE_SECONDS"] = "1"
    refused = rooms.start()
    complaint = refused.communicate(timeout=20)[1]
    assert f"GPU-bbbb ({70000 * MIB} bytes in use)" in complaint
    assert "GPU-aaaa" not in complaint
    assert refused.returncode == 1


def test_without_gpus_nothing_is_asked(rooms):
    rooms.use(70000)
    rooms.environment["TANDEM_DEVICE"] = "cpu"
    assert rooms.child(rooms.start())
