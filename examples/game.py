"""The game of `game.toml`, in several turns: find the code of a lock, word by word.

After each word the environment says right or wrong; the code has to be complete after a number of turns. A model that
has never seen the game first learns its form, with all words alike:

    python examples/game.py > games.jsonl
    tandem train sft game games.jsonl --learning-rate 5e-3 --epochs 20 --lora-rank 16
    tandem rl examples/game.toml
"""

import json
from itertools import product
from typing import Any

WORDS = ("yes", "no", "maybe")
Message = dict[str, Any]


class Lock:
    """The reward is the share of the code that was found."""

    def __init__(self, code: tuple[str, ...] = ("maybe", "no"), turns: int = 3) -> None:
        self.code, self.turns = code, turns

    def tasks(self) -> list[str]:
        """The first messages."""
        return ["red", "green", "blue"]

    async def rollout(self, door: str, sampler: Any) -> Any:
        """One game: its turns are one trajectory."""
        messages: list[Message] = [{"role": "user", "content": door}]
        found = 0
        for _ in range(self.turns):
            messages.append(await sampler.chat(messages))
            right = messages[-1]["content"].strip() == self.code[found]
            found += right
            if found == len(self.code):
                break
            messages.append({"role": "user", "content": "right" if right else "wrong"})
        return sampler.finish(found / len(self.code), metrics={"opened": found == len(self.code)})

    def sft_examples(self) -> list[dict[str, list[Message]]]:
        """Every game that can be played, the foolish ones too."""
        examples = []
        for door, *words in product(self.tasks(), *[WORDS] * self.turns):
            messages: list[Message] = [{"role": "user", "content": door}]
            found = 0
            for word in words:
                messages.append({"role": "assistant", "content": word})
                right = word == self.code[found]
                found += right
                if found == len(self.code):
                    break
                messages.append({"role": "user", "content": "right" if right else "wrong"})
            # Nothing is trained after the last word.
            examples.append({"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]})
        return examples


if __name__ == "__main__":
    for example in Lock().sft_examples():
        print(json.dumps(example))
