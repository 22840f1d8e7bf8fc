"""Signs of life: in every iteration of its main loop, a program touches a file in the directory
TANDEM_ALIVE_DIR. The variable TANDEM_ALIVE_DIR is set by `tandem up`. The liveness probe reads the
files in this directory. An open port does not prove that a program works. A program that loads a
model or trains a job may not answer for a long time although it works.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path

VARIABLE = "TANDEM_ALIVE_DIR"
NAME_VARIABLE = "TANDEM_ALIVE_NAME"
"""The name of the variable that has the name of this instance of a program, such as `publisher-1`,
if the program runs several times."""
LONGEST_SECONDS = {
    # The loop of `tandem up` never waits for other programs.
    "up": 60.0,
    # The runner's loop may wait half a minute for the end of ranks, and longer for the removal of a
    # job's data from a slow volume.
    "runner": 600.0,
    # One iteration of the publisher's loop hashes and copies one adapter, makes vLLM load the
    # adapter, and makes vLLM score the probe. The publisher touches its file every 10 s during a
    # swap of merged weights, and also while it hashes a whole model.
    "publisher": 1800.0,
}
"""The most seconds that one turn of a program's loop may take."""


def program_kind(program: str) -> str:
    """The name of a program without the number of its instance, such as `vllm` for `vllm-1`."""
    return program.partition("-")[0]


_turns: dict[threading.Thread, float] = {}  # thread -> the time of its loop's last iteration


def beat(program: str) -> None:
    """Records an iteration of this thread's loop in TANDEM_ALIVE_DIR; does nothing if the variable
    is not set. If a program has several loops, the function records the last iteration of the loop
    that has been silent longest."""
    if directory := os.environ.get(VARIABLE):
        now = time.time()
        _turns[threading.current_thread()] = now
        for thread in list(_turns):
            if not thread.is_alive():
                _turns.pop(thread, None)
        oldest = min([now, *_turns.copy().values()])
        with suppress(OSError):  # a full tmpfs must not end a program that works
            path = Path(directory, f"{os.environ.get(NAME_VARIABLE) or program}.alive")
            path.touch()
            os.utime(path, (oldest, oldest))


def report(program: str, problem: str) -> None:
    """Records why `program` can't work now, for its readiness probe. An empty `problem` means that
    `program` can work."""
    if directory := os.environ.get(VARIABLE):
        with suppress(OSError):
            path = _problem_path(program, Path(directory))
            if problem:
                path.write_text(problem)
            else:
                path.unlink(missing_ok=True)


def reported(program: str, directory: Path) -> str:
    """The problem that `program` reported last; empty if `program` can work."""
    with suppress(OSError):
        return _problem_path(program, directory).read_text()
    return ""


def _problem_path(program: str, directory: Path) -> Path:
    return directory / f"{program}.problem"


def silence(program: str, directory: Path) -> str | None:
    """A message if the last iteration of `program`'s loop is too long ago. None if the loop runs,
    or if the loop has not begun."""
    longest = LONGEST_SECONDS[program_kind(program)]
    with suppress(FileNotFoundError):
        if (age := time.time() - (directory / f"{program}.alive").stat().st_mtime) > longest:
            return f"the loop of {program} has not turned for {age:.0f} s (at most {longest:.0f})"
    return None


def in_thread[T](action: Callable[[], T], beat: Callable[[], object], seconds: float) -> T:
    """The result of `action`, which runs in a thread. Raises the error of `action` or `beat`. If
    `beat` raises an error, the thread is abandoned.

    Args:
        beat: called repeatedly in the calling thread until `action` ends.
        seconds: the time between two calls of `beat`.
    """
    future = Future[T]()
    threading.Thread(target=settle, args=(future, action), daemon=True).start()
    return result_of(future, beat, seconds)


def settle[T](future: Future[T], action: Callable[[], T]) -> None:
    """Gives `future` the result of `action`, or the exception that `action` raises."""
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)


def result_of[T](future: Future[T], beat: Callable[[], object], seconds: float) -> T:
    """The result of `future`. Raises the error of the future or of `beat`.

    Args:
        beat: called repeatedly until the result is available.
        seconds: the time between two calls of `beat`.
    """
    while not wait([future], timeout=seconds).done:
        beat()
    return future.result()
