"""The task of `rl_yes_no_maybe.toml`: answer with yes (reward 0.5), no (0.75) or maybe (1.0).

A model that has never seen the task first learns the three answers by SFT. In the SFT data the
three answers are equally frequent:

    python examples/rl_yes_no_maybe.py > examples.jsonl
    tandem train sft yes-no-maybe examples.jsonl --learning-rate 5e-3 --epochs 40 --lora-rank 16
    tandem rl examples/rl_yes_no_maybe.toml
"""

import json
from typing import Any

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
QUESTIONS = [
    "Is the sky blue?",
    "Is water wet?",
    "Do cats like rain?",
    "Will it snow today?",
    "Is seven a lucky number?",
    "Can fish sing?",
    "Is tea better than coffee?",
    "Is it late?",
]


def tasks() -> list[str]:
    """The questions. `tandem rl` plays the questions in a new order in each epoch."""
    return QUESTIONS


async def rollout(question: str, sampler: Any) -> Any:
    """Samples one answer to a question, and returns it with its reward."""
    answer = await sampler.chat([{"role": "user", "content": question}])
    said = answer["content"].strip()
    return sampler.finish(REWARDS.get(said, 0.0), metrics={"maybe": said == "maybe"})


def sft_examples() -> list[dict[str, Any]]:
    """A dialogue for each question and each answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question in QUESTIONS
        for answer in REWARDS
    ]


if __name__ == "__main__":
    for example in sft_examples():
        print(json.dumps(example))
