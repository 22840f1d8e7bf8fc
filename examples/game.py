"""The game of `game.toml` is rock, paper, scissors in several turns, against an opponent who
announces each move before the model answers. In the next round the opponent plays the move that
would have beaten the model's last move. A model that has never seen the game first learns the form
of the answers by SFT. In the SFT data all moves are equally frequent:

    python examples/game.py > games.jsonl
    tandem train sft game games.jsonl --learning-rate 5e-3 --epochs 40 --lora-rank 16
    tandem rl examples/game.toml
"""

import json
from itertools import product
from typing import Any

BEATEN_BY = {"rock": "paper", "paper": "scissors", "scissors": "rock"}
Message = dict[str, Any]


class Game:
    """The reward is the number of won rounds divided by `rounds`. An answer that is not a move ends
    the game."""

    def __init__(self, rounds: int = 2) -> None:
        self.rounds = rounds

    def tasks(self) -> list[str]:
        """The opponent's first moves."""
        return list(BEATEN_BY)

    async def rollout(self, move: str, sampler: Any) -> Any:
        """Plays one game, whose turns are one trajectory."""
        messages: list[Message] = []
        won = played = 0
        while move and played < self.rounds:
            messages.append({"role": "user", "content": move})
            messages.append(await sampler.chat(messages))
            answer = messages[-1]["content"].strip()
            won += answer == BEATEN_BY[move]
            played += 1
            move = BEATEN_BY.get(answer, "")
        return sampler.finish(won / self.rounds, metrics={"rounds": played})

    def sft_examples(self) -> list[dict[str, list[Message]]]:
        """A dialogue for every possible game, including games with bad moves."""
        examples = []
        for move, *answers in product(BEATEN_BY, repeat=1 + self.rounds):
            messages: list[Message] = []
            for answer in answers:
                messages += [
                    {"role": "user", "content": move},
                    {"role": "assistant", "content": answer},
                ]
                move = BEATEN_BY[answer]
            examples.append({"messages": messages})
        return examples


if __name__ == "__main__":
    for example in Game().sft_examples():
        print(json.dumps(example))
