"""Moments for signals to programs, damage that the spool tolerates, conditions of the volume, and
wrong clocks."""

import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from soak.check import JUNK, TERMINAL
from soak.client import Client, Ledger
from soak.stack import Stack, Victim, Volume
from tandem.errors import TandemError
from tandem.spool.locks import LockHeldError, file_lock
from tandem.spool.paths import Paths

CONTAINER = "trainer container"
"""A victim that stands for all of the trainer's processes at once; they get SIGKILL."""
HOSTS = "hosts' containers"
"""A victim that stands for all processes of the hosts at once; they get SIGKILL."""
WEIGHTS = {
    "rank": 34,
    "leader": 4,
    "publisher": 14,
    "vllm": 14,
    "controller": 16,
    "exporter": 2,
    "runner": 10,
    "forkserver": 5,
    "agent": 4,
    "up": 4,
    "supervisord": 3,
    CONTAINER: 3,
}
HOSTS_WEIGHTS = {name: weight for name, weight in WEIGHTS.items() if name != "agent"} | {
    "host": 10,
    "runner": 14,
    HOSTS: 3,
}
"""The weights of victims with the executor `hosts`, which has no torchrun."""
IMPORTS = {"runner", "forkserver", "agent", "up", "supervisord", CONTAINER}
"""Programs that are struck less often. After their death another process imports torch again, which
takes seconds."""
HOSTS_IMPORTS = {"forkserver", "host", HOSTS}
EVENTS = ("claimed", "started", "loaded", "step", "checkpoint", "released", "requeued", *TERMINAL)
SIGNALS = {"kill": 70, "term": 15, "stop-kill": 8, "stop-continue": 7}
CLOCKS = (-400 * 86400.0, -3600.0, -90.0, 90.0, 3600.0, 400 * 86400.0)


class Moments:
    """Waits for a random time, or for a moment. A moment is the type of a job's newest event, or
    `request`. At the moment `request` a request of the client is under way."""

    def __init__(self, root: Path, client: Client, rng: random.Random) -> None:
        self._root, self._client, self._rng = root, client, rng

    def choose(self, program: str) -> str:
        if program in ("rank", "leader"):  # these processes live while a job runs
            return self._rng.choice(
                ("claimed", "started", "loaded", "step", "step", "checkpoint", "checkpoint")
            )
        if self._rng.random() < 0.4:
            return "random"
        return "request" if program == "controller" else self._rng.choice(EVENTS)

    def wait(self, moment: str, longest: float, meanwhile: Callable[[], None]) -> str:
        """Waits for the moment. Returns the moment, or "random" if it did not come within `longest`
        seconds. Calls `meanwhile` while it waits."""
        if moment == "random":
            time.sleep(self._rng.uniform(0, min(1.5, longest)))
            return moment
        end = time.monotonic() + longest
        known: dict[str, str] = {}  # job -> the job's newest event
        if moment != "request":
            self._came(moment, known)
        while time.monotonic() < end:
            if self._client.sending.is_set() if moment == "request" else self._came(moment, known):
                time.sleep(self._rng.choice([0, 0, 0.01, 0.05]) * self._rng.random() * 2)
                return moment
            meanwhile()
            time.sleep(0.006)
        return "random"

    def _came(self, moment: str, known: dict[str, str]) -> bool:
        """Whether some job's newest event is `moment`, and was written since the last call. The
        jobs are the running jobs, and the jobs that ran at an earlier call."""
        came = False
        active = [path.name.split(",")[-1] for path in (self._root / "jobs/active").glob("[!.]*")]
        for job in {*active, *known}:
            try:
                content = Paths(self._root).events_file(job).read_bytes()
            except (OSError, TandemError):
                continue
            last = content.rstrip(b"\n").rpartition(b"\n")[2]
            kind = next((kind for kind in EVENTS if f'"type": "{kind}"'.encode() in last), "")
            came = came or (kind == moment and known.get(job) != kind)
            known[job] = kind
        return came


class Strikes:
    """Sends signals to programs. A SIGSTOP is followed later by SIGCONT or SIGKILL."""

    def __init__(self, rng: random.Random, ledger: Ledger) -> None:
        self._rng, self._ledger = rng, ledger
        self._later: list[tuple[float, Victim, signal.Signals]] = []

    def kill_container(self, victims: list[Victim]) -> bool:
        """Signals the programs; returns whether any of them still lived."""
        killed = [victim for victim in victims if victim.send(signal.SIGKILL)]
        for victim in killed:
            self._ledger.write("strike", program=victim.program, how="kill")
        return bool(killed)

    def strike(self, victim: Victim, how: str) -> bool:
        """Signals the victim. Returns whether the victim still lived."""
        first = {"kill": signal.SIGKILL, "term": signal.SIGTERM}.get(how, signal.SIGSTOP)
        if not victim.send(first):
            return False
        self._ledger.write("strike", program=victim.program, how=how)
        if how.startswith("stop"):
            last = signal.SIGKILL if how == "stop-kill" else signal.SIGCONT
            self._later.append((time.monotonic() + self._rng.uniform(0.1, 2.5), victim, last))
        return True

    def follow(self, *, all_now: bool = False) -> None:
        due = [entry for entry in self._later if all_now or entry[0] < time.monotonic()]
        self._later = [entry for entry in self._later if entry not in due]
        for _, victim, number in due:
            victim.send(number)


class Conditions:
    """Conditions of the volume and of the clocks. There is at most one condition of each kind at a
    time, and it lasts 0.5 to 8 s."""

    def __init__(self, stack: Stack, volume: Volume, rng: random.Random, ledger: Ledger) -> None:
        self._stack, self._volume, self._rng, self._ledger = stack, volume, rng, ledger
        self._now: dict[str, float] = {}  # kind of condition -> time of the condition's end
        self._clock: dict[str, float] = {}
        self._events: dict[str, int] = {}  # job -> number of its events when the volume became full
        self.kinds = ["slow", "clocks", *(["full", "read-only"] if volume.mounted else [])]

    def begin(self) -> str | None:
        """Begin a condition; returns its kind."""
        kind = self._rng.choice(self.kinds)
        if kind in self._now or (self.refuses_writes and kind in ("full", "read-only")):
            return None
        if kind == "read-only" and not self._volume.read_only():
            return None
        self._now[kind] = time.monotonic() + self._rng.uniform(
            0.5, 2.5 if kind in ("full", "read-only") else 8.0
        )
        if kind == "full":
            self._events = self._counted()
            self._volume.fill()
        elif kind == "clocks":
            modules = (
                "tandem",
                "tandem.controller",
                "tandem.trainer.runner",
                "tandem.trainer.agent",
                "tandem.inference.publisher",
                "tandem.trainer.launch.forkserver",
                "tandem.trainer.launch.bootstrap",
            )
            self._clock = {
                module: self._rng.choice(CLOCKS) for module in self._rng.sample(modules, 3)
            }
        self._tell()
        return kind

    @property
    def refuses_writes(self) -> bool:
        return bool({"full", "read-only"} & self._now.keys())

    def end(self, *, all_now: bool = False) -> None:
        """End the conditions whose time is over. `all_now`: end all conditions."""
        over = [kind for kind, end in self._now.items() if all_now or time.monotonic() > end]
        for kind in over:
            del self._now[kind]
            if kind == "full":
                self._volume.empty()
                now = self._counted(self._events)
                events = {job: (self._events.get(job, 0), count) for job, count in now.items()}
                self._ledger.write("full", events=events)
            elif kind == "read-only":
                self._volume.writable()
            elif kind == "clocks":
                self._clock = {}
        if over:
            self._tell()

    def _counted(self, also: Iterable[str] = ()) -> dict[str, int]:
        """The number of events of each job that has not ended, and of each job in `also`."""
        counts, also = {}, {*also}
        for pattern in ("live/[!.]*/*/[!.]*", "ended/*/[!.]*"):
            for path in (self._volume.root / "jobs").glob(pattern):
                _, _, _, job, *_ = [*path.name.split(","), "", "", ""]  # other names are junk
                if not job or (pattern.startswith("ended") and job not in also):
                    continue
                with suppress(FileNotFoundError):
                    lines = (path / "events.jsonl").read_bytes().split(b"\n")[:-1]
                    counts[job] = sum(line.endswith(b"}") for line in lines)
        return counts

    def _tell(self) -> None:
        self._stack.set_conditions(
            {"slow": 0.15 if "slow" in self._now else 0.0, "clock": self._clock}
        )


class Damage:
    """Damages files in ways that the spool tolerates. If a job suffers from the damage, the ledger
    gets an entry about the job."""

    def __init__(self, root: Path, rng: random.Random, ledger: Ledger) -> None:
        self._root, self._rng, self._ledger = root, rng, ledger
        self.kinds = {
            "queued job": self._queued_job,
            "half an event": self._half_an_event,
            "lease": self._lease,
            "served.json": self._served,
            "heartbeat": self._heartbeat,
            "junk": self._junk,
            "staged file": self._staged,
            "checkpoint": self._checkpoint,
        }

    def inflict(self) -> str | None:
        """Tries the kinds of damage in a random order, until one of them damages a file. Returns
        the kind."""
        for kind in self._rng.sample(list(self.kinds), len(self.kinds)):
            try:
                if self.kinds[kind]():
                    return kind
            except OSError:  # the file was removed meanwhile
                continue
        return None

    def _some(self, pattern: str) -> Path | None:
        paths = sorted(
            path
            for path in self._root.glob(pattern)
            if ".tmp-" not in path.name and JUNK not in path.name
        )
        return self._rng.choice(paths) if paths else None

    def _spoil(self, path: Path) -> None:
        """Truncates the file, overwrites its beginning, or flips a bit of its first byte."""
        with path.open("r+b") as file:
            content = file.read()
            match self._rng.randrange(3):
                case 0:
                    file.truncate(self._rng.randrange(max(1, len(content) // 2)))
                case 1:
                    file.seek(0)
                    file.write(
                        bytes(
                            self._rng.randrange(256) for _ in range(max(1, min(len(content), 64)))
                        )
                    )
                case 2:
                    file.seek(0)
                    file.write(bytes([content[0] ^ 0x80]) if content else b"\xff")

    def _queued_job(self) -> bool:
        if (
            self._rng.random() < 0.5
            or (path := self._some("jobs/live/[!.]*/*/[!.]*/job.json")) is None
        ):
            return False
        if b'"state": "queued"' not in path.read_bytes():  # the file may be damaged already
            return False
        self._ledger.write("damaged", id=path.parent.name.split(",")[-1])
        self._spoil(path)
        return True

    def _half_an_event(self) -> bool:
        """Writes the beginning of a line under the job's lock, like a writer that dies within the
        line. Other writers append more events after the half line."""
        if (path := self._some("jobs/live/[!.]*/*/[!.]*/events.jsonl")) is None:
            return False
        job = path.parent.name.split(",")[-1]
        self._ledger.write("torn", id=job)
        try:
            with (
                file_lock(Paths(self._root).job_lock(job), blocking=False),
                path.open("r+b") as file,
            ):
                file.seek(0, 2)
                file.write(b'{"seq": 3, "time": 17')
        except LockHeldError:
            return False
        return True

    def _lease(self) -> bool:
        return (
            path := self._some("jobs/live/[!.]*/*/[!.]*/lease.json")
        ) is not None and not self._spoil(path)

    def _served(self) -> bool:
        return (path := self._some("runs/*/served.json")) is not None and not self._spoil(path)

    def _heartbeat(self) -> bool:
        return (
            path := self._some("jobs/live/[!.]*/*/[!.]*/attempts/*/beat.*")
        ) is not None and not self._spoil(path)

    def _junk(self) -> bool:
        where = self._rng.choice(
            [
                "runs",
                "jobs",
                "jobs/live",
                "jobs/active",
                "jobs/ended",
                "jobs/ended/0",
                "jobs/damaged",
            ]
        )
        path = self._root / where / f"{JUNK}-{self._rng.randrange(4)}.json"
        path.write_bytes(b"junk")
        return True

    def _staged(self) -> bool:
        """Writes an unwanted file into an attempt's work directory."""
        if (path := self._some("jobs/live/[!.]*/*/[!.]*/attempts/*")) is None:
            return False
        (path / self._rng.choice(["exits.json", "error.0.json", "error.7.json"])).write_bytes(
            b'{"0": '
        )
        return True

    def _checkpoint(self) -> bool:
        """Damages a file of a checkpoint, and restores the file from a copy within a second. A job
        that needs the damaged file may fail."""
        if (path := self._some("runs/*/checkpoints/*/*")) is None or not path.is_file():
            return False
        job = re.search('"job": "(.*)"', (path.parents[0] / "manifest.json").read_text())
        if job is None or not [*self._root.glob(f"jobs/ended/*/*,{job[1]},succeeded")]:
            return False  # the checkpoint's job has not ended yet, and may read the file
        copy = shutil.copy2(path, self._root.parent / "copy")
        try:
            self._spoil(path)
            time.sleep(self._rng.uniform(0, 1.0))
        finally:
            with path.open("r+b") as file:
                file.write(copy.read_bytes())
                file.truncate()
        return True
