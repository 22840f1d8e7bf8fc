"""An environment of `tandem rl` with reasoning-gym's tasks and their own scorers.

[[rl.environment]]
use = "reasoning_gym:chain_sum"
arguments = { size = 1000, max_terms = 3 }
"""

import re
from collections.abc import Mapping
from typing import Any

from tandem.errors import InvalidInput

ANSWER = r"<answer>(.*?)</answer>"
INSTRUCTION = "Give your final answer between <answer> and </answer>."


class GymEnvironment:
    """A dataset of reasoning-gym.

    The regular expression `answer` selects a part of the model's message, and the dataset gives
    this part a score from 0 to 1. The score is the reward. If the expression finds nothing, the
    whole message is scored. Most datasets give a low score to a text that contains more than the
    right answer.

    Args:
        name: the dataset's name, such as `chain_sum`.
        size: the number of tasks.
        seed: decides the choice of the tasks.
        instruction: the system message; "": none.
        answer: a regular expression with one group; its last match counts. For example,
            `(-?\\d+)` takes the last number.
        parameters: the dataset's own parameters, such as `max_terms`.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int = 1000,
        seed: int = 0,
        instruction: str = INSTRUCTION,
        answer: str = ANSWER,
        **parameters: Any,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ImportError(
                "the package reasoning-gym is missing: pip install 'tandem-rl[reasoning-gym]'"
            ) from error
        known = reasoning_gym.factory.DATASETS
        if name not in known:
            problem = f"reasoning-gym has no dataset {name!r}"
            raise InvalidInput(f"{problem}; it has {', '.join(sorted(known))}", field="use")
        self._answer = re.compile(answer, re.DOTALL)
        if self._answer.groups != 1:
            raise InvalidInput(f"answer = {answer!r} has {self._answer.groups} groups, not one")
        self._system = [{"role": "system", "content": instruction}] if instruction else []
        self._dataset = reasoning_gym.create_dataset(name, size=size, seed=seed, **parameters)

    def tasks(self) -> list[int]:
        """The numbers of the dataset's entries; the dataset makes each entry on demand."""
        return list(range(len(self._dataset)))

    async def rollout(self, task: int, sampler: Any) -> Any:
        """Samples one answer to the task, and scores the answer."""
        entry: Mapping[str, Any] = self._dataset[task]
        question = {"role": "user", "content": entry["question"]}
        message = await sampler.chat([*self._system, question])
        said = message["content"] or ""
        found = self._answer.findall(said)
        score = self._dataset.score_answer((found[-1] if found else said).strip(), entry)
        return sampler.finish(score, metrics={"found": bool(found), "solved": score == 1})
