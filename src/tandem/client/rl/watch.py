"""Watches the event loop: names the rollout that blocks the loop, interrupts this rollout at its
time limit, and ends the process soon after Ctrl-C."""

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import tandem

# An event loop counts as blocked if code runs for BLOCKED_SECONDS without returning to the loop.
# `Watch` names the line of code that blocks the event loop.
BLOCKED_SECONDS = 3.0
GRACE_SECONDS = 1.0
"""Seconds to clean up: for a cancelled rollout, and for the whole process after Ctrl-C."""
_POLL_SECONDS = 0.25
_SIGNAL = signal.SIGURG  # a signal that nothing else uses and that is ignored by default


class LeftBehindError(BaseException):
    """Raised inside a coroutine that blocks the event loop beyond the coroutine's time limit. The
    class is not an Exception, so that no `except Exception` in the user's code catches it."""


class Watch:
    """A context manager around the loop of `tandem rl`, entered in the thread of the event loop.
    `tell` is called once for each line of code that blocks the event loop, with a sentence that
    names the line."""

    def __init__(self, tell: Callable[[str], object] = lambda _: None) -> None:
        self.tell = tell
        self.stalled = 0.0
        """Total seconds for which the event loop was blocked."""
        self._tasks: dict[asyncio.Task[Any], float] = {}  # task -> the time at which its limit ends
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat = 0.0
        self._named: set[str] = set()
        self._late: asyncio.Task[Any] | None = None
        self._stop = threading.Event()

    def follow(self, task: asyncio.Task[Any], seconds: float) -> None:
        """Interrupts the rollout `task` if it blocks the event loop after `seconds` have passed."""
        self._tasks[task] = time.monotonic() + seconds
        task.add_done_callback(self._tasks.pop)

    def blocks(self) -> str | None:
        """The line of code that blocks the event loop now; None if the event loop runs. The method
        is called from another thread."""
        if time.monotonic() - self._beat < BLOCKED_SECONDS:
            return None
        frame = sys._current_frames().get(self._thread)
        return None if frame is None else place(frame)

    def __enter__(self) -> Self:
        self._loop, self._beat = asyncio.get_running_loop(), time.monotonic()
        self._thread = threading.get_ident()
        # Python runs signal handlers only in the main thread.
        self._interrupts = threading.current_thread() is threading.main_thread()
        if self._interrupts:
            self._before = signal.signal(_SIGNAL, self._interrupt)
        threading.Thread(target=self._watch, daemon=True, name="watch").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._interrupts:
            signal.signal(_SIGNAL, self._before)

    def _watch(self) -> None:
        loop = self._loop
        assert loop is not None
        asked = answered = time.monotonic()

        def answer(sent: float) -> None:
            nonlocal answered
            self._beat = answered = time.monotonic()
            if answered - sent > 1.0:
                self.stalled += answered - sent

        while not self._stop.wait(_POLL_SECONDS):
            if asked <= answered:
                asked = time.monotonic()
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(answer, asked)
                continue
            kept = time.monotonic() - asked
            if kept < BLOCKED_SECONDS:
                continue
            task = asyncio.current_task(loop)
            if (where := self.blocks()) and where not in self._named:
                self._named.add(where)
                self.tell(
                    f"{where} has kept all rollouts for {kept:.0f} s: it does not await. Await, or"
                    " make rollout a plain def, which gets a thread"
                )
            now = time.monotonic()
            if task is not None and now > self._tasks.get(task, now) and self._interrupts:
                self._late = task
                signal.pthread_kill(self._thread, _SIGNAL)

    def _interrupt(self, *_: object) -> None:
        """A signal handler. Python calls the handler in the main thread, inside the code that
        blocks the event loop."""
        late, self._late = self._late, None
        with suppress(RuntimeError):
            if late is not None and asyncio.current_task() is late:
                raise LeftBehindError


def place(frame: FrameType) -> str:
    """The innermost line of the user's own code on the stack of a frame. If the stack has no line
    of the user's code, the result is the innermost line of any code."""
    found = [
        (f.f_code, number)
        for f, number in traceback.walk_stack(frame)
        if whose(f.f_code.co_filename) == "own"
    ]
    code, line = found[0] if found else (frame.f_code, frame.f_lineno)
    return at(code.co_filename, line)


def at(file: str, line: int | str | None) -> str:
    """The name of a line of code, in the form that error messages use."""
    return f"{Path(file).name}, line {line}"


def whose(file: str) -> str:
    """The owner of the code in the file: "own" for the user's code, "installed" for an installed
    package, or "" for this package and the standard library."""
    if file.startswith(("<frozen ", f"{Path(tandem.__file__).parent}{os.sep}")):
        return ""
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return "installed"
    return "" if file.startswith(f"{Path(asyncio.__file__).parents[1]}{os.sep}") else "own"


def run_to_the_end[T](main: Coroutine[Any, Any, T], stopped: Callable[[], object]) -> T:
    """Like `asyncio.run`, but does not wait for tasks that keep running after their cancellation.
    The process ends within two seconds after Ctrl-C, and immediately after a second Ctrl-C.
    `stopped` is called before the process is ended by force.
    """
    loop = asyncio.new_event_loop()
    task = loop.create_task(main)

    def end() -> None:
        stopped()
        sys.stdout.flush()
        os._exit(130)

    def first_interrupt() -> None:
        timer = threading.Timer(1.5 * GRACE_SECONDS, end)
        timer.daemon = True
        timer.start()
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(task.cancel)

    release = _on_interrupts(first_interrupt, end)
    try:
        return loop.run_until_complete(task)
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error
    finally:
        if left := asyncio.all_tasks(loop):
            for each in left:
                each.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=GRACE_SECONDS))
            for each in left:
                each._log_destroy_pending = False  # type: ignore[attr-defined]
                # An extra reference keeps Python from closing the coroutine at exit, because the
                # close may never return.
                if not each.done():
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        release()


def _on_interrupts(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], None]:
    """Calls `first` at the first Ctrl-C and `second` at each later Ctrl-C, in a separate thread.
    The returned function restores the earlier handling of Ctrl-C. If Ctrl-C is ignored or has a
    handler that is not Python's own, this function changes nothing.

    Python runs a signal handler in the main thread only, between two instructions. A signal that
    arrives immediately before a blocking system call therefore waits until the call ends. Python
    writes the signal's number to the wakeup file descriptor at once, even if a system call follows.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return lambda: None
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def read() -> None:
        calls = iter((first, second))
        while signals := os.read(reads, 64):
            for _ in range(signals.count(signal.SIGINT)):
                next(calls, second)()
        os.close(reads)

    signal.signal(signal.SIGINT, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    threading.Thread(target=read, daemon=True, name="ctrl-c").start()

    def release() -> None:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(writes)

    return release
