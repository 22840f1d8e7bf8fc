"""The loop against a fake stack: the bound of off-policy steps under random delays, kills at every
call, errors, and discarded groups."""

import asyncio
import io
import itertools
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter
from rich.console import Console

from rl.fake_stack import (
    RUN,
    Environment,
    FakeStack,
    Killed,
    check,
    config,
    make_loop,
    run_until_done,
)
from tandem.cli.rl import panel, text_line
from tandem.client import Trajectory
from tandem.client.rl import loop as loops
from tandem.client.rl.config import Config
from tandem.client.rl.evaluation import pass_at
from tandem.client.rl.record import State, load_progress
from tandem.client.rl.requests import job_names
from tandem.errors import (
    Conflict,
    InvalidInput,
    JobFailed,
    NothingToLearn,
    NotServed,
    StepRefused,
    TandemError,
)
from tandem.spool.locks import file_lock
from tandem.spool.schema import JobId

NO_BASELINE = {"baseline": "none", "scale": "none"}


def run(settings: Config, stack: FakeStack, directory: Path) -> None:
    asyncio.run(make_loop(settings, stack, Environment(stack), directory).run())


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def shown(loop: loops.Loop) -> str:
    """The text of the loop's panel."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(loop))
    return console.export_text()


@pytest.mark.sample(4)
@pytest.mark.parametrize("bound", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_group_is_older_than_the_bound(tmp_path: Path, bound: int, seed: int) -> None:
    stack = FakeStack(seed=seed)
    settings = config(max_off_policy_steps=bound, steps=10)
    asyncio.run(run_until_done(settings, stack, tmp_path))
    check(stack, 10, bound)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(1, 11))
    assert max(line["off_policy_steps"]["max"] for line in written) <= bound
    if bound == 0:
        # The loop is synchronous: all samples are from the newest step, and no sample is left over.
        assert all(asked == newest for asked, newest in stack.sampled)
        assert sum(line["left_out"]["stale"] for line in written) == 0
    else:
        assert max(line["off_policy_steps"]["max"] for line in written) > 0, (
            "nothing overlapped, so this proves little"
        )
        # Rollouts don't run further ahead of the trainer than the bound allows.
        assert sum(line["left_out"]["stale"] for line in written) <= 30 / 2


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_a_kill_at_any_call_loses_no_step_and_no_group_trains_twice(
    tmp_path: Path, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = loops.write_json_atomic
    for at in itertools.count(1):
        stack = FakeStack(delay=0.001, seed=at)
        stack.kill_at = at

        def save(path: Path, state: State, stack: FakeStack = stack) -> None:
            stack.mark()
            saved(path, state)
            stack.mark()

        monkeypatch.setattr(loops, "write_json_atomic", save)
        directory = tmp_path / str(at)
        directory.mkdir()
        kills = asyncio.run(
            run_until_done(config(max_off_policy_steps=bound, steps=3), stack, directory)
        )
        check(stack, 3, bound)
        assert sorted(line["step"] for line in lines(directory)) == [1, 2, 3]
        assert len(stack.jobs) == 3
        if not kills:
            break
    assert at >= 30


def test_a_rollout_that_raises_is_tried_again_and_then_its_group_is_dropped(tmp_path: Path) -> None:
    stack = FakeStack()
    loop = make_loop(config(), stack, Environment(stack, broken=range(0, 50, 5)), tmp_path)
    asyncio.run(loop.run())
    check(stack, 6, 0)
    assert sum(line["left_out"]["failed"] for line in lines(tmp_path)) > 0
    assert re.fullmatch(r"ValueError: task \d+ is broken \(fake_stack.py, line \d+\)", loop.error)
    told = [text_line(line) for line in lines(tmp_path) if line["errors"]]
    assert told
    assert all(
        re.search(r"; \d+ errors, the last: ValueError: task \d+ is broken", line) for line in told
    )
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "state.json").unlink()

    stack = FakeStack()
    asyncio.run(
        make_loop(config(), stack, Environment(stack, broken=range(50), errors=2), tmp_path).run()
    )
    assert sum(line["errors"] for line in lines(tmp_path)) == 2
    assert sum(line["left_out"]["failed"] for line in lines(tmp_path)) == 0


def test_the_loop_ends_where_everything_fails(tmp_path: Path) -> None:
    stack = FakeStack()
    with pytest.raises(
        TandemError, match=r"groups in a row failed; .* ValueError: task \d+ is broken"
    ):
        asyncio.run(
            make_loop(config(), stack, Environment(stack, broken=range(50)), tmp_path).run()
        )
    assert not stack.jobs


class Outage(Environment):
    """After the first step, a service that the rollouts need is unavailable for `failures`
    rollouts."""

    failures = 40

    async def rollout(self, task: int, sampler: Any) -> Trajectory:
        if self.stack.newest and self.failures > 0:
            self.failures -= 1
            raise OSError("the judge is away")
        return await super().rollout(task, sampler)


def test_an_outage_does_not_end_the_loop_and_costs_few_tasks(tmp_path: Path) -> None:
    stack = FakeStack()
    asyncio.run(make_loop(config(retries=0), stack, Outage(stack), tmp_path).run())
    check(stack, 6, 0)
    assert 5 <= sum(line["left_out"]["failed"] for line in lines(tmp_path)) <= 40


def test_an_outage_that_lasts_ends_the_loop(tmp_path: Path) -> None:
    stack = FakeStack()
    with pytest.raises(TandemError, match=r"groups in a row failed; .* OSError: the judge is away"):
        asyncio.run(
            make_loop(config(retries=0), stack, Outage(stack), tmp_path, patience=0.01).run()
        )
    assert stack.newest == 1


def test_groups_without_a_difference_are_replaced_and_counted(tmp_path: Path) -> None:
    stack = FakeStack()
    asyncio.run(
        make_loop(config(), stack, Environment(stack, equal=range(0, 50, 2)), tmp_path).run()
    )
    check(stack, 6, 0)
    for job in stack.trained:
        assert all(
            len({t["reward"] for t in group["trajectories"]}) > 1 for group in job.request["groups"]
        )
    assert sum(line["left_out"]["uninformative"] for line in lines(tmp_path)) >= 5

    kept = FakeStack()
    (tmp_path / "kept").mkdir()
    settings = config(dynamic_sampling=False, steps=3)
    asyncio.run(
        make_loop(settings, kept, Environment(kept, equal=range(0, 50, 2)), tmp_path / "kept").run()
    )
    groups = [group for job in kept.trained for group in job.request["groups"]]
    assert any(len({t["reward"] for t in group["trajectories"]}) == 1 for group in groups)


@pytest.mark.parametrize("dynamic_sampling", [True, False])
def test_where_no_group_teaches_anything_the_loop_ends(
    tmp_path: Path, dynamic_sampling: bool
) -> None:
    stack = FakeStack(delay=0.0005)
    settings = config(dynamic_sampling=dynamic_sampling)
    with pytest.raises(NothingToLearn):
        asyncio.run(make_loop(settings, stack, Environment(stack, equal=range(50)), tmp_path).run())
    assert stack.newest == 0
    assert 48 <= len(stack.sampled) / 6 <= 60  # each group has three rollouts of two turns


def refuse(stack: FakeStack, batches: int) -> None:
    """The controller drops all groups of the first `batches` requests."""
    refusals = itertools.repeat(NothingToLearn("9 trajectories don't fit 8 tokens"), batches)

    async def train(run: str, request: dict[str, Any]) -> None:
        for refusal in refusals:
            raise refusal
        await FakeStack.train(stack, run, request)

    stack.train = train  # type: ignore[method-assign]


@pytest.mark.parametrize(("equal", "batches"), [(range(0), 3), (range(50), 16)])
def test_where_the_controller_trains_no_batch_the_loop_ends(
    tmp_path: Path, equal: range, batches: int
) -> None:
    stack = FakeStack(delay=0.0005)
    refuse(stack, 100)
    loop = make_loop(
        config(advantage=NO_BASELINE), stack, Environment(stack, equal=equal), tmp_path
    )

    async def some_time() -> None:
        async with asyncio.timeout(20):
            await loop.run()

    with pytest.raises(
        NothingToLearn,
        match=rf"of the last {batches} batches, so the run stays at step 0: .* 8 tokens",
    ):
        asyncio.run(some_time())
    assert loop.error.startswith("the controller refused a batch: 9 trajectories don't fit")
    assert loop.counts["uninformative"] == 3 * batches
    assert len(loop.state.open) <= loop.groups_in_flight


def test_a_batch_that_the_controller_does_not_train_is_counted_and_replaced(tmp_path: Path) -> None:
    stack = FakeStack()
    refuse(stack, 2)
    run(config(steps=2), stack, tmp_path)
    check(stack, 2, 0)
    assert lines(tmp_path)[0]["left_out"]["uninformative"] >= 6
    other = State(run=RUN, environments=["fake:fake"], created=0, first=0, cursors=[0])
    assert not load_progress(tmp_path / "state.json", other).open


def test_a_failed_job_ends_the_loop_and_the_next_start_trains_its_tasks_anew(
    tmp_path: Path,
) -> None:
    stack = FakeStack(fail_jobs=1)
    with pytest.raises(JobFailed):
        run(config(max_off_policy_steps=1), stack, tmp_path)
    run(config(max_off_policy_steps=1), stack, tmp_path)
    check(stack, 6, 1)
    assert stack.trained[0].id == "fake-rl-0-2"
    failed = set(stack.jobs["fake-rl-0"].request["labels"]["tasks"].split())
    assert failed & {
        task for job in stack.trained for task in job.request["labels"]["tasks"].split()
    }


def test_a_submission_behind_a_failed_job_ends_the_loop_with_that_jobs_failure(
    tmp_path: Path,
) -> None:
    stack = FakeStack(fail_jobs=1)

    async def seen_late(job: str, timeout: float = 60.0) -> None:
        """The follower sees the job's failure only after the controller has refused the next
        submission."""
        while stack.jobs[job].state in ("queued", "running", "failed") and not refusals:
            await asyncio.sleep(0.0005)
        await FakeStack.wait_job(stack, job, timeout)

    async def train(run: str, request: dict[str, Any]) -> None:
        while any(job.state in ("queued", "running") for job in stack.jobs.values()):
            await asyncio.sleep(0.0005)
        try:
            await FakeStack.train(stack, run, request)
        except Conflict as error:
            refusals.append(error)
            raise

    refusals: list[Conflict] = []
    stack.wait_job, stack.train = seen_late, train  # type: ignore[method-assign]
    with pytest.raises(JobFailed):
        run(config(max_off_policy_steps=1), stack, tmp_path)
    assert refusals


def test_a_job_that_made_its_step_and_was_removed_since_is_not_waited_for(tmp_path: Path) -> None:
    stack = FakeStack()

    async def killed_behind_the_job(job: str, _timeout: float) -> None:
        await FakeStack.wait_job(stack, job)
        raise Killed

    stack.wait_job = killed_behind_the_job  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run(config(steps=3), stack, tmp_path)
    del stack.wait_job
    stack.jobs.clear()  # as TANDEM_KEEP_DAYS does
    stack.served = stack.newest
    run(config(steps=3), stack, tmp_path)
    check(stack, 3, 0)
    assert [line["step"] for line in lines(tmp_path)] == [2, 3]


def test_more_steps_go_on_from_the_state(tmp_path: Path) -> None:
    stack = FakeStack()
    for steps in (2, 5):
        run(config(steps=steps), stack, tmp_path)
    check(stack, 5, 0)


def test_a_vllm_that_is_not_the_stacks_ends_the_loop_before_anything_is_sampled(
    tmp_path: Path,
) -> None:
    async def stranger(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401)

    stack = FakeStack()
    stack.answer = stranger  # type: ignore[method-assign]
    with pytest.raises(TandemError, match="http://vllm/v1/models refuses the key"):
        run(config(), stack, tmp_path)


def test_a_model_that_vllm_does_not_have_yet_is_asked_for_again(tmp_path: Path) -> None:
    stack = FakeStack()
    answers = itertools.chain([False] * 2, itertools.repeat(True))
    stack.serving = lambda step: next(answers)
    run(config(steps=1), stack, tmp_path)
    check(stack, 1, 0)


def test_a_training_that_goes_on_behind_anothers_lines_writes_its_own(tmp_path: Path) -> None:
    """The metrics file already has the lines of an earlier loop with another state file."""
    asyncio.run(run_until_done(config(steps=4), FakeStack(), tmp_path))
    (tmp_path / "state.json").unlink()
    stack = FakeStack(delay=0.001)
    stack.kill_at = 12
    assert asyncio.run(run_until_done(config(steps=4), stack, tmp_path)) == 1
    check(stack, 4, 0)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4] * 2


def test_what_a_rollback_has_discarded_is_trained_evaluated_and_recorded_again(
    tmp_path: Path,
) -> None:
    stack, settings = FakeStack(), config(steps=3, evaluation={"every": 1, "groups": 2})
    run(settings, stack, tmp_path)
    stack.newest = stack.served = 1
    run(settings, stack, tmp_path)
    assert [line["step"] for line in lines(tmp_path) if "step" in line] == [1, 2, 3, 2, 3]
    assert [line["evaluated"] for line in lines(tmp_path) if "evaluated" in line] == [
        0,
        1,
        2,
        3,
        2,
        3,
    ]


@pytest.mark.parametrize("pending", [False, True])
def test_a_rollback_behind_a_job_that_is_still_followed_has_its_step_made_again(
    tmp_path: Path, pending: bool
) -> None:
    """The publisher refused the step of `fake-rl-1`, or the loop was killed before it knew that it
    had sent the job."""
    stack, settings = FakeStack(), config(steps=3)

    async def refused(run: str, step: int, _timeout: float) -> Any:
        if step == 2:
            raise NotServed("the publisher refused it")
        return await FakeStack.wait_served(stack, run, step)

    async def killed(run: str, request: dict[str, Any]) -> None:
        await FakeStack.train(stack, run, request)
        if request["base_step"] == 1:
            raise Killed

    async def scene() -> None:
        name, fault = ("train", killed) if pending else ("wait_served", refused)
        setattr(stack, name, fault)
        with pytest.raises(Killed if pending else NotServed):
            await make_loop(settings, stack, Environment(stack), tmp_path).run()
        delattr(stack, name)
        while stack.served < 2:
            await asyncio.sleep(0.001)
        stack.newest = stack.served = 1
        async with asyncio.timeout(30):
            await make_loop(settings, stack, Noted(stack), tmp_path).run()

    again = set[int]()

    class Noted(Environment):
        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            again.add(task)
            return await super().rollout(task, sampler)

    asyncio.run(scene())
    assert [job.id for job in stack.trained] == [
        "fake-rl-0",
        "fake-rl-1",
        "fake-rl-1-2",
        "fake-rl-2",
    ]
    assert [line["job"] for line in lines(tmp_path)] == ["fake-rl-0", "fake-rl-1-2", "fake-rl-2"]
    discarded = set(stack.trained[1].request["labels"]["tasks"].split())
    tasks = Environment(stack).tasks
    assert {tasks[int(name.partition(":")[2])] for name in discarded} <= again, (
        "they are handed out first"
    )


@pytest.mark.parametrize("bound", [0, 2])
def test_the_same_command_goes_on_when_a_refused_step_is_served(tmp_path: Path, bound: int) -> None:
    stack, settings = FakeStack(), config(steps=4, max_off_policy_steps=bound)

    async def scene() -> None:  # the fake stack's jobs need one event loop for all runs
        for _ in range(2):
            with pytest.raises(StepRefused):
                await make_loop(settings, stack, Environment(stack), tmp_path).run()
        stack.refuses, stack.served = 100, stack.newest  # vLLM was started again
        async with asyncio.timeout(30):
            await make_loop(settings, stack, Environment(stack), tmp_path).run()

    stack.refuses = 2
    asyncio.run(scene())
    check(stack, 4, bound)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("bound", [0, 2])
def test_with_from_served_a_refused_step_is_discarded_and_made_again(
    tmp_path: Path, bound: int
) -> None:
    stack, settings = FakeStack(), config(steps=4, max_off_policy_steps=bound)

    async def scene() -> None:
        with pytest.raises(StepRefused):
            await make_loop(settings, stack, Environment(stack), tmp_path).run()
        async with asyncio.timeout(30):
            again = make_loop(settings, stack, Environment(stack), tmp_path, from_served=True)
            await again.run()

    stack.refuses = 2
    asyncio.run(scene())
    assert [job.id for job in stack.trained if job.base < 2] == [
        "fake-rl-0",
        "fake-rl-1",
        "fake-rl-1-2",
    ]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert stack.newest == stack.served == 4


def test_without_a_refused_step_from_served_changes_nothing(tmp_path: Path) -> None:
    stack, settings = FakeStack(), config(steps=2)
    run(settings, stack, tmp_path)
    stack.served = 1  # vLLM starts again
    loop = make_loop(config(steps=3), stack, Environment(stack), tmp_path, from_served=True)

    async def scene() -> None:
        async with asyncio.timeout(30):
            running = asyncio.create_task(loop.run())
            await asyncio.sleep(0.05)
            stack.served = 2
            await running

    asyncio.run(scene())
    check(stack, 3, settings.rl.max_off_policy_steps)


def test_a_group_that_fails_after_it_was_dropped_as_stale_is_left_out_once(tmp_path: Path) -> None:
    stack = FakeStack()

    class SlowToLeave(Environment):
        """A rollout of the first task fails. The other rollouts of this task end only when the
        trainer has passed the bound."""

        first: int | None = None

        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            if self.first is None:
                self.first = task
                raise ValueError("it is broken")
            if task != self.first:
                return await super().rollout(task, sampler)
            try:
                return await asyncio.Event().wait()  # type: ignore[return-value]
            finally:
                while stack.newest < 3:
                    await asyncio.sleep(0.001)

    asyncio.run(
        make_loop(
            config(max_off_policy_steps=1, retries=0), stack, SlowToLeave(stack), tmp_path
        ).run()
    )
    check(stack, 6, 1)
    left_out = [line["left_out"] for line in lines(tmp_path)]
    assert sum(counts["failed"] for counts in left_out) == 0
    assert sum(counts["stale"] for counts in left_out) >= 1


def test_one_loop_per_state_file(tmp_path: Path) -> None:
    async def two() -> None:
        stack = FakeStack(delay=0.05)
        first = asyncio.create_task(make_loop(config(), stack, Environment(stack), tmp_path).run())
        await asyncio.sleep(0.05)
        with pytest.raises(Conflict, match="another `tandem rl` uses"):
            await asyncio.to_thread(
                asyncio.run, make_loop(config(), stack, Environment(stack), tmp_path).run()
            )
        first.cancel()

    asyncio.run(two())


def test_state_files_whose_names_differ_behind_the_last_dot_have_locks_of_their_own(
    tmp_path: Path,
) -> None:
    stack = FakeStack()
    loop = make_loop(config(steps=1), stack, Environment(stack), tmp_path)
    loop._file = tmp_path / "lr-1e-5.1"
    with (
        file_lock(tmp_path / "lr-1e-5.lock"),
        file_lock(tmp_path / "lr-1e-5.0.lock"),
    ):  # another thread runs the loop, because a thread may take its own locks again
        asyncio.run(asyncio.to_thread(asyncio.run, loop.run()))
    check(stack, 1, 0)


def test_jobs_of_runs_that_begin_alike_have_names_of_their_own() -> None:
    runs = ["r" * 40, "r" * 41, "r" * 40 + "2", "r" * 64]
    names = [next(job_names(run, 10**9)) for run in runs]
    assert names[0] == f"{'r' * 40}-rl-1000000000"
    assert len(set(names)) == 4
    for name in names:
        TypeAdapter(JobId).validate_python(name)
    assert list(itertools.islice(job_names("short", 7), 3)) == [
        "short-rl-7",
        "short-rl-7-2",
        "short-rl-7-3",
    ]


def test_a_state_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    stack = FakeStack()
    run(config(steps=1), stack, tmp_path)
    other = config(environment=[{"use": "other:env"}])
    stack.created = 0  # the loop must not create a run, because this stack can't create one
    with pytest.raises(InvalidInput, match="is of run 'fake' with the environments fake:fake"):
        run(other, stack, tmp_path)
    for stack.created in (0, 2):
        with pytest.raises(InvalidInput, match="is of a run 'fake' that was deleted; remove it"):
            run(config(steps=2), stack, tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(InvalidInput, match="is damaged"):
        run(config(), stack, tmp_path)


def test_evaluation_before_between_and_after_also_where_a_kill_cut_it_off(tmp_path: Path) -> None:
    stack = FakeStack()
    settings = config(steps=3, evaluation={"every": 2, "groups": 2, "samples": 2})

    class NeverEvaluated(Environment):
        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            if sampler._pin is not None:
                await asyncio.Event().wait()
            return await super().rollout(task, sampler)

    async def killed_behind_the_first_step() -> None:
        loop = asyncio.create_task(
            make_loop(settings, stack, NeverEvaluated(stack), tmp_path).run()
        )
        while not (tmp_path / "metrics.jsonl").exists():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop

    asyncio.run(killed_behind_the_first_step())
    assert [line.get("step") for line in lines(tmp_path)] == [1]
    run(settings, stack, tmp_path)
    check(stack, 3, 0)
    assert sorted(line["step"] for line in lines(tmp_path) if "step" in line) == [1, 2, 3]
    evaluated = [line for line in lines(tmp_path) if "evaluated" in line]
    assert [line["evaluated"] for line in evaluated] == [0, 2, 3]
    assert {line["samples"] for line in evaluated} == {4}


def test_an_evaluation_whose_rollouts_all_fail_ends_the_loop_and_is_made_again(
    tmp_path: Path,
) -> None:
    stack = FakeStack()
    settings = config(steps=1, evaluation={"every": 5, "groups": 2})

    class Broken(Environment):
        until = 0

        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            if sampler._pin is not None and sampler._pin >= self.until:
                raise OSError("the judge is away")
            return await super().rollout(task, sampler)

    async def scene() -> None:
        environment = Broken(stack)
        for step in (0, 1):
            environment.until = step
            with pytest.raises(
                TandemError,
                match=rf"of step {step} failed; the last error: OSError: the judge is away "
                r"\(test_loop.py, line \d+\)",
            ):
                await make_loop(settings, stack, environment, tmp_path, patience=0.1).run()
        assert stack.newest == 1
        await make_loop(settings, stack, Environment(stack), tmp_path).run()

    asyncio.run(scene())
    evaluated = [
        (line["evaluated"], line["samples"]) for line in lines(tmp_path) if "evaluated" in line
    ]
    assert evaluated == [(0, 2), (1, 2)]


def scored(stack: FakeStack, rewards: dict[int, float]) -> Environment:
    """An environment that gives each answer of step s the reward `rewards[s]` in evaluations."""

    class Scored(Environment):
        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            made = await super().rollout(task, sampler)
            if sampler._pin is None:
                return made
            return made.model_copy(update={"reward": rewards[sampler._pin]})

    return Scored(stack)


def test_the_best_step_is_pinned_and_named_and_nothing_better_ends_the_loop(tmp_path: Path) -> None:
    stack = FakeStack()
    rewards = dict(enumerate([0.1, 0.5, 0.9, 0.9, 0.3, 0.2, 0.1, 1.0]))
    settings = config(steps=7, evaluation={"every": 1, "groups": 2, "stop_after": 3})
    environment = scored(stack, rewards)
    loop = make_loop(settings, stack, environment, tmp_path)
    said: list[str] = []
    loop.record._tell = lambda line: said.append(text_line(line))
    asyncio.run(loop.run())
    assert loop.evaluations.best() == (2, 0.9)
    assert stack.pinned == {2}
    # The evaluation of step 5 ends the training, and step 6 may be in training then.
    assert stack.newest == loop.last in (5, 6)
    made = stack.newest
    assert any("no evaluation was better than that of step 2" in line for line in said)
    again = make_loop(settings, stack, environment, tmp_path)
    asyncio.run(again.run())  # the same command runs again after the training's end
    assert (stack.newest, again.last) == (made, made)

    checked = tmp_path / "pinned"
    checked.mkdir()
    stack = FakeStack()
    stack.pinned = {1}  # by a person
    asyncio.run(make_loop(settings, stack, scored(stack, rewards), checked).run())
    assert stack.pinned == {1, 2}


def test_evaluations_have_names_sampling_and_pass_at(tmp_path: Path) -> None:
    stack, asked = FakeStack(), list[dict[str, Any]]()
    evaluation = [
        {"name": "hot", "every": 1, "groups": 2, "samples": 3, "pass_at": [1, 2], "passes": 1},
        {"name": "cold", "every": 2, "groups": 1, "samples": 2},
    ]
    evaluation[1]["sampling"] = {"temperature": 0.0, "seed": 7}
    settings = Config.model_validate(
        {**config(steps=2).model_dump(exclude_unset=True), "eval": evaluation}
    )

    class Watching(Environment):
        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            if sampler._pin == 2:
                asked.append(sampler.options)
            return await super().rollout(task, sampler)

    loop = make_loop(settings, stack, Watching(stack), tmp_path)
    asyncio.run(loop.run())
    found = [line for line in lines(tmp_path) if "evaluated" in line]
    assert sorted((line["evaluated"], line["name"], line["samples"]) for line in found) == [
        (0, "cold", 2),
        (0, "hot", 6),
        (1, "hot", 6),
        (2, "cold", 2),
        (2, "hot", 6),
    ]
    assert sorted(map(str, asked)) == sorted(
        ["{}"] * 6 + [str({"temperature": 0.0, "seed": seed}) for seed in (7, 8)]
    )
    hot = [line for line in found if line["name"] == "hot"]
    assert all(set(line["pass_at"]) == {"1", "2"} for line in hot)
    assert "(hot): reward" in text_line(hot[0])
    assert "pass@2" in text_line(hot[0])


@pytest.mark.parametrize(
    ("rewards", "k", "expected"),
    [
        ([[1, 0, 0, 0]], 1, 1 / 4),
        ([[1, 0, 0, 0]], 2, 1 / 2),  # 3 of the 6 pairs contain the reward 1
        ([[1, 1, 0, 0]], 2, 5 / 6),
        ([[1, 0, 0, 0], [0, 0, 0, 0]], 4, 1 / 2),
        ([[1], [0, 0]], 2, 0.0),  # the first task lost a sample
        ([[1]], 2, None),
    ],
)
def test_pass_at_k_is_the_share_of_subsets_with_a_passing_answer(
    rewards: list[list[float]], k: int, expected: float | None
) -> None:
    groups = [[Trajectory.model_construct(reward=reward) for reward in group] for group in rewards]
    assert pass_at(k, groups, 1.0) == (expected if expected is None else pytest.approx(expected))


def test_the_loop_waits_for_vllm_as_long_as_it_takes_to_start_and_says_so(tmp_path: Path) -> None:
    stack, said = FakeStack(), []
    loop = make_loop(config(steps=2), stack, Environment(stack), tmp_path)

    async def after_half_an_hour(run: str, step: int, timeout: float = 600.0) -> Any:
        if timeout < 1800:
            raise NotServed(f"{run}@{step} was not served within {timeout} s")
        said.append(shown(loop))
        return await FakeStack.wait_served(stack, run, step)

    stack.wait_served = after_half_an_hour  # type: ignore[method-assign]
    asyncio.run(loop.run())
    assert all(
        f"waits until vLLM serves fake@{step}" in " ".join(said[step].split()) for step in range(3)
    )
    assert "waits until" not in shown(loop)


def test_where_trainer_and_vllm_share_gpus_only_0_is_taken(tmp_path: Path) -> None:
    stack = FakeStack()
    stack.shared_gpus = True
    with pytest.raises(InvalidInput, match="take turns on the same GPUs") as refused:
        run(config(max_off_policy_steps=1), stack, tmp_path)
    assert refused.value.field == "rl.max_off_policy_steps"
    run(config(steps=1), stack, tmp_path)


def test_jobs_get_the_bounds_of_the_file(tmp_path: Path) -> None:
    stack = FakeStack()
    run(config(steps=1, deadline_seconds=7200.0, max_attempts=1), stack, tmp_path)
    request = stack.trained[0].request
    assert (request["deadline_seconds"], request["max_attempts"]) == (7200.0, 1)


def test_on_shared_gpus_no_job_trains_beside_an_evaluation(tmp_path: Path) -> None:
    """If a job trained at the same time as an evaluation, vLLM would not answer until the job has
    ended."""
    stack, beside = FakeStack(), []
    stack.shared_gpus = True

    class Slow(Environment):
        async def rollout(self, task: int, sampler: Any) -> Trajectory:
            if sampler._pin is not None:
                for _ in range(20):
                    await asyncio.sleep(0.002)
                    beside.extend(
                        job.id for job in stack.jobs.values() if job.state in ("queued", "running")
                    )
            return await super().rollout(task, sampler)

    settings = config(
        steps=3, max_off_policy_steps=0, evaluation={"every": 1, "groups": 2, "samples": 1}
    )
    asyncio.run(make_loop(settings, stack, Slow(stack), tmp_path).run())
    check(stack, 3, 0)
    assert [line["evaluated"] for line in lines(tmp_path) if "evaluated" in line] == [0, 1, 2, 3]
    assert beside == []


def test_rollouts_longer_than_a_row_are_cut_and_counted(tmp_path: Path) -> None:
    """Jobs truncate long rollouts. If a job refused the groups of long rollouts, the whole request
    would be lost, and the loop would end."""
    stack = FakeStack()
    settings = config(steps=2, packing={"sequence_length": 3})
    run(settings, stack, tmp_path)
    assert all(
        job.request["packing"] == {"sequence_length": 3, "too_long": "truncate"}
        for job in stack.trained
    )
    assert [line["too_long"] for line in lines(tmp_path)] == [0, 0]

    longer = FakeStack()
    longer.answer_ids = [5, 6]
    (tmp_path / "longer").mkdir()
    loop = make_loop(settings, longer, Environment(longer), tmp_path / "longer")
    asyncio.run(loop.run())
    assert [line["too_long"] for line in lines(tmp_path / "longer")] == [9, 9]
    assert "9 rollouts longer than a row" in text_line(loop.record.lines[0])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(panel(loop))
    assert "18 rollouts longer than a row (truncate)" in console.export_text()


def test_a_prompt_that_leaves_no_token_to_train_is_a_failed_rollout(tmp_path: Path) -> None:
    with pytest.raises(
        TandemError, match=r"a prompt of 2 tokens fills a row of 2; raise packing\.sequence_length"
    ):
        run(config(packing={"sequence_length": 2}), FakeStack(), tmp_path)


def test_a_new_training_with_an_old_record_is_recorded(tmp_path: Path) -> None:
    for _ in range(2):
        stack = FakeStack()
        run(config(steps=2), stack, tmp_path)
        (tmp_path / "state.json").unlink()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 1, 2]


def test_the_live_view_shows_the_loop(tmp_path: Path) -> None:
    stack = FakeStack()
    settings = config(steps=3, evaluation={"groups": 2})
    loop = make_loop(settings, stack, Environment(stack), tmp_path)

    assert "0 of 3 in flight" in shown(loop)  # the panel before the first step
    asyncio.run(loop.run())
    text = shown(loop)
    assert "fake@3 of 3, served @3" in text
    for part in (
        "reward ",
        "off policy ",
        "time ",
        "evaluated ",
        "groups ",
        "left out ",
        "last sample, reward",
        "user: ",
    ):
        assert part in text
    assert loop.sample is not None
    loop.sample = loop.sample.model_copy(
        update={"messages": [{"content": "of an environment's own form"}]}
    )
    assert "None: of an environment's own form" in shown(loop)


def test_a_rollback_behind_the_loops_first_step_is_trained_from_there(tmp_path: Path) -> None:
    stack, settings, starts = FakeStack(), config(steps=2, optimizer={"batch_size": 3}), []

    async def train(run: str, request: dict[str, Any]) -> None:
        starts.append(request["optimizer"]["schedule"]["start"])
        await FakeStack.train(stack, run, request)

    stack.train = train  # type: ignore[method-assign]
    for newest in (5, 3):
        stack.newest = stack.served = newest
        run(settings, stack, tmp_path)
    assert starts == [0, 1, 0, 0, 0, 1]
