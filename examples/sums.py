"""The task of `sums.toml`: sums of two numbers. An answer whose last number is right gets the
reward 1.

A real model needs no SFT before RL on this task:

    python examples/smollm2.py models/smollm2
    TANDEM_BASE_MODEL=$PWD/models/smollm2 tandem up      # in another terminal
    tandem rl examples/sums.toml
"""

import random
import re
from typing import Any

Task = tuple[int, int]


class Sums:
    """Sums of two numbers from `smallest` to `largest`, in random order. The first `skip` sums are
    left out, and at most `count` further sums are taken."""

    def __init__(
        self, smallest: int = 1, largest: int = 99, skip: int = 0, count: int | None = None
    ) -> None:
        numbers = range(smallest, largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers]
        random.Random(0).shuffle(pairs)
        self._pairs = pairs[skip:][:count]

    def tasks(self) -> list[Task]:
        return self._pairs

    async def rollout(self, task: Task, sampler: Any) -> Any:
        """Samples an answer to the question for a sum, and returns it with its reward."""
        a, b = task
        answer = await sampler.chat(question(a, b))
        right, alone = judge(answer["content"] or "", a + b)
        return sampler.finish(float(right), metrics={"alone": alone})


def question(a: int, b: int) -> list[dict[str, str]]:
    """The conversation that asks for a sum."""
    asked = f"What is {a} + {b}? Answer with the number only."
    return [{"role": "user", "content": asked}]


def judge(said: str, wanted: int) -> tuple[bool, bool]:
    """Whether the last number of an answer is right, and whether the answer is only a number."""
    numbers = re.findall(r"\d+", said)
    return numbers[-1:] == [str(wanted)], said.strip().isdecimal()
