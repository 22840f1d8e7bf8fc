"""The real worker under the real runner: all ways to start ranks make the same checkpoints, bit for bit."""

import pytest

from runner.runner_stack import Stack
from tandem.client.memory import by_attempt
from tandem.metrics.metric import PHASES
from trainer_ranks.jobs import make_model, make_run, submit_rl, submit_sft

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def checkpoints(tmp_path, launch: str, ranks: int) -> list[dict[str, str]]:
    """sha256 of every file of the checkpoints that an SFT job and an RL job after it make."""
    stack = Stack(tmp_path / f"{launch}-{ranks}", launch, ranks, entry="tandem.trainer.rank.worker")
    # One path for all: the base model's is written into the adapter's configuration.
    model = tmp_path / "model"
    if not model.exists():
        make_model(model)
    make_run(stack.spool, model)
    jobs = [submit_sft(stack.spool), submit_rl(stack.spool)]
    try:
        stack.start()
        for job_id in jobs:
            state, job = stack.wait(job_id, 400)
            assert state == "succeeded", (job.result, stack.job_log(job_id))
            assert job.attempt == 1
            kinds = stack.kinds(job_id)
            for kind in ("claimed", "started", "loaded", "step", "checkpoint", "released", "succeeded"):
                assert kind in kinds
            assert kinds[-2:] == ["released", "succeeded"]
            absent = {"rehearsal", "old_logprobs", "reference"} | ({"offload"} if launch != "resident" else set())
            (attempt,) = by_attempt(stack.spool.events.read(job_id))
            assert (attempt.device, attempt.released, attempt.left) == ("cpu", True, {})
            assert list(attempt.ranks) == list(range(ranks))
            for told in attempt.ranks.values():
                assert list(told.phases) == [phase for phase in PHASES if phase not in absent]
                assert min(told.phases["checkpoint"].values()) == 0 == told.phases["checkpoint"]["host_pinned"]
                assert told.phases["checkpoint"]["allocated"] > 100 * 2**20
        # Only what the launcher keeps between jobs is left: nothing, the fork server, or torchrun and its ranks.
        assert len(stack.children()) == {"torchrun": 0, "fork": 1, "resident": 1 + ranks}[launch]
        assert stack.stop() == 0
        assert stack.marked() == []
        print(stack.log.read_text())
    finally:
        stack.close()
    found = []
    for step in (1, 2):
        files = stack.spool.checkpoints.verify("r", step).files
        found.append({name: entry.sha256 for name, entry in files.items()})
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ways_to_start_ranks_make_the_same_checkpoints(tmp_path, ranks):
    forked = checkpoints(tmp_path, "fork", ranks)
    assert "adapter_model.safetensors" in forked[0]
    assert any(name.startswith("optimizer/") for name in forked[0])
    assert forked[0] != forked[1]
    assert checkpoints(tmp_path, "torchrun", ranks) == forked
    assert checkpoints(tmp_path, "resident", ranks) == forked
