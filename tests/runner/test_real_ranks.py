"""Real ranks under the real runner: all launchers make the same checkpoints, bit for bit."""

from contextlib import ExitStack

import pytest

from listening import LOOPBACK, watched
from rank.jobs import make_model, make_run, random_examples, submit_rl, submit_sft
from runner.runner_stack import Stack
from tandem.client.memory import by_attempt
from tandem.metrics.metric import PHASES
from tandem.spool.schema import RLLoss

pytestmark = [
    pytest.mark.sample(1, of="processes of jobs"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

RANKS = 2


def checkpoints(tmp_path, launch: str) -> list[dict[str, str]]:
    """Runs an SFT job and then an RL job of the same run. Returns for each of the two checkpoints
    the sha256 of every file."""
    watching = ExitStack()
    stack = Stack(tmp_path / launch, launch, RANKS, entry="tandem.trainer.rank.entry")
    # All launchers use the same path of the base model, because the adapter's configuration
    # contains this path.
    model = tmp_path / "model"
    if not model.exists():
        make_model(model)
    make_run(stack.spool, model)
    loss = RLLoss(kl_coef=0.1, old_logprobs="trainer")
    jobs = [
        submit_sft(stack.spool, held_out=random_examples(9, 4)),
        submit_rl(stack.spool, loss=loss, epochs=2),
    ]
    try:
        stack.start()
        listeners = watching.enter_context(watched(stack.runner.pid))
        for job_id in jobs:
            state, job = stack.wait(job_id, 400)
            absent = {"rehearsal"} | ({"offload"} if launch != "resident" else set())
            absent |= {"old_logprobs", "reference"} if job_id == "sft" else {"evaluate"}
            assert (state, job.attempt) == ("succeeded", 1), (job.result, stack.job_log(job_id))
            kinds = stack.kinds(job_id)
            assert {"claimed", "started", "loaded", "step", "checkpoint"} <= set(kinds)
            assert kinds[-2:] == ["released", "succeeded"]
            (attempt,) = by_attempt(stack.spool.events.read(job_id))
            assert (attempt.device, attempt.released, attempt.left) == ("cpu", True, {})
            assert list(attempt.ranks) == list(range(RANKS))
            for rank in attempt.ranks.values():
                assert list(rank.phases) == [phase for phase in PHASES if phase not in absent]
                assert (
                    min(rank.phases["checkpoint"].values())
                    == 0
                    == rank.phases["checkpoint"]["host_pinned"]
                )
                assert rank.phases["checkpoint"]["allocated"] > 100 * 2**20
        assert listeners
        assert set(listeners) <= LOOPBACK, f"whoever reaches that port reaches ranks: {listeners}"
        # Only the processes that the launcher keeps between jobs are left. `torchrun` keeps no
        # process, `fork` keeps the fork server, and `resident` keeps torchrun and its ranks.
        assert len(stack.children()) == {"torchrun": 0, "fork": 1, "resident": 1 + RANKS}[launch]
        watching.close()
        assert stack.stop() == 0
        assert stack.marked() == []
    finally:
        watching.close()
        stack.close()
    manifests = [stack.spool.checkpoints.verify("r", step) for step in (1, 2)]
    return [
        {name: entry.sha256 for name, entry in manifest.files.items()} for manifest in manifests
    ]


@pytest.mark.sample(1, of="places that train the same bytes")
def test_all_launchers_make_the_same_checkpoints(tmp_path):
    forked = checkpoints(tmp_path, "fork")
    assert "adapter_model.safetensors" in forked[0]
    assert any(name.startswith("optimizer/") for name in forked[0])
    assert forked[0] != forked[1]
    assert checkpoints(tmp_path, "torchrun") == forked
    assert checkpoints(tmp_path, "resident") == forked
