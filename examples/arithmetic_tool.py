"""The task of `arithmetic_tool.toml`: sums, with a calculator that the model may call.

The call is plain text (`calc 3+4`), so it works with every chat template; with a model whose
template has tools, pass `tools=[...]` to `sampler.chat` and read `answer["tool_calls"]`. A model
that has never seen the task first learns both ways, by the tool and by a guess:

    python examples/arithmetic_tool.py > sums.jsonl
    tandem train sft arithmetic sums.jsonl --learning-rate 5e-3 --epochs 40 --lora-rank 16
    tandem rl examples/arithmetic_tool.toml
"""

import json
from typing import Any

Task = dict[str, int]


class Sums:
    """Sums of two numbers up to `largest`."""

    def __init__(self, largest: int = 4) -> None:
        self.largest = largest

    def tasks(self) -> list[Task]:
        numbers = range(1, self.largest + 1)
        return [{"a": a, "b": b} for a in numbers for b in numbers]

    async def rollout(self, task: Task, sampler: Any) -> Any:
        """A question, perhaps a call of the calculator, and the answer: 1 if it is right."""
        messages = [{"role": "user", "content": f"{task['a']}+{task['b']}"}]
        messages.append(await sampler.chat(messages))
        called = messages[-1]["content"].startswith("calc ")
        if called:
            messages.append({"role": "tool", "content": calculate(messages[-1]["content"])})
            messages.append(await sampler.chat(messages))
        right = messages[-1]["content"].strip() == str(task["a"] + task["b"])
        return sampler.finish(right, metrics={"called": called})

    def sft_examples(self) -> list[dict[str, Any]]:
        """Each sum by the calculator, and by a guess that is seldom right."""
        examples = []
        for i, task in enumerate(self.tasks()):
            terms = f"{task['a']}+{task['b']}"
            call, guess = (
                {"role": "assistant", "content": f"calc {terms}"},
                str(i % (2 * self.largest) + 1),
            )
            result = calculate(call["content"])
            question = {"role": "user", "content": terms}
            tool = [
                call,
                {"role": "tool", "content": result},
                {"role": "assistant", "content": result},
            ]
            examples += [
                {"messages": [question, *tool]},
                {"messages": [question, {"role": "assistant", "content": guess}]},
            ]
        return examples


def calculate(call: str) -> str:
    """The calculator's answer to `calc <number>+<number>`."""
    numbers = call.removeprefix("calc ").split("+")
    return str(sum(map(int, numbers))) if all(number.isdecimal() for number in numbers) else "error"


if __name__ == "__main__":
    for example in Sums().sft_examples():
        print(json.dumps(example))
