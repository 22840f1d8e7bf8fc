"""An OpenAI client (openai 2.x and 3.x) through the rollout door. Each choice is a turn, and a job
trains on the turns."""

import json
import os
import sys
from typing import Any

import openai
import pytest

from tandem.client import Tandem, turn_from_openai
from tandem.errors import InvalidInput

run, step = sys.argv[1:]
vllm = os.environ["TANDEM_INFERENCE_URL"]
client = openai.OpenAI(base_url=f"{vllm}/rollout/v1")
ask: dict[str, Any] = {
    "model": f"{run}@{step}",
    "messages": [{"role": "user", "content": "Is water wet?"}],
    "max_tokens": 6,
}
create = client.chat.completions.create

plain = create(**ask, temperature=0).choices[0]
many = create(**ask, n=8, temperature=1.5, seed=int(step)).choices
tools = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
]
with_tools = create(**ask, tools=tools, tool_choice="none").choices[0]
text = client.completions.create(model=ask["model"], prompt="Is", max_tokens=4, n=2).choices
streamed = []
for options in ({"temperature": 0}, {"n": 2, "temperature": 1.5}):
    with client.chat.completions.stream(**ask, **options) as stream:
        streamed += stream.until_done().current_completion_snapshot.choices
for choice in [plain, *many, with_tools, *text, *streamed]:
    turn = turn_from_openai(choice)
    assert turn.policy_step == int(step), turn
    assert len(turn.token_ids) == len(turn.logprobs) > 0
# A stream has the same tokens, and a choice is unchanged after a conversion to JSON and back.
expected = turn_from_openai(plain)
assert turn_from_openai(streamed[0]).token_ids == expected.token_ids
assert all(
    turn_from_openai(choice).prompt_token_ids == expected.prompt_token_ids for choice in streamed
)
assert turn_from_openai(json.loads(plain.model_dump_json(warnings=False))) == expected

# Without the rollout door a choice has no data for training.
around = openai.OpenAI(base_url=f"{vllm}/v1").chat.completions.create(**ask).choices[0]
with pytest.raises(InvalidInput, match="rollout"):
    turn_from_openai(around)
for wrong in (
    {"top_p": 0.5},
    {"presence_penalty": 1.0},
    {"response_format": {"type": "json_object"}},
):
    with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
        create(**ask, **wrong)
with pytest.raises(openai.AuthenticationError):
    openai.OpenAI(base_url=f"{vllm}/rollout/v1", api_key="wrong").models.list()
assert ask["model"] in [model.id for model in client.models.list()]

trajectories = [
    {"turns": [turn_from_openai(choice)], "reward": float(i % 2)} for i, choice in enumerate(many)
]
packing = {"sequence_length": 128}
Tandem().train_rl(
    run,
    [{"trajectories": trajectories}],
    max_off_policy_steps=0,
    packing=packing,
    loss={"temperature": 1.5},
    wait="job",
)
print("openai", openai.__version__)
