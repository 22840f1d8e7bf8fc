"""A `tandem up` of small programs, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from free_ports import free_ports
from tandem.system import processes
from waiting import until

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
AB = (
    {"name": "a", "module": "fake_program a", "port": "controller"},
    {"name": "b", "module": "fake_program b"},
)


class Up:
    """A `tandem up`. `programs`: the fields of each `Program`. The constructor does not wait for
    the programs. No process is left after `close`."""

    def __init__(
        self, root: Path, role: str = "all", programs: tuple[dict, ...] = AB, **variables: str
    ) -> None:
        self.root = root
        self.ports = free_ports(2)
        self.environment = os.environ | {
            "TANDEM_ROOT": str(root),
            "TANDEM_BASE_MODEL": "none",
            "PYTHONPATH": PATH,
            "ROLE": role,
            "TANDEM_CONTROLLER_PORT": str(self.ports[0]),
            "TANDEM_INFERENCE_PORT": str(self.ports[1]),
            "PROGRAMS": json.dumps(programs),
            **variables,
        }
        self.out = root / f"terminal of {role}"
        self.process = self.start(self.out)

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        with out.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "start_up"], env=self.environment, stdout=file, stderr=file
            )

    def text(self) -> str:
        return self.out.read_text()

    def until(self, wanted: str, count: int = 1) -> None:
        until(
            repr(wanted),
            lambda: self.text().count(wanted) >= count or self.process.poll() is not None,
        )
        assert self.text().count(wanted) >= count, f"ended before {wanted!r}"

    def left(self) -> list[processes.Process]:
        return processes.marked("TANDEM_ROOT", str(self.root))

    def pid(self, *words: str) -> int:
        """The pid of the process whose command line has these words after `-m`."""
        for process in self.left():
            with suppress(OSError):  # the process has ended meanwhile
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode().split("\0")
                if "-m" in line and line[line.index("-m") + 1 :][: len(words)] == list(words):
                    return process.pid
        raise AssertionError(f"{words} does not run")

    def wait(self, timeout: float = 120) -> int:
        return self.process.wait(timeout)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        # pytest shows this output if the test failed.
        print(f"---- {self.out.name}", self.text(), sep="\n")
        processes.kill_all(self.left, timeout=10)
