"""The loop of `tandem rl`. The first coroutine rolls groups out, the second submits the groups as
jobs, and the third follows the jobs and waits until vLLM serves each new step.

A job that starts from step b trains a group only if every turn of the group was sampled from step
b - `max_off_policy_steps` or a newer step. A group begins only if a future job can still train the
group's samples. With `max_off_policy_steps` 0 the loop is synchronous.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from tandem.client import AsyncTandem, RunStatus, Trajectory
from tandem.client.http import discarded, raise_if_other
from tandem.client.rl.config import Config
from tandem.client.rl.distill import Teacher
from tandem.client.rl.environment import Environment, RolloutGroup
from tandem.client.rl.evaluation import Evaluations
from tandem.client.rl.groups import Lost, Rollouts
from tandem.client.rl.limits import Limits
from tandem.client.rl.record import RunRecord, State, Submitted, batch_numbers, load_progress
from tandem.client.rl.refused import discard_refused, raise_failure, raise_unless_free
from tandem.client.rl.requests import job_names, job_request
from tandem.client.rl.rollout import PAUSES, described
from tandem.client.rl.sampler import PATIENCE
from tandem.client.rl.samples import SampleFile, same_text, sample, samples_file
from tandem.client.rl.watch import Watch
from tandem.client.vllm import Vllm, raise_unless_serving
from tandem.errors import Conflict, InvalidInput, NotFound, NothingToLearn, TandemError
from tandem.spool.fs import write_json_atomic
from tandem.spool.locks import LockHeldError, file_lock

_POLL_SECONDS = 0.01
_SAMPLE_EVERY = 10  # every tenth step's record has a sample


class Loop:
    """The loop. `environments`: the environments of [[rl.environment]], then of [eval]."""

    def __init__(
        self,
        config: Config,
        tandem: AsyncTandem,
        vllm: Vllm,
        environments: list[Environment],
        state_file: Path,
        record: RunRecord,
        *,
        patience: float = PATIENCE,
        pauses: tuple[float, float] = PAUSES,
        from_served: bool = False,
        teacher: Teacher | None = None,
    ) -> None:
        """`from_served`: whether to call `discard_refused`; `teacher`: scores the samples."""
        self.config, self.record, self._rl = config, record, config.rl
        self._run, self._tandem, self._vllm = config.run.name, tandem, vllm
        self._environments, self._file, self._from_served = environments, state_file, from_served
        self.bound, self._size = config.rl.max_off_policy_steps, config.rl.groups_per_step
        self.groups_in_flight = config.rl.groups_in_flight or (self.bound + 1) * self._size
        # `base`: the next job's base step. `served`: the newest served step. `last`: the last step.
        self.base = self.served = self.last = 0
        # Task -> the coroutine of its group, and the step that was served when the group began.
        self.running: dict[str, tuple[asyncio.Task[None], int]] = {}
        self.ready: list[RolloutGroup] = []
        self.counts: Counter[str | Lost] = Counter()  # counted since the last submission of a job
        self.sample: Trajectory | None = None
        self.error = ""
        # The step that the loop waits for vLLM to serve.
        self.awaited: int | None = None
        self._rewards: list[float] = []  # all rewards that were sampled since the last submission
        self._limits, self._watch = Limits(config.rl, patience, pauses), Watch(self._name)
        self._rollouts = Rollouts(
            self._rl,
            self._run,
            vllm,
            lambda: self.served,
            self._failed,
            lambda lost: self.counts.update([lost]),
            pauses,
            self._watch,
            teacher,
        )
        self.evaluations = Evaluations(
            config.eval,
            environments[0],
            environments[len(self._rl.environment) :],
            self._rl,
            self._rollouts,
            record,
            lambda: self._limits.grace,
            pauses,
        )

    async def run(self) -> None:
        """Train to the last step; raises the error that stopped the loop."""
        try:
            with file_lock(self._file.with_name(f"{self._file.name}.lock"), blocking=False):
                await self._begin()
                with self._watch:
                    async with asyncio.TaskGroup() as tasks:
                        rollouts = tasks.create_task(self._roll_out_groups())
                        tasks.create_task(self._train())
                        await self._follow(tasks)
                        rollouts.cancel()
        except LockHeldError as error:
            raise Conflict(
                f"another `tandem rl` uses {self._file}; stop it first", field="--state"
            ) from error
        except BaseExceptionGroup as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None

    async def _begin(self) -> None:
        """Create the run or find it. Resume from the state file, with the jobs that were submitted
        before."""
        run, uses = self.config.run, [section.use for section in self._rl.environment]
        # The state is written once the run exists, because `created` and `first` describe the run.
        new = State(run=run.name, environments=uses, created=0, first=0, cursors=[0] * len(uses))
        self.state = load_progress(self._file, new)
        existing: RunStatus | None = None
        with suppress(NotFound):
            existing = await self._tandem.get_run(run.name)
        created = existing.spec.created if existing else None
        if self.state is not new and self.state.created != created:
            problem = (
                f"{self._file} is of a run {run.name!r} that was deleted; remove it to begin anew"
            )
            raise InvalidInput(problem, field="--state")
        status = existing or await self._tandem.create_run(**run.model_dump(exclude_unset=True))
        raise_if_other(status, run.model_dump(exclude_unset=True), "run.lora")
        if self.state is new:
            new.created, new.first, new.recorded = (
                status.spec.created,
                status.newest_step,
                len(self.record.lines),
            )
        del self.record.lines[: self.state.recorded]
        raise_unless_free(status, self.state, self.bound)
        self._shared = status.shared_gpus
        if self._from_served:
            await discard_refused(tandem=self._tandem, state=self.state, status=status)
        await self._settle_jobs()
        jobs = self.state.jobs
        self.base = (
            jobs[-1].base + 1 if jobs else (await self._tandem.get_run(run.name)).newest_step
        )
        self.last, self._idle_since = self.state.first + self._rl.steps, time.time()
        self._write_down(None)
        self._samples = SampleFile(samples_file(self._file))
        first_task = self._environments[0].tasks.first(1)[0]
        self.record.begins(self.config, self.base, self.last, first_task, self._followed)
        await self._until_served(self._followed)
        await raise_unless_serving(self._vllm, run.name)

    async def _settle_jobs(self) -> None:
        """Forget the submitted jobs that made no step, and all jobs after such a job."""
        dead = False
        for job in list(self.state.jobs):
            if dead:  # the job's base step will never be made
                with suppress(NotFound):
                    await self._tandem.cancel(job.id)
            elif self.state.pending and job is self.state.jobs[-1] and await self._send():
                continue  # the controller refused the job, and `_send` has removed it
            known = await self._state_of(job.id)
            gone = known in ("", "succeeded") and discarded(
                job.id, job.base, await self._tandem.checkpoints(self._run)
            )
            if dead := dead or gone or known in ("failed", "cancelled"):
                self.state.forget(job)
            elif not known:  # the job made its step and was removed afterwards
                self.state.jobs.remove(job)

    @property
    def _followed(self) -> int:
        """The newest step whose job has been followed to its end."""
        return self.state.jobs[0].base if self.state.jobs else self.base

    async def _state_of(self, job: str) -> str:
        """The job's state; "" if the controller has no such job."""
        with suppress(NotFound):
            return (await self._tandem.get_job(job)).state
        return ""

    # ---- rolling out

    async def _roll_out_groups(self) -> None:
        again = list(self.state.open)  # tasks that were handed out before a restart
        weights = [section.weight for section in self._rl.environment]
        async with asyncio.TaskGroup() as groups:
            while True:
                await _until(
                    lambda: (
                        self._room() > 0
                        and len(self.running) < self.groups_in_flight
                        and not self._limits.paused
                    )
                )
                task = again.pop(0) if again else self.state.next_task(weights)
                self.running[task] = groups.create_task(self._roll_out(task)), self.served

    def _room(self) -> int:
        """The number of groups that may begin now and can still be trained by a future job."""
        jobs = min(self.served + self.bound, self.last - 1) - self.base + 1
        return jobs * self._size - len(self.ready) - len(self.running)

    async def _roll_out(self, task: str) -> None:
        i, number = map(int, task.split(":"))
        began = time.time()
        try:
            of = self._environments[i]
            made = await self._rollouts.group(of, of.tasks[number], self._rl.group_size)
            if len(made) < 2 <= self._rl.group_size and not self._limits.teaches:
                raise TandemError(
                    f"{len(made)} rollout of {self._rl.group_size} survives: {self.error}"
                )
            group = RolloutGroup(task, made, began, time.time())
        except Exception as error:
            if task not in self.running:
                return  # the group was dropped as stale while its rollouts ran
            self._leave_out(task, "failed")
            self.error = described(error)
            self._limits.failed(self._rl.environment[i].use, self.error)
        else:
            self._keep(group)
        finally:
            self.running.pop(task, None)

    def _keep(self, group: RolloutGroup) -> None:
        """Queue a group for the trainer, or drop it if it gives no gradient."""
        self._show(group.trajectories, group.task)
        self._rewards += [trajectory.reward for trajectory in group.trajectories]
        if group.informative or self._limits.teaches or not self._rl.dynamic_sampling:
            self.ready.append(group)
        else:
            self.counts["equal_texts"] += same_text(group.trajectories)
            self._leave_out(group.task, "uninformative")
        self._limits.sampled(group, self.base)

    def _show(self, trajectories: Sequence[Trajectory], task: str, **more: Any) -> None:
        """Keep a group's samples for people; print the loop's first sample."""
        if not self.sample:
            self.record.notice("the first sample", sample(trajectories[0]))
        self.sample, about = trajectories[0], {"run": self._run, "task": task, "time": time.time()}
        self._samples.add([sample(one, **about, **more) for one in trajectories])

    def _leave_out(self, task: str, why: str) -> None:
        self.counts[why] += 1
        self.state.open.remove(task)

    def _failed(self, error: Exception) -> None:
        self.counts["errors"] += 1
        self.error = described(error)

    def _name(self, problem: str) -> None:
        """Report the rollout that blocks the event loop."""
        self.error = problem
        self.record.notice(problem)

    # ---- submitting

    async def _train(self) -> None:
        while self.base < self.last:
            await _until(lambda: self.base >= self.last or self._has_batch())
            if self.base >= self.last:
                return  # an evaluation ended the training
            self.ready.sort(key=lambda group: group.oldest)
            await self._submit(self.ready[: self._size])
            del self.ready[: self._size]

    def _has_batch(self) -> bool:
        """Whether the next job has enough groups. Drops groups that the job must not train."""
        oldest = self.base - self.bound
        late = [task for task, (_, step) in self.running.items() if step < oldest]
        for task in late:
            self.running.pop(task)[0].cancel()
        stale = [group for group in self.ready if group.oldest < oldest]
        self.ready = [group for group in self.ready if group not in stale]
        for task in (*late, *(group.task for group in stale)):
            self._leave_out(task, "stale")
        # vLLM serves only the newest steps, so a step is evaluated before two newer steps exist. On
        # shared GPUs vLLM does not answer while a job trains, so the job waits for the evaluation.
        evaluated = (all if self._shared else any)(
            (self.base <= self._followed, self._evaluation.done())
        )
        return len(self.ready) >= self._size and evaluated

    async def _submit(self, batch: list[RolloutGroup]) -> None:
        """Write the request to the state file, then send it."""
        tasks = [group.task for group in batch]
        for name in job_names(self._run, self.base):
            if not await self._state_of(name):
                break  # the earlier names belong to jobs that failed, or whose step was rolled back
        numbers = batch_numbers(
            batch, self.base, self._rl.packing.sequence_length, self._rewards, self.counts
        )
        numbers["last_error"] = self.error if self.counts["errors"] else None
        if (self.base + 1 - self.state.first) % _SAMPLE_EVERY == 0:
            numbers["sample"] = sample(batch[-1].trajectories[0])
        rewards, counts, self._rewards, self.counts = self._rewards, self.counts, [], Counter()
        self.state.jobs.append(Submitted(id=name, base=self.base, tasks=tasks, numbers=numbers))
        self.state.open = [task for task in self.state.open if task not in tasks]
        self._write_down(job_request(self._rl, batch, name, self.base, self.state.first))
        refusal = await self._send()
        if refusal is None:
            self.base += 1
            if self.base == self.state.first + 1:
                waits = f"waits until it has trained, and vLLM serves {self._run}@{self.base}"
                self.record.notice(f"job {name} is submitted; {waits}")
            self._limits.accepted()
            return
        counts["uninformative"] += len(batch)
        self._rewards[:0], self.counts = rewards, self.counts + counts
        self.error = f"the controller refused a batch: {refusal}"
        self._limits.refused(batch, refusal, self.base)

    async def _send(self) -> NothingToLearn | None:
        """Send the request in the state file. Returns the controller's refusal if the groups give
        no gradient. After this refusal, the loop does not repeat the groups' tasks."""
        assert self.state.pending is not None
        refusal: NothingToLearn | None = None
        try:
            await self._tandem.train(self._run, self.state.pending)
        except NothingToLearn as error:
            refusal = error
            self.state.jobs.pop()
        except (InvalidInput, Conflict):
            self.state.forget(self.state.jobs[-1])
            self._write_down(None)
            await raise_failure(self._tandem, self.state.jobs)
            raise
        self._write_down(None)
        return refusal

    def _write_down(self, pending: dict[str, Any] | None) -> None:
        self.state.pending = pending
        write_json_atomic(self._file, self.state)

    # ---- following

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Wait for each job, and until vLLM serves the job's step. Record the step's numbers, and
        evaluate the step."""
        self._evaluation = tasks.create_task(self._evaluate(self._followed))
        while self._followed < self.last:
            await _until(
                lambda: (
                    len(self.state.jobs) > bool(self.state.pending) or self._followed >= self.last
                )
            )
            if not (jobs := self.state.jobs):
                break
            job = jobs[0]
            await self._tandem.wait_job(job.id, inf)
            await self._until_served(job.base + 1)
            self._idle_since = self.record.step(
                job, await self._tandem.job_events(job.id), self._idle_since
            )
            # A kill during the evaluation loses no evaluation, because the state still has the job.
            await self._evaluation
            self.state.jobs.remove(job)
            self._write_down(self.state.pending)
            self._evaluation = tasks.create_task(self._evaluate(self._followed))
        await self._evaluation

    def _stop_early(self) -> None:
        """Submit no further job if the last evaluations were no better than an earlier one."""
        end = self.base + bool(self.state.pending)
        best = self.evaluations.best()
        if best is not None and end < self.last and self.evaluations.stops():
            self.last = end
            self.record.notice(f"ends early: no evaluation was better than that of step {best[0]}")

    async def _until_served(self, step: int) -> None:
        self.awaited = step
        # No time limit: vLLM may take half an hour to start. A refused step raises StepRefused.
        self.served = (await self._tandem.wait_served(self._run, step, inf)).step
        self.awaited = None

    async def _evaluate(self, step: int) -> None:
        """Run and record the evaluations that are due at `step`, and keep the best step."""
        show, made = partial(self._show, evaluated=True), step - self.state.first
        await self.evaluations.evaluate(step, made, step == self.last, show)
        self._stop_early()
        before = self.state.best
        await self.evaluations.keep_best(self._tandem, self.state)
        if self.state.best != before:
            self._write_down(self.state.pending)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(_POLL_SECONDS)
