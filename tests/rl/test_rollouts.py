"""The loop with user code that misbehaves: rollouts fail, discard, block, never return, or are not
coroutines."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl.fake_stack import Environment, FakeStack, check, config, make_loop
from tandem.cli.rl import text_line
from tandem.client import Trajectory
from tandem.client.rl import rollout as rollouts
from tandem.client.rl import watch
from tandem.client.rl.loop import Loop
from tandem.errors import TandemError


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def line_of(mark: str) -> int:
    """The number of the line in this file that ends with the mark."""
    text = Path(__file__).read_text().splitlines()
    [number] = [n for n, line in enumerate(text, 1) if line.endswith(f"# {mark}")]
    return number


class Playing(Environment):
    """An environment that counts its rollouts. `nth`: the number of the newest rollout."""

    nth = 0

    async def rollout(self, task: int, sampler: Any) -> Trajectory:
        self.nth += 1
        return await self.one(task, sampler, self.nth)

    async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
        return await super().rollout(task, sampler)


def play(stack: FakeStack, environment: Environment, directory: Path, **rl: Any) -> Loop:
    loop = make_loop(config(**rl), stack, environment, directory)
    asyncio.run(loop.run())
    return loop


def test_a_rollout_that_is_lost_costs_itself_and_is_counted_by_its_reason(tmp_path: Path) -> None:
    class Losing(Playing):
        async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
            if nth % 8 == 0:
                sampler.discard("judge timed out")
            if nth % 8 == 4:
                raise OSError(f"no room for {nth}")  # mark: fails
            return await super().one(task, sampler, nth)

    stack = FakeStack()
    play(stack, Losing(stack), tmp_path, steps=3, group_size=4, retries=0)
    check(stack, 3, 0)
    sizes = [len(g["trajectories"]) for job in stack.trained for g in job.request["groups"]]
    assert len(sizes) == 9
    assert set(sizes) <= {2, 3, 4}
    assert min(sizes) < 4
    found = lines(tmp_path)
    where = f"OSError (test_rollouts.py, line {line_of('mark: fails')})"
    assert {reason for line in found for reason in line["lost"]["failed"]} == {where}
    assert {reason for line in found for reason in line["lost"]["discarded"]} == {"judge timed out"}
    assert sum(line["left_out"]["failed"] for line in found) == 0
    told = " ".join(map(text_line, found))
    assert "rollouts discarded (judge timed out)" in told
    assert f"rollouts failed ({where})" in told


def test_a_group_with_one_survivor_is_left_out_and_a_caught_discard_holds(tmp_path: Path) -> None:
    class Discarding(Playing):
        async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
            made = await super().one(task, sampler, nth)
            if task % 2 and nth % 3:
                with suppress(Exception):  # user code that catches too much
                    sampler.discard("no score")
            return made

    stack = FakeStack()
    play(stack, Discarding(stack), tmp_path, steps=2, groups_in_flight=1)
    sizes = [len(g["trajectories"]) for job in stack.trained for g in job.request["groups"]]
    assert sizes == [3] * 6
    assert sum(line["left_out"]["failed"] for line in lines(tmp_path)) > 0
    assert sum(line["errors"] for line in lines(tmp_path)) == 0, "it was tried again"


def test_where_everything_is_discarded_the_loop_ends_with_the_reason(tmp_path: Path) -> None:
    class Discarding(Playing):
        async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
            return sampler.discard("judge timed out")  # type: ignore[no-any-return]

    stack = FakeStack()
    with pytest.raises(TandemError, match=r"groups in a row failed; .*judge timed out"):
        play(stack, Discarding(stack), tmp_path)


class Plain(Environment):
    """An environment whose `rollout` is a plain function. Each call of `rollout` gets a thread."""

    threads: set[int]
    never = False

    def rollout(self, task: int, sampler: Any) -> Trajectory:  # type: ignore[override]
        self.threads.add(threading.get_ident())
        message = sampler.chat([{"role": "user", "content": str(task)}])
        if self.never and task % 4 == 0:
            threading.Event().wait()  # mark: never
        return sampler.finish(message["content"] == "a")  # type: ignore[no-any-return]


def test_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    stack = FakeStack()
    environment = Plain(stack)
    environment.threads = set()
    play(stack, environment, tmp_path, steps=3)
    check(stack, 3, 0)
    assert threading.get_ident() not in environment.threads


def test_a_plain_function_that_never_returns_is_left_behind(tmp_path: Path) -> None:
    stack = FakeStack()
    environment = Plain(stack)
    environment.threads, environment.never = set(), True
    rl = {"steps": 3, "retries": 0, "rollout_seconds": 0.5, "groups_in_flight": 9}
    loop = play(stack, environment, tmp_path, **rl)
    check(stack, 3, 0)
    line = line_of("mark: never")
    assert loop.error == (
        "TandemError: the rollout took longer than rl.rollout_seconds (0.5 s) (test_rollouts.py,"
        f" line {line}); it does not end, and is left behind"
    )


def test_a_coroutine_that_takes_no_cancellation_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    released = False

    class Stubborn(Playing):
        async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
            while task % 4 == 0 and not released:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.2)  # mark: stubborn
            return await super().one(task, sampler, nth)

    stack = FakeStack()
    loop = make_loop(
        config(steps=2, retries=0, rollout_seconds=0.5, groups_in_flight=9),
        stack,
        Stubborn(stack),
        tmp_path,
    )

    async def scene() -> None:
        nonlocal released
        await loop.run()
        released = True  # without the release, the test's event loop would wait for ever

    asyncio.run(scene())
    check(stack, 2, 0)
    assert f"test_rollouts.py, line {line_of('mark: stubborn')}); it does not end" in loop.error


def test_a_coroutine_that_blocks_is_named_and_ended_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BLOCKED_SECONDS", 0.4)
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.05)
    told: list[tuple[float, str]] = []
    blocked: list[float] = []

    class Blocking(Playing):
        async def one(self, task: int, sampler: Any, nth: int) -> Trajectory:
            if nth == 5:
                blocked.append(time.monotonic())
                time.sleep(600)  # mark: blocks
            return await super().one(task, sampler, nth)

    stack = FakeStack()
    loop = make_loop(
        config(steps=2, retries=0, rollout_seconds=1.5), stack, Blocking(stack), tmp_path
    )
    loop.record._tell = lambda line: told.append((time.monotonic(), text_line(line)))
    asyncio.run(loop.run())
    check(stack, 2, 0)
    # On a busy machine the loop may also report that other lines have blocked it.
    named = f"test_rollouts.py, line {line_of('mark: blocks')} has kept"
    [when] = [when for when, text in told if text.startswith(named)]
    assert when - blocked[0] < 5
    lost = [line["lost"]["failed"] for line in lines(tmp_path)]
    # The other rollouts were blocked for the same time as the failed rollout, but they continue.
    where = f"test_rollouts.py, line {line_of('mark: blocks')}"
    assert sum(sum(each.values()) for each in lost) == 1
    assert re.fullmatch(rf"TandemError \({where}\)", "".join(next(filter(None, lost))))


BLOCKED = """
import asyncio, signal, sys, time
from tandem.client.rl.watch import run_to_the_end

async def stubborn():
    while True:
        try:
            await asyncio.sleep(1)
        except BaseException:
            pass

async def main(kind):
    stays = asyncio.create_task(stubborn())
    if kind == "misses":
        # The signal goes to another thread and interrupts no system call of this thread. A signal
        # that arrives immediately before the system call has the same effect.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("ready", flush=True)
    if kind == "ends":
        return
    if kind in ("blocks", "misses"):
        time.sleep(60)
    await asyncio.sleep(60)

try:
    run_to_the_end(main(sys.argv[1]), lambda: print("stopped", flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("kind", ["blocks", "misses", "waits", "ends"])
def test_ctrl_c_and_the_end_wait_for_no_rollout(kind: str) -> None:
    # If a shell starts a test in the background, the test's process ignores SIGINT.
    heeds = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, kind],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heeds,  # noqa: PLW1509
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    if kind != "ends":
        process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 8  # the command takes 1.5 s; other programs may slow it
    assert process.returncode == (0 if kind == "ends" else 130)
    assert ("stopped" in printed) == (kind in ("blocks", "misses"))
