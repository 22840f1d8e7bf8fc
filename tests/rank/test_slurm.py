"""Real ranks on two nodes of a real Slurm."""

from pathlib import Path

import pytest

from executor.slurm_cluster import slurm_cluster
from executor.slurm_stack import SlurmStack
from rank import jobs
from tandem.trainer.launch import DEFAULT_ENTRY

pytestmark = pytest.mark.sample(1, of="processes of jobs")


@pytest.mark.sample(1, of="places that train the same bytes")
@pytest.mark.slow
def test_two_nodes_train_what_one_host_trains_while_runners_are_killed(
    tmp_path: Path, model: Path
) -> None:
    sizes = jobs.TOPOLOGIES["dp"].variables()
    with slurm_cluster() as cluster:
        stack = SlurmStack(cluster, tmp_path / "spool", entry=DEFAULT_ENTRY, **sizes)
        try:
            for run in ("one", "two"):
                jobs.make_run(stack.spool, model, run)
            jobs.submit_sft(stack.spool, "one", "one", epochs=2)
            alone, _ = jobs.run_two_ranks(stack.spool, {"one": "dp"})["one"]
            jobs.submit_sft(stack.spool, "two", "two", epochs=2)
            stack.start()
            stack.until(lambda: cluster.jobs("tandem-"), "the Slurm job")
            stack.kill()
            stack.start()
            stack.until_beating("two", ranks=2)
            stack.kill()
            stack.start()
            state, job = stack.wait("two")
            assert (state, job.attempt) == ("succeeded", 1), stack.job_log("two")
            assert stack.stop() == 0
            assert jobs.same_bytes(alone, stack.spool.checkpoints.path("two", 1))
            kinds = stack.kinds("two")
            assert [kinds.count(kind) for kind in ("claimed", "succeeded", "released")] == [1, 1, 1]
            assert stack.event("two", "released")["hosts"].keys() == {"0", "1"}
            states = [state for _, state in cluster.jobs("tandem-")]
            assert states in (["COMPLETED"], ["COMPLETING"], ["RUNNING"])
        finally:
            stack.close()
