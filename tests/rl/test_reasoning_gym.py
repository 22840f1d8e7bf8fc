"""Tasks of reasoning-gym in the loop of `tandem rl`, scored by the package itself."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.client.rl.config import EnvironmentSection
from tandem.client.rl.environment import Environment
from tandem.errors import InvalidInput

# Three dependencies of reasoning-gym are built from source, so the locked environment does not have
# the package.
pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: uv sync --extra reasoning-gym")


def environment(use: str, **arguments: Any) -> Environment:
    section = EnvironmentSection(use=use, arguments=arguments)
    return Environment(section, seed=0, where="rl.environment.0")


class Answering:
    """Answers with `said`; records its prompts and the rollout's reward."""

    def __init__(self, said: str | None) -> None:
        self._said = said

    async def chat(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        self.asked = messages
        return {"role": "assistant", "content": self._said}

    def finish(self, reward: float, *, metrics: dict[str, float]) -> SimpleNamespace:
        return SimpleNamespace(reward=reward, metrics=metrics)


def test_its_own_scorer_gives_the_reward_of_the_answer_that_is_found() -> None:
    import reasoning_gym

    of = environment("reasoning_gym:chain_sum", size=20, seed=3, max_terms=2)
    entries = reasoning_gym.create_dataset("chain_sum", size=20, seed=3, max_terms=2)
    assert sorted(of.tasks.first(20)) == list(range(20))
    (task,) = of.tasks.first(1)
    right = entries[task]["answer"]
    for said, reward, found in (
        (right, 1.0, False),
        (f"1, so <answer>7</answer>, no: <answer> {right} </answer>", 1.0, True),
        (f"{right} <answer>no</answer>", entries.score_answer("no", entries[task]), True),
        (None, entries.score_answer("", entries[task]), False),
    ):
        sampler = Answering(said)
        made = asyncio.run(of.rollout(task, sampler))
        assert (made.reward, made.metrics["found"]) == (reward, found)
        assert made.metrics["solved"] == (reward == 1)
        assert [message["role"] for message in sampler.asked] == ["system", "user"]
        assert sampler.asked[1]["content"] == entries[task]["question"]


def test_the_last_match_of_an_expression_is_scored() -> None:
    import reasoning_gym

    of = environment("reasoning_gym:chain_sum", size=1, answer=r"(-?\d+)")
    right = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]["answer"]
    rewards = [
        asyncio.run(of.rollout(0, Answering(said))).reward
        for said in (f"0 - 7 = {right}.", f"{right}, or 7")
    ]
    assert rewards[0] == 1 > rewards[1]


def test_what_is_not_a_dataset_or_not_its_parameter_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"no dataset 'chain_sums'; it has .*chain_sum, "):
        environment("reasoning_gym:chain_sums")
    for wrong in ({"terms": 3}, {"min_terms": 0}, {"answer": "("}):
        with pytest.raises(InvalidInput, match="can't load 'reasoning_gym:chain_sum'") as refused:
            environment("reasoning_gym:chain_sum", **wrong)
        assert refused.value.field == "rl.environment.0.use"
    with pytest.raises(InvalidInput, match=r"answer = '\\\\d\+' has 0 groups, not one"):
        environment("reasoning_gym:chain_sum", answer=r"\d+")
