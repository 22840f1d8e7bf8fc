"""The old API of verifiers samples through the rollout door. A job can train on the outputs of the
old API."""

import asyncio
import os
import sys
from typing import Any

import pytest
import verifiers as vf
from datasets import Dataset

from tandem.client import Tandem
from tandem.client.verifiers import outputs_to_groups
from tandem.errors import InvalidInput

run, step = sys.argv[1], int(sys.argv[2])
QUESTIONS = ["Is water wet?", "Is the sky blue?"]


def length(completion: Any, **_: Any) -> float:
    return float(len(str(completion)))


async def generate(path: str, **columns: Any) -> Any:
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": ""} for question in QUESTIONS
    ]
    environment = vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[length])
    )
    client = vf.ClientConfig(
        api_base_url=f"{os.environ['TANDEM_INFERENCE_URL']}{path}", api_key_var="TANDEM_API_KEY"
    )
    inputs = environment.get_dataset().repeat(4).to_list()
    sampling = {"max_tokens": 6, "temperature": 1.5}
    return await environment.generate(inputs, client, f"{run}@{step}", sampling, **columns)


groups = outputs_to_groups(asyncio.run(generate("/rollout/v1", state_columns=["trajectory"])), step)
assert len(groups) == 2
for path, columns in (("/v1", {"state_columns": ["trajectory"]}), ("/rollout/v1", {})):
    with pytest.raises(InvalidInput) as refused:
        outputs_to_groups(asyncio.run(generate(path, **columns)), step)
    assert str(refused.value.field).endswith(".trajectory.0.tokens")
settings = {"packing": {"sequence_length": 128}, "loss": {"temperature": 1.5}}
Tandem().train_rl(run, groups, max_off_policy_steps=0, wait="job", **settings)
print("verifiers", vf.__version__)
