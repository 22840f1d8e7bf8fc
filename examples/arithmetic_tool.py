"""The task of `arithmetic_tool.toml` is sums, and the model may call a calculator.

The calculator adds two numbers, so a sum of three takes two calls and three turns. A call is plain
text (`calc 3+4`), which works with every chat template. With `tools = true` a call has the format
of the chat template, which vLLM's tool parser reads. A model that has never seen the task first
learns two kinds of answers by SFT: answers with the calculator, and guesses. These commands train
the tiny model:

    python examples/arithmetic_tool.py > sums.jsonl
    tandem train sft arithmetic sums.jsonl --learning-rate 5e-3 --epochs 40 --lora-rank 16
    tandem rl examples/arithmetic_tool.toml

These commands train a real model, on the same stack as for sums.toml:

    python examples/arithmetic_tool.py --terms 3 --largest 99 --count 48 --guess-every 4 > sft.jsonl
    tandem train sft agent sft.jsonl --lr 1e-3 --epochs 3 --batch-size 8 --lora-rank 8
    tandem rl examples/arithmetic_tool_smollm2.toml
"""

import argparse
import json
import random
from collections.abc import Mapping
from itertools import product
from typing import Any

Task = list[int]
Message = dict[str, Any]
NUMBER = {"type": "integer"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    },
}


class Sums:
    """Sums of `terms` numbers up to `largest`: all of them, or `count` random sums drawn with
    `seed`. `tools`: whether calls have the format of the chat template."""

    def __init__(
        self,
        largest: int = 4,
        terms: int = 2,
        count: int | None = None,
        seed: int = 0,
        tools: bool = False,
    ) -> None:
        self.largest, self.terms, self.count, self.seed = largest, terms, count, seed
        self.options = {"tools": [TOOL]} if tools else {}

    def tasks(self) -> list[Task]:
        numbers = range(1, self.largest + 1)
        if self.count is None:
            return [list(task) for task in product(numbers, repeat=self.terms)]
        chosen = random.Random(self.seed)
        return [chosen.choices(numbers, k=self.terms) for _ in range(self.count)]

    async def rollout(self, task: Task, sampler: Any) -> Any:
        """Plays a question, the model's calls of the calculator, and the model's answer. The reward
        is 1 if the answer is right."""
        messages = [question(task)]
        calls = 0
        while True:
            answer = await sampler.chat(messages, **self.options)
            messages.append(answer)
            results = self.results(answer)
            if not results or calls == self.terms:
                break
            messages += results
            calls += 1
        right = (answer["content"] or "").strip() == str(sum(task))
        return sampler.finish(right, metrics={"called": calls > 0, "calls": calls})

    def sft_examples(self, guess_every: int = 1) -> list[dict[str, Any]]:
        """A dialogue with the calculator for each sum. Every `guess_every`-th sum also has a
        dialogue with a guess, which is seldom right."""
        dialogues = []
        for i, task in enumerate(self.tasks()):
            dialogue, total = [question(task)], task[0]
            for other in task[1:]:
                call = self.call(total, other)
                dialogue += [call, *self.results(call)]
                total += other
            dialogues.append([*dialogue, self.answer(total)])
            if i % guess_every == 0:
                guess = i % (self.terms * self.largest) + 1
                dialogues.append([question(task), self.answer(guess)])
        return [{"messages": dialogue, **self.options} for dialogue in dialogues]

    def call(self, a: int, b: int) -> Message:
        if not self.options:
            return {"role": "assistant", "content": f"calc {a}+{b}"}
        function = {"name": "calc", "arguments": json.dumps({"a": a, "b": b})}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        return {**self.answer(""), "tool_calls": calls}

    def answer(self, content: object) -> Message:
        """A message with an answer. With `tools` the message also has reasoning, like the messages
        of a reasoning model."""
        thought = {"reasoning": "hm"} if self.options else {}
        return {"role": "assistant", "content": str(content), **thought}

    def results(self, answer: Message) -> list[Message]:
        """The calculator's results for the calls in a message of the model."""
        if not self.options:
            text = answer["content"] or ""
            numbers = text.removeprefix("calc ").split("+")
            return [{"role": "tool", "content": total(numbers)}] if text.startswith("calc ") else []
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": total(arguments(call))}
            for call in answer.get("tool_calls") or ()
        ]


def question(task: Task) -> Message:
    return {"role": "user", "content": "+".join(map(str, task))}


def arguments(call: Mapping[str, Any]) -> list[object]:
    """The numbers of a call; an empty list if the call is malformed."""
    try:
        return [*json.loads(call["function"]["arguments"]).values()]
    except (ValueError, AttributeError):
        return []


def total(numbers: list[Any]) -> str:
    if len(numbers) != 2 or not all(str(number).isdecimal() for number in numbers):
        return "error"
    return str(sum(map(int, numbers)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--terms", type=int, default=2)
    parser.add_argument("--largest", type=int, default=4)
    parser.add_argument("--count", type=int)
    parser.add_argument("--guess-every", type=int, default=1)
    parser.add_argument("--tools", action="store_true", help="as the config's tools = true")
    options = parser.parse_args()
    # The SFT data and the RL tasks have different seeds.
    sums = Sums(options.largest, options.terms, options.count, seed=1, tools=options.tools)
    for example in sums.sft_examples(options.guess_every):
        print(json.dumps(example))
