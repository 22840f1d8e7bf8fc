"""The example yes/no/maybe learns the same bits with every executor, although the runner is killed.

Each executor has the whole loop of the example to itself: the controller, a runner, the real vLLM
and its publisher. Sampling is seeded, so the same weights answer with the same tokens and
log-probs, and the next job has the same data. If the results of two executors differ, a test names
the first difference. The difference is in the data of a step, or in the weights that a job made
from the same data.
"""

import asyncio
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_model
import yes_no_maybe

from executor.ways import EXECUTORS, two_ranks
from local_stack import LocalStack
from tandem.spool.attempt import Attempt
from tandem.spool.schema import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RUN = "learns"
COARSE, SECOND_RL = 0, 3
"""The runner is killed in the jobs that start from these two steps. The first job has many
optimizer steps, and the second has one."""


@dataclass(frozen=True)
class Learned:
    """The loop's results with one executor."""

    report: dict[str, Any]
    data: list[str]
    """The fingerprint of each job's request with all its rollouts, in the order of the jobs."""
    files: list[dict[str, str]]
    """For each step, the files of its checkpoint: name → sha256."""
    jobs: list[Job]
    claims: list[int]
    """The number of times that a runner claimed each job. A runner that adopts an attempt does not
    claim the job."""
    hosts: list[int]
    """The number of hosts that released their devices after each job; 0 if the ranks run on the
    runner's own host."""
    ranks: set[int]


class Killer(threading.Thread):
    """Kills the runner with SIGKILL once for each of `steps`, while ranks train the job that starts
    from this step."""

    def __init__(self, stack: LocalStack, steps: set[int]) -> None:
        super().__init__(daemon=True)
        self._stack, self._done = stack, threading.Event()
        self.left = steps

    def run(self) -> None:
        spool = self._stack.spool
        while self.left and not self._done.wait(0.02):
            for key in spool.jobs.index.running(RUN):
                _, job = spool.jobs.get(key.id)
                if job.spec.base_step in self.left and self._trains(job):
                    self._stack.kill("runner")
                    self.left.discard(job.spec.base_step)

    def _trains(self, job: Job) -> bool:
        beats = Attempt(self._stack.spool, job.spec.id, job.attempt).beats()
        return len(beats) == 2 and all(
            beat.step > 2 or job.spec.base_step != COARSE for beat in beats.values()
        )

    def close(self) -> None:
        self._done.set()
        self.join(60)


def learn(executor: str, root: Path) -> Learned:
    tiny_model.write_tiny_qwen3(root / "models" / "tiny")
    with two_ranks(executor, root) as variables:
        more = {"TANDEM_ENFORCE_EAGER": "1", "TANDEM_MAX_MODEL_LEN": "512"}
        with LocalStack(root, **variables, **more) as stack:
            killer = Killer(stack, {COARSE, SECOND_RL})
            killer.start()
            urls = {
                "TANDEM_URL": stack.controller_url,
                "TANDEM_INFERENCE_URL": stack.inference_url,
                "TANDEM_API_KEY": stack.api_key,
            }
            try:
                with mock.patch.dict(os.environ, urls):
                    report = asyncio.run(yes_no_maybe.train(RUN))
            finally:
                killer.close()
            assert not killer.left, "a job ended before its runner could be killed"
            return _told(stack, report)


def _told(stack: LocalStack, report: dict[str, Any]) -> Learned:
    spool = stack.spool
    steps = spool.checkpoints.steps(RUN)
    manifests = [spool.checkpoints.verify(RUN, step) for step in steps]
    ids = [str(manifest.job) for manifest in manifests[1:]]
    jobs = [spool.jobs.get(job_id)[1] for job_id in ids]
    events = [spool.events.read(job_id) for job_id in ids]
    ends = [event.data for each in events for event in each if event.type == "released"]
    begins = [event.data for each in events for event in each if event.type == "started"]
    return Learned(
        report,
        [job.spec.fingerprint for job in jobs],
        [{name: file.sha256 for name, file in one.files.items()} for one in manifests],
        jobs,
        [[event.type for event in each].count("claimed") for each in events],
        [len(data.get("hosts", ())) for data in ends],
        {data["topology"]["world_size"] for data in begins},
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Learned:
    if not request.config.option.all_cases:
        pytest.skip("runs with --all-cases; tests/rank and tests/executor compare SFT jobs")
    return learn("local", tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_same_bits_are_learned(local: Learned, executor: str, tmp_path: Path) -> None:
    found = local if executor == "local" else learn(executor, tmp_path)
    report = found.report
    assert abs(report["sft_reward"] - 0.75) <= 0.05
    assert report["rl_reward"] >= 0.95
    assert report["steps"][-1]["reward"] > report["steps"][0]["reward"] + 0.1
    assert found.ranks == {2}
    assert set(found.hosts) == ({0} if executor == "local" else {2})
    killed = [job.spec.base_step in (COARSE, SECOND_RL) for job in found.jobs]
    if executor == "local":
        # The ranks end with their runner, and the next runner begins again with the job.
        assert found.claims[COARSE] == 2
        assert all(again or claims == 1 for again, claims in zip(killed, found.claims, strict=True))
    else:
        assert set(found.claims) == {1}, "the next runner goes on with the attempt"
    for step in range(len(local.files)):
        if step:
            assert found.data[step - 1] == local.data[step - 1], f"other rollouts for step {step}"
        assert found.files[step] == local.files[step], f"other weights in step {step}"
    assert len(found.files) == len(local.files)
    assert {"adapter_model.safetensors", "optimizer/adam.safetensors"} <= local.files[-1].keys()
