"""Runs one rollout of the user's code, with a time limit and retries. A coroutine runs in the event
loop, a plain function in a thread."""

import asyncio
import dis
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import Any

from pydantic import ValidationError

from tandem.client import Trajectory
from tandem.client.http import Backoff
from tandem.client.rl.config import RLSection
from tandem.client.rl.sampler import DiscardedError, Sampler
from tandem.client.rl.watch import GRACE_SECONDS, LeftBehindError, Watch, at, place, whose
from tandem.data.inputs import PackingSettings
from tandem.errors import InvalidInput, TandemError, from_validation_error

PAUSES = 1.0, 60.0
"""The shortest and the longest pause, in seconds, after a failed rollout or group."""


async def play(
    rollout: Callable[..., Any],
    task: Any,
    sampler: Callable[[], Any],
    settings: RLSection,
    failed: Callable[[Exception], object],
    pauses: tuple[float, float] = PAUSES,
    watch: Watch | None = None,
) -> Trajectory:
    """The trajectory of a rollout. An error is passed to `failed`, and the rollout is repeated
    after a pause, up to `retries` times. After DiscardedError the rollout is not repeated.

    Args:
        rollout: the user's function, a coroutine or a plain function.
        failed: called with each error.
        pauses: the shortest and the longest pause in seconds.
        watch: follows the rollout's asyncio task.
    """
    backoff = Backoff(inf, *pauses)  # a pause, because a service may be down for a moment
    watch = watch or Watch()
    for left in reversed(range(settings.retries + 1)):
        own = sampler()
        try:
            made = await _limited(rollout, task, own, settings.rollout_seconds, watch)
            # the user's code caught DiscardedError and continued
            if reason := getattr(own, "discarded", None):
                raise DiscardedError(reason)
            trajectory = _trajectory(made, rollout)
            _check(trajectory, settings.packing)
            return trajectory
        except DiscardedError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _cancelled():
                raise
            failure = _failure(error)
            failed(failure)
            pause = backoff.next(failure)
            if not left:
                raise failure  # noqa: B904
        await asyncio.sleep(pause)
    raise AssertionError


async def _limited(
    rollout: Callable[..., Any], task: Any, sampler: Any, seconds: float, watch: Watch
) -> Any:
    """The rollout's return value. Raises TandemError after `seconds`. Time in which another rollout
    blocks the event loop does not count towards `seconds`. At the limit a coroutine is cancelled. A
    thread, or a coroutine that does not end, keeps running unobserved."""
    clock, stalled, threads = asyncio.get_running_loop().time, watch.stalled, list[int]()
    running = asyncio.create_task(_run(rollout, task, sampler, threads))
    watch.follow(running, seconds)
    until = clock() + seconds
    try:
        while left := max(0.0, until + watch.stalled - stalled - clock()):
            if (await asyncio.wait({running}, timeout=left))[0]:
                return _result(running, seconds)
        where = _where(running, threads)
    finally:
        if not running.done():
            if isinstance(sampler, Sampler):
                sampler.left_behind = True
            running.cancel()
            await asyncio.wait({running}, timeout=GRACE_SECONDS)
    stays = threads or not running.done()
    raise _late(seconds, f"{where}{'; it does not end, and is left behind' if stays else ''}")


def _where(running: asyncio.Task[Any], threads: list[int]) -> str:
    """The line of the user's code that a rollout executes now."""
    frames = sys._current_frames()
    if threads:
        return f" ({place(frames[threads[0]])})" if threads[0] in frames else ""
    inner: Any = running.get_coro()
    found = []
    while frame := getattr(inner, "cr_frame", None):
        found += [frame] if whose(frame.f_code.co_filename) == "own" else []
        inner = inner.cr_await
    return "".join(f" ({at(frame.f_code.co_filename, frame.f_lineno)})" for frame in found[-1:])


def _result(running: asyncio.Task[Any], seconds: float) -> Any:
    try:
        return running.result()
    except LeftBehindError as error:
        late = _late(seconds, ", and kept all others for all that time")
        raise late.with_traceback(error.__traceback__) from None


def _late(seconds: float, more: str = "") -> TandemError:
    return TandemError(f"the rollout took longer than rl.rollout_seconds ({seconds:g} s){more}")


async def _run(rollout: Callable[..., Any], task: Any, sampler: Any, threads: list[int]) -> Any:
    """Runs the rollout. `threads` holds the thread of a plain function while it runs."""
    try:
        if is_async(rollout):
            made = rollout(task, sampler)
        else:
            made = await _in_thread(rollout, task, sampler, threads)
        return await made if inspect.isawaitable(made) else made
    except SystemExit as error:  # SystemExit would end the whole process
        raise TandemError(f"the rollout raised {error!r}").with_traceback(
            error.__traceback__
        ) from None


def is_async(rollout: Callable[..., Any]) -> bool:
    """Whether a call of `rollout` returns a coroutine, also through decorators and `partial`."""
    while isinstance(rollout, partial):
        rollout = rollout.func
    inner = inspect.unwrap(rollout)
    call = getattr(inner, "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (rollout, inner, call)))


async def _in_thread(
    rollout: Callable[..., Any], task: Any, sampler: Any, threads: list[int]
) -> Any:
    """The function's return value, computed in a thread of its own. No executor is used, because
    Python waits for an executor's threads before it exits."""
    done: Future[Any] = Future()

    def work() -> None:
        threads.append(threading.get_ident())
        try:
            made = rollout(task, sampler)
        except BaseException as error:  # SystemExit too
            threads.clear()
            done.set_exception(error)
        else:
            threads.clear()
            done.set_result(made)

    threading.Thread(target=work, daemon=True, name="rollout").start()
    made = asyncio.wrap_future(done)
    # The callback retrieves the future's exception, because asyncio logs an exception that is never
    # retrieved.
    made.add_done_callback(lambda made: made.cancelled() or made.exception())
    return await asyncio.shield(made)


def _cancelled() -> bool:
    """Whether the current asyncio task is being cancelled. In a task that is being cancelled, a
    CancelledError does not come from the rollout itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failure(error: BaseException) -> Exception:
    """The error of a rollout. A BaseException such as SystemExit, which could end the process,
    becomes a TandemError."""
    if isinstance(error, Exception):
        return error
    return TandemError(f"the rollout raised {error!r}").with_traceback(error.__traceback__)


def _trajectory(made: Any, rollout: Callable[..., Any]) -> Trajectory:
    """The rollout's return value as a trajectory. Raises InvalidInput, with the line of the user's
    code, if the value is not a trajectory."""
    if isinstance(made, Trajectory | dict):
        try:
            return Trajectory.model_validate(made)
        except ValidationError as error:
            wrong = from_validation_error(error)
            problem = f"a trajectory that is wrong in {wrong.field}: {wrong.message}"
    else:
        problem = f"{made!r:.60}"
    raise InvalidInput(
        f"rollout returned {problem}; return sampler.finish(reward){_returns(rollout)}"
    )


def _returns(rollout: Callable[..., Any]) -> str:
    """The lines in which the function returns."""
    while isinstance(rollout, partial):
        rollout = rollout.func
    code = getattr(inspect.unwrap(rollout), "__code__", None)
    if code is None:
        return ""
    lines = sorted(
        {
            each.positions.lineno
            for each in dis.get_instructions(code)
            if each.opname in ("RETURN_VALUE", "RETURN_CONST")
            and each.positions
            and each.positions.lineno
            and each.positions.lineno > code.co_firstlineno
        }
    )
    where = " or ".join(map(str, lines[:3])) or str(code.co_firstlineno)
    return f" ({at(code.co_filename, where)})"


def described(error: Exception) -> str:
    """A text with the error, and with the last line of the user's own code in the error's
    traceback. If the traceback has no line of the user's code, the text has the first line of an
    installed package."""
    return f"{type(error).__name__}: {error}{_at(error)}"


def kind_of(error: Exception) -> str:
    """The name under which an error is counted: the error's type and line. The error's text is left
    out, because it may differ each time."""
    return f"{type(error).__name__}{_at(error) or f': {error}'[:80]}"


def _at(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own, installed = (
        [frame for frame in frames if whose(frame.filename) == of] for of in ("own", "installed")
    )
    last = own[-1:] or installed[:1]
    return "".join(f" ({at(frame.filename, frame.lineno)})" for frame in last)


def _check(trajectory: Trajectory, packing: PackingSettings) -> None:
    """Raises InvalidInput for a trajectory that the controller would refuse. The controller would
    refuse the whole batch because of a single wrong trajectory."""
    if any(turn.policy_step is None for turn in trajectory.turns):
        raise InvalidInput("a turn has no policy_step; sample by sampler.chat and return finish()")
    row = packing.sequence_length
    if packing.too_long == "refuse" and trajectory.longest > row:
        problem = f"the rollout has {trajectory.longest} tokens, which don't fit a row of {row}"
        remedy = "lower sampling.max_tokens, or change sequence_length or too_long in [rl.packing]"
        raise InvalidInput(f"{problem}; {remedy}", field="rl.packing.sequence_length")
    shortest = min(len(turn.prompt_token_ids) for turn in trajectory.turns)
    if shortest >= row:
        remedy = "raise packing.sequence_length, or shorten the prompt"
        raise InvalidInput(f"a prompt of {shortest} tokens fills a row of {row}; {remedy}")
