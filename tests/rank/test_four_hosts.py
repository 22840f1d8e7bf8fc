"""Four real ranks make the same bytes on one, two and four hosts."""

from pathlib import Path

import pytest

from agent.agent_stack import AgentStack
from rank import jobs
from tandem.topology.sizes import Sizes
from tandem.trainer.launch import DEFAULT_ENTRY

SIZES = {"tp-dp": Sizes(tensor=2, data=2), "cp-pp": Sizes(context=2, pipeline=2)}


@pytest.mark.slow
def test_one_two_and_four_hosts_make_the_same_bytes(
    tmp_path: Path, model: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.option.all_cases:
        pytest.skip("runs with --all-cases")
    stack = AgentStack(tmp_path / "spool", hosts=4, ranks=4, entry=DEFAULT_ENTRY)
    made: dict[tuple[str, int], Path] = {}
    try:
        for hosts in (1, 2, 4):
            stack.environment["TANDEM_TRAINER_HOSTS"] = str(hosts)
            stack.hosts = hosts
            stack.start_agents()
            agents = list(stack.agents.values())
            for name, sizes in SIZES.items():
                run = f"{name}-{hosts}"
                jobs.make_run(stack.spool, model, run)
                stack.environment |= sizes.variables()
                stack.start()
                jobs.submit_sft(stack.spool, run, run, epochs=2, grad_accumulation_sequences=4)
                state, job = stack.wait(run)
                assert (state, job.attempt) == ("succeeded", 1), stack.job_log(run)
                assert stack.stop() == 0
                made[name, hosts] = stack.spool.checkpoints.path(run, 1)
            for agent in agents:
                agent.terminate()
            assert [agent.wait(60) for agent in agents] == [0] * hosts
    finally:
        stack.close()
    for name in SIZES:
        for hosts in (2, 4):
            assert jobs.same_bytes(made[name, 1], made[name, hosts]), (name, hosts)
