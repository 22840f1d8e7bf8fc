"""The example for verifiers 0.4. The program also makes an environment from the name of the
example's taskset, as a config of `tandem rl` does."""

import asyncio
import sys
from types import SimpleNamespace

import pytest
import verifiers_yes_no_maybe

from tandem.client import Trajectory
from tandem.client.verifiers import VerifiersEnvironment
from tandem.errors import InvalidInput

run, tokenizer, step = sys.argv[1:]


async def main() -> None:
    environment = VerifiersEnvironment(
        "verifiers_yes_no_maybe", tokenizer=tokenizer, sampling={"max_tokens": 8}
    )
    task, *others = environment.tasks()
    assert len(others) == 3
    sampled = await environment.rollout(task, SimpleNamespace(model=f"{run}@{step}", options={}))
    (turn,) = Trajectory.model_validate(sampled).turns
    assert turn.policy_step == int(step)
    with pytest.raises(InvalidInput) as refused:
        VerifiersEnvironment("verifiers_yes_no_maybe", tokenizer=tokenizer, sampling={"top_p": 0.5})
    assert refused.value.field == "sampling.top_p"
    await verifiers_yes_no_maybe.main(run, tokenizer, epochs=0, steps=1, group_size=3)


asyncio.run(main())
