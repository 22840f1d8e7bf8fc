"""Process trees on Linux: who descends from whom, dying with the parent, and ending a whole tree within a bound.

torchrun starts every rank in a session of its own, so a signal to a process group does not reach them. What does:

- `die_with_parent` (PR_SET_PDEATHSIG) in every link of the chain, so that `kill -9` of any link takes the rest;
- `adopt_orphans` (PR_SET_CHILD_SUBREAPER) in the process at the top, so that whatever loses its parent stays its
  descendant and is found by `descendants`;
- `marked`: an environment variable that children inherit across sessions and double forks, by which a later process
  finds what a dead one left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One entry of /proc. `started` (clock ticks since boot) tells a reused pid from the process that had it before."""

    pid: int
    parent: int
    state: str  # R, S, D, Z, ...
    started: int
    command: str

    @property
    def zombie(self) -> bool:
        return self.state in "ZX"


def die_with_parent(parent: int | None = None, sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when its parent dies.

    `parent` is the pid the caller expects as its parent: if that one is gone already (it died before this call), the
    signal would never come, so it is delivered at once.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def read(pid: int) -> Process | None:
    """The process `pid`, or None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The command stands in parentheses and may itself hold spaces and parentheses.
    end = text.rindex(")")
    fields = text[end + 2 :].split()
    command = text[text.index("(") + 1 : end]
    return Process(pid=pid, parent=int(fields[1]), state=fields[0], started=int(fields[19]), command=command)


def all_processes() -> list[Process]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [found for pid in pids if (found := read(pid)) is not None]


def descendants(pid: int, *, excluding: Iterable[int] = ()) -> list[Process]:
    """Living and zombie descendants of `pid`, parents first, without the pids in `excluding` (whose own children count
    all the same)."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(0), []):
            found.append(child)
            pending.append(child.pid)
    skipped = set(excluding)
    return [process for process in found if process.pid not in skipped]


def marked(variable: str, value: str) -> list[Process]:
    """Processes of this user that were started with `variable=value` in their environment, this one excepted."""
    wanted = f"{variable}={value}".encode()
    found = []
    for process in all_processes():
        if process.pid == os.getpid() or process.zombie:
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(process)
    return found


def reap_orphans(known: Iterable[int] = ()) -> None:
    """Collect the exit status of adopted children, leaving those in `known` to whoever waits for them."""
    waited_for = set(known)
    try:
        # Cheap where there is nothing to do: in a container this is asked several times a second, for ever.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    except ChildProcessError:
        return
    mine = os.getpid()
    for process in all_processes():
        if process.parent == mine and process.zombie and process.pid not in waited_for:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def kill_all(find: Callable[[], list[Process]], *, timeout: float, known: Iterable[int] = ()) -> list[Process]:
    """SIGKILL what `find` finds until it finds nothing alive (a process may fork while it is being killed).

    Returns what still lives after `timeout` seconds: processes in uninterruptible sleep, which no signal ends.
    `known`: children that somebody else waits for.
    """
    end = time.monotonic() + timeout
    known = tuple(known)
    while True:
        alive = [process for process in find() if not process.zombie]
        for process in alive:
            send(process, signal.SIGKILL)
        reap_orphans(known)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.02)


def send(process: Process, sig: signal.Signals) -> None:
    """Signal `process`, unless it is gone or its pid belongs to another by now."""
    now = read(process.pid)
    if now is None or now.started != process.started:
        return
    try:
        os.kill(process.pid, sig)
    except (ProcessLookupError, PermissionError):
        return


def describe_exit(code: int) -> str:
    """An exit status as subprocess gives it, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
