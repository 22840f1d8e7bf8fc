"""Process trees on Linux.

torchrun starts every rank in its own session, so a signal to a process group does not reach the
ranks. Tandem reaches the ranks in three other ways:

- `die_with_parent` (PR_SET_PDEATHSIG) in every process of the chain, so that `kill -9` of one
  process ends its descendants;
- `adopt_orphans` (PR_SET_CHILD_SUBREAPER) in the topmost process, so that a process that loses its
  parent stays a descendant, which `descendants` finds;
- `marked`, which finds processes by an environment variable. Child processes inherit the variable,
  even across sessions and double forks."""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One entry of /proc. `started` (clock ticks since boot) distinguishes a process from an
    earlier process with the same pid."""

    pid: int
    parent: int
    zombie: bool
    started: int
    command: str


def die_with_parent(parent: int | None = None, sig: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send the signal `sig` to this process when its parent dies. If the parent's
    pid is no longer `parent`, sends the signal immediately."""
    _prctl(_PR_SET_PDEATHSIG, int(sig))
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def read_process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The command is in parentheses, and may itself contain spaces and parentheses.
    before, _, after = text.rpartition(")")
    fields = after.split()
    command = before.partition("(")[2]
    return Process(
        pid=pid,
        parent=int(fields[1]),
        zombie=fields[0] in "ZX",
        started=int(fields[19]),
        command=command,
    )


def all_processes() -> list[Process]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [process for pid in pids if (process := read_process(pid)) is not None]


def descendants(pid: int) -> list[Process]:
    """Living and zombie descendants of `pid`, parents first."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    tree = children.get(pid, []).copy()
    for process in tree:  # the list grows during the loop
        tree += children.get(process.pid, [])
    return tree


def marked(variable: str, value: str) -> list[Process]:
    """Living processes of this user that were started with `variable=value` in their environment,
    except this process.

    While a process is in `exec`, its environment looks empty. The function therefore reads an empty
    environment up to three more times, within 0.1 s.
    """
    mark = f"{variable}={value}".encode()
    matches = []
    left = [one for one in all_processes() if one.pid != os.getpid() and not one.zombie]
    for pause in (0.0, 0.005, 0.02, 0.075):
        time.sleep(pause)
        empty = []
        for process in left:
            with suppress(OSError):  # the process belongs to another user, or has ended
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                if mark in environment.split(b"\0"):
                    matches.append(process)
                elif not environment:
                    # A kernel thread has no `exe`, so this call raises OSError.
                    Path(f"/proc/{process.pid}/exe").readlink()
                    empty.append(process)
        left = empty
        if not left:
            break
    return matches


def reap_orphans(known: Collection[int] = ()) -> None:
    """Collects the exit status of adopted children. `known`: pids of children for which other code
    waits; this function does not collect them."""
    with suppress(ChildProcessError):
        # `waitid` is cheap and covers the usual case that no child has ended. `reap_orphans` is
        # called several times a second.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        for process in all_processes():
            if process.parent == os.getpid() and process.zombie and process.pid not in known:
                os.waitpid(process.pid, os.WNOHANG)


def kill_all(
    find: Callable[[], list[Process]], *, timeout: float, known: Collection[int] = ()
) -> list[Process]:
    """Sends SIGKILL to all processes that `find` returns, until none of them is alive. SIGKILL is
    sent repeatedly, because a process may fork before it is killed. Returns the processes that are
    still alive after `timeout` seconds because they are in uninterruptible sleep.

    Args:
        known: see `reap_orphans`.
    """
    end = time.monotonic() + timeout
    while True:
        alive = [process for process in find() if not process.zombie]
        for process in alive:
            send(process, signal.SIGKILL)
        reap_orphans(known)
        if not alive or time.monotonic() > end:
            return alive
        time.sleep(0.02)


def alive(process: Process) -> bool:
    """Whether `process` has not ended. The result is False if the pid of `process` now belongs to
    another process."""
    now = read_process(process.pid)
    return now is not None and now.started == process.started and not now.zombie


def send(process: Process, sig: signal.Signals) -> None:
    """Signals `process` if it is alive."""
    if alive(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, sig)


def describe_exit(code: int) -> str:
    """A description of a return code of `subprocess`, where -N stands for signal N."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"
