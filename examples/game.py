"""The game of `game.toml`, in several turns: find the code of a lock, word by word.

The environment asks for the first word until it is right, then for the second; the turns are limited. A model that has
never seen the game first learns its form, with all words alike:

    python examples/game.py > games.jsonl
    tandem train sft game games.jsonl --learning-rate 5e-3 --epochs 40 --lora-rank 16
    tandem rl examples/game.toml
"""

import json
from itertools import product
from typing import Any

WORDS = ("yes", "no", "maybe")
PLACES = ("first", "second", "third")
Message = dict[str, Any]


class Lock:
    """The reward is the share of the code that was found."""

    def __init__(self, code: tuple[str, ...] = ("maybe", "no"), turns: int = 3) -> None:
        self.code, self.turns = code, turns

    def tasks(self) -> list[int]:
        """Every game is the same."""
        return list(range(100))

    async def rollout(self, task: int, sampler: Any) -> Any:  # noqa: ARG002
        """One game: its turns are one trajectory."""
        messages: list[Message] = []
        found = 0
        while found < len(self.code) and len(messages) < 2 * self.turns:
            messages.append({"role": "user", "content": PLACES[found]})
            messages.append(await sampler.chat(messages))
            found += messages[-1]["content"].strip() == self.code[found]
        return sampler.finish(found / len(self.code), metrics={"opened": found == len(self.code)})

    def sft_examples(self) -> list[dict[str, list[Message]]]:
        """Every game that can be played, the foolish ones too."""
        examples = []
        for words in product(WORDS, repeat=self.turns):
            messages: list[Message] = []
            found = 0
            for word in words:
                messages.append({"role": "user", "content": PLACES[found]})
                messages.append({"role": "assistant", "content": word})
                found += word == self.code[found]
                if found == len(self.code):
                    break
            examples.append({"messages": messages})
        return examples


if __name__ == "__main__":
    for example in Lock().sft_examples():
        print(json.dumps(example))
