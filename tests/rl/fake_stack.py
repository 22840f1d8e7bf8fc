"""A controller and a vLLM in this process, with random delays. The fakes answer the loop of `tandem
rl`, and record the loop's calls."""

import asyncio
import json
import random
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rl.mock_vllm import MockVllm
from tandem.client import Trajectory
from tandem.client.rl import environment
from tandem.client.rl.config import Config
from tandem.client.rl.loop import Loop
from tandem.client.rl.record import RunRecord
from tandem.errors import Conflict, JobFailed, NotFound, NothingToLearn, StepRefused
from tandem.spool.schema import Event, LoraShape

RUN = "fake"


class Killed(BaseException):
    """Stands for the end of the loop's process."""


@dataclass
class Job:
    id: str
    base: int
    request: dict[str, Any]
    state: str = "queued"


class FakeStack:
    """`delay`: the longest time that a call takes, in seconds. `kill_at`: the number of the moment
    at which the loop is killed. Every call of the controller and every write of the state has two
    such moments: before its effect and after it."""

    def __init__(self, delay: float = 0.004, seed: int = 0, fail_jobs: int = 0) -> None:
        self.random, self.delay = random.Random(seed), delay
        self.newest = self.served = 0
        self.created = 1.0  # the time when the run was created; 0 without a run
        self.jobs: dict[str, Job] = {}
        self.trained: list[Job] = []
        self.sampled: list[tuple[int, int]] = []  # (requested step, served step) of each request
        self.serving: Callable[[int], bool] = lambda _: True
        self.fail_jobs = fail_jobs
        self.refuses = 100  # the first step that the publisher refuses
        self.shared_gpus = False
        self.answer_ids = [5]
        self.pinned: set[int] = set()
        self.calls, self.kill_at = 0, -1
        self._background: set[asyncio.Task[None]] = set()

    async def pause(self, share: float = 1.0) -> None:
        await asyncio.sleep(self.random.random() * self.delay * share)

    def mark(self) -> None:
        self.calls += 1
        if self.calls == self.kill_at:
            raise Killed

    # ---- the controller

    async def get_run(self, run: str) -> SimpleNamespace:
        self.mark()
        pending = sum(job.state in ("queued", "running") for job in self.jobs.values())
        if not self.created:
            raise NotFound(run)
        spec = SimpleNamespace(name=run, created=self.created, trainable="lora", lora=LoraShape())
        shared = self.shared_gpus
        refused = self.newest if self.newest >= self.refuses else None
        return SimpleNamespace(
            newest_step=self.newest,
            num_pending=pending,
            shared_gpus=shared,
            spec=spec,
            served=SimpleNamespace(step=self.served, refused_step=refused),
            served_in_chain=True,
        )

    async def get_job(self, job: str) -> SimpleNamespace:
        self.mark()
        if job not in self.jobs:
            raise NotFound(job)
        return SimpleNamespace(state=self.jobs[job].state)

    async def checkpoints(self, run: str) -> list[SimpleNamespace]:
        self.mark()
        made = {0: None} | {job.base + 1: job.id for job in self.trained if job.base < self.newest}
        return [
            SimpleNamespace(step=step, job=job, pinned=step in self.pinned)
            for step, job in sorted(made.items())
        ]

    async def pin(self, run: str, step: int) -> None:
        self.pinned.add(step)

    async def unpin(self, run: str, step: int) -> None:
        self.pinned.discard(step)

    async def cancel(self, job: str) -> None:
        self.mark()
        if job not in self.jobs:
            raise NotFound(job)
        if self.jobs[job].state == "queued":
            self.jobs[job].state = "cancelled"

    async def train(self, run: str, request: dict[str, Any]) -> None:
        request = json.loads(json.dumps(request))
        try:
            self.mark()
        except Killed:
            # The request has arrived. The controller packs the request after the client's death.
            if self.random.random() < 0.5:
                self._start(self._accept_later(request))
            raise
        await self.pause()
        self._accept(request)
        self.mark()

    async def _accept_later(self, request: dict[str, Any]) -> None:
        await asyncio.sleep(0.01)
        with suppress(Conflict):
            self._accept(request)

    def _accept(self, request: dict[str, Any]) -> None:
        known = self.jobs.get(request["id"])
        if known:
            if known.request != request:
                raise Conflict("the id has other content", field="id")
            return
        taken = [job.base for job in self.jobs.values() if job.state in ("queued", "running")]
        if request["base_step"] != next(
            base for base in range(self.newest, 100) if base not in taken
        ):
            raise Conflict("another base step", field="base_step")
        if all(
            len({t["reward"] for t in group["trajectories"]}) == 1 for group in request["groups"]
        ):
            raise NothingToLearn("no variance")
        job = self.jobs[request["id"]] = Job(request["id"], request["base_step"], request)
        self._start(self._execute(job))

    def _start(self, work: Any) -> None:
        self._background.add(asyncio.create_task(work))

    async def _execute(self, job: Job) -> None:
        while self.newest < job.base:
            if job.state == "cancelled":
                return
            await asyncio.sleep(0.0005)
        job.state = "running"
        await self.pause(3)
        if self.fail_jobs:
            self.fail_jobs -= 1
            job.state = "failed"
            return
        job.state, self.newest = "succeeded", job.base + 1
        self.trained.append(job)
        await self.pause()
        if job.base + 1 < self.refuses:
            self.served = max(self.served, job.base + 1)

    async def rollback(self, run: str, step: int) -> None:
        self.mark()
        if any(job.state in ("queued", "running") for job in self.jobs.values()):
            raise Conflict("the run has queued or running jobs")
        self.newest, self.refuses = step, 100

    async def wait_job(self, job: str, timeout: float = 60.0) -> None:
        if job not in self.jobs:  # the killed client's request never arrived
            raise NotFound(f"no job {job}")
        while self.jobs[job].state in ("queued", "running"):
            await asyncio.sleep(0.0005)
        if self.jobs[job].state in ("failed", "cancelled"):
            raise JobFailed(f"job {job} failed", job_id=job)
        self.mark()

    async def wait_served(self, run: str, step: int, timeout: float = 600.0) -> SimpleNamespace:
        while self.served < step:
            await asyncio.sleep(0.0005)
            if self.refuses <= step <= self.newest:
                raise StepRefused("the publisher refused it", served=self.served)
        self.mark()
        return SimpleNamespace(step=self.served)

    async def job_events(self, job: str) -> list[Event]:
        self.mark()
        return [
            Event(seq=i, time=float(i), job=job, type=kind)
            for i, kind in enumerate(["claimed", "succeeded"])
        ]

    # ---- vLLM

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(
                200, json={"data": [{"id": "base"}, {"id": f"{RUN}@{self.served}"}]}
            )
        body = json.loads(request.content)
        step = int(body["model"].partition("@")[2])
        if not self.serving(step):
            return httpx.Response(404, json={"error": "no such model"})
        self.sampled.append((step, self.served))
        await self.pause(2)
        message = {"role": "assistant", "content": self.random.choice(["a", "b"])}
        choice = {"message": message, "token_ids": self.answer_ids}
        choice["logprobs"] = {"content": [{"logprob": -0.5}] * len(self.answer_ids)}
        return httpx.Response(
            200, json={"model": body["model"], "prompt_token_ids": [1, 2], "choices": [choice]}
        )


class Environment(environment.Environment):
    """Rollouts of two turns, with a reward for each answer "a". The first `errors` rollouts of
    tasks in `broken` raise. By default all rollouts of these tasks raise. All trajectories of tasks
    in `equal` have the same reward."""

    def __init__(
        self,
        stack: FakeStack,
        broken: Container[int] = (),
        errors: int = 10**9,
        equal: Container[int] = (),
    ) -> None:
        self.stack, self.broken, self.errors, self.equal = stack, broken, errors, equal
        self.tasks = environment.Tasks(range(50), 0)

    async def rollout(self, task: int, sampler: Any) -> Trajectory:  # type: ignore[override]
        if task in self.broken and self.errors > 0:
            self.errors -= 1
            raise ValueError(f"task {task} is broken")
        messages = [{"role": "user", "content": str(task)}]
        messages.append(await sampler.chat(messages))
        await self.stack.pause(4 if task % 7 == 0 else 1)  # some are slow
        messages.append({"role": "user", "content": "again"})
        messages.append(await sampler.chat(messages))
        return sampler.finish(
            1 if task in self.equal else sum(m["content"] == "a" for m in messages)
        )


def config(evaluation: dict[str, Any] | None = None, **rl: Any) -> Config:
    settings = {
        "steps": 6,
        "groups_per_step": 3,
        "group_size": 3,
        "environment": [{"use": "fake:fake"}],
    } | rl
    return Config.model_validate({"run": {"name": RUN}, "rl": settings, "eval": evaluation})


def make_loop(
    settings: Config,
    stack: FakeStack,
    environment: Any,
    directory: Path,
    patience: float = 60.0,
    **options: Any,
) -> Loop:
    vllm = MockVllm(stack.answer)
    record = RunRecord(directory / "metrics.jsonl", lambda line: None)
    return Loop(
        settings,
        stack,
        vllm,
        [environment],
        directory / "state.json",
        record,  # type: ignore[arg-type]
        patience=patience,
        pauses=(0.001, 0.05),
        **options,
    )


async def run_until_done(settings: Config, stack: FakeStack, directory: Path) -> int:
    """Start the loop again each time that it is killed. Returns the number of kills."""
    for kills in range(100):
        try:
            await make_loop(settings, stack, Environment(stack), directory).run()
        except Killed:
            continue
        return kills
    pytest.fail("it never ends")


def check(stack: FakeStack, steps: int, bound: int) -> None:
    """Checks that each step was made once, from groups of its own, and that no group is older than
    the bound."""
    assert [job.base for job in stack.trained] == list(range(steps))
    tasks = [task for job in stack.trained for task in job.request["labels"]["tasks"].split()]
    assert len(tasks) == len(set(tasks)) == sum(len(job.request["groups"]) for job in stack.trained)
    behind = [
        job.base - turn["policy_step"]
        for job in stack.trained
        for group in job.request["groups"]
        for trajectory in group["trajectories"]
        for turn in trajectory["turns"]
    ]
    assert min(behind) >= 0
    assert max(behind) <= bound
