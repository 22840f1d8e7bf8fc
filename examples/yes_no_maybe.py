"""Post-train a model through Tandem's public API: SFT, then RL. Copy this file and change the task.

The task is OpenPipe/ART's: answer a question with yes (reward 0.5), no (0.75) or maybe (1.0). SFT
first teaches the model to give the three answers at random. RL can then choose among the answers,
and finds the best one.

    TANDEM_URL=http://127.0.0.1:8080 TANDEM_INFERENCE_URL=http://127.0.0.1:8000 python
    examples/yes_no_maybe.py my-run
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai

from tandem.client import AsyncTandem, turn_from_openai
from tandem.client.vllm import vllm_url
from tandem.errors import NothingToLearn

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
LEARNING_RATES = {"lora": 1e-3, "full": 1e-3}
"""Of the RL steps; SFT begins with five times as much."""
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


def reward(answer: str) -> float:
    """The reward of a whole answer. An answer that is not one of the three words gets 0."""
    return REWARDS.get(answer.strip(), 0.0)


class Task:
    """Samples answers from vLLM and scores them."""

    def __init__(self, sampler: openai.AsyncOpenAI) -> None:
        self.sampler = sampler

    async def ask(self, model: str, question: str, n: int, seed: int) -> Any:
        """`n` answers of `model` ("<run>@<step>") with their token ids and log-probs."""
        return await self.sampler.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            n=n,
            max_tokens=8,
            temperature=1.0,
            seed=seed,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )

    async def rollout(self, model: str, group_size: int, seed: int) -> list[dict[str, Any]]:
        """Samples one group of answers per question. A group has several answers to the same
        prompt, and each answer is a trajectory of one assistant turn."""
        responses = await asyncio.gather(
            *(self.ask(model, q, group_size, seed * 1000 + i) for i, q in enumerate(QUESTIONS))
        )
        return [
            {
                "trajectories": [
                    {
                        "turns": [turn_from_openai(response, choice=i).model_dump()],
                        "reward": reward(choice.message.content or ""),
                    }
                    for i, choice in enumerate(response.choices)
                ]
            }
            for response in responses
        ]

    async def evaluate(self, model: str, samples: int, seed: int) -> float:
        """The mean reward of `samples` new answers, which are distributed evenly over the
        questions."""
        counts = [
            samples // len(QUESTIONS) + (i < samples % len(QUESTIONS))
            for i in range(len(QUESTIONS))
        ]
        responses = await asyncio.gather(
            *(
                self.ask(model, q, n, seed * 1000 + i)
                for i, (q, n) in enumerate(zip(QUESTIONS, counts, strict=True))
            )
        )
        rewards = [
            reward(c.message.content or "") for response in responses for c in response.choices
        ]
        assert len(rewards) == samples
        return sum(rewards) / len(rewards)


def sft_examples() -> list[dict[str, Any]]:
    """A dialogue for each question and each answer. A model that learns these examples answers at
    random."""
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q in QUESTIONS
        for a in REWARDS
    ]


async def train(
    run: str,
    *,
    trainable: Literal["lora", "full"] = "lora",
    rl_steps: int = 15,
    group_size: int = 16,
    samples: int = 200,
    tell: Callable[[str, dict[str, Any]], None] = lambda what, row: print(what, row, flush=True),
) -> dict[str, Any]:
    """Creates `run`, and trains it by SFT and then by RL. Returns the rewards, and one row per RL
    step."""
    packing, unit = {"sequence_length": 256}, LEARNING_RATES[trainable]
    sampler = openai.AsyncOpenAI(
        base_url=f"{vllm_url()}/v1", api_key=api_key() or "none", timeout=120, max_retries=5
    )
    async with sampler, AsyncTandem() as tandem:
        task = Task(sampler)
        if trainable == "full":
            await tandem.create_run(run, trainable="full")
        else:
            await tandem.create_run(run, lora={"rank": 16, "alpha": 32})
        await tandem.wait_served(run, 0)
        step, sft_seconds = 0, time.monotonic()
        for rate, epochs in [(5.0, 30), (0.5, 30)]:  # coarse, then fine
            job = await tandem.train_sft(
                run,
                examples=sft_examples(),
                packing=packing,
                optimizer={
                    "learning_rate": rate * unit,
                    "epochs": epochs,
                    "grad_accumulation_sequences": 64,
                },
                wait="served",
            )
            step += 1
            tell("sft", {"step": step, **await job_numbers(tandem, job.spec.id)})
        sft_seconds = time.monotonic() - sft_seconds
        sft_reward = await task.evaluate(f"{run}@{step}", samples, seed=1)
        tell("evaluate", {"step": step, "reward": sft_reward})

        rows: list[dict[str, Any]] = []
        for i in range(rl_steps):
            started = time.monotonic()
            groups = await task.rollout(f"{run}@{step}", group_size, seed=100 + i)
            sampled = time.monotonic()
            rewards = [t["reward"] for g in groups for t in g["trajectories"]]
            try:
                job = await tandem.train_rl(
                    run,
                    groups=groups,
                    base_step=step,
                    packing=packing,
                    optimizer={"learning_rate": unit, "grad_accumulation_sequences": 64},
                    wait="served",
                )
            except NothingToLearn:  # in each group all answers have the same reward
                break
            step += 1
            rows.append(
                {
                    "step": step,
                    "reward": sum(rewards) / len(rewards),
                    "sample_seconds": sampled - started,
                    "train_and_serve_seconds": time.monotonic() - sampled,
                    **await job_numbers(tandem, job.spec.id),
                }
            )
            tell("rl", rows[-1])
        rl_reward = await task.evaluate(f"{run}@{step}", samples, seed=2)
        tell("evaluate", {"step": step, "reward": rl_reward})
    return {
        "sft_reward": sft_reward,
        "rl_reward": rl_reward,
        "sft_seconds": sft_seconds,
        "steps": rows,
    }


def api_key() -> str:
    """TANDEM_API_KEY, or the content of the file TANDEM_API_KEY_FILE. Controller and vLLM accept
    the same key."""
    file = os.environ.get("TANDEM_API_KEY_FILE")
    return os.environ.get("TANDEM_API_KEY") or (Path(file).read_text().strip() if file else "")


async def job_numbers(tandem: AsyncTandem, job_id: str) -> dict[str, Any]:
    """The job's duration, the seconds of its parts, and the metrics of its last optimizer step, all
    from the job's events."""
    events = await tandem.job_events(job_id)
    at = {event.type: event.time for event in events}
    metrics = next((e.data["metrics"] for e in reversed(events) if e.type == "step"), {})
    loaded = next((e.data for e in events if e.type == "loaded"), {})
    return {
        "job_seconds": at["succeeded"] - at["claimed"],
        "start_seconds": at["started"] - at["claimed"],
        "load_seconds": at["loaded"] - at["started"],
        "train_seconds": at["checkpoint"] - at["loaded"],
        "release_seconds": at["succeeded"] - at["checkpoint"],
        "serve_seconds": max(0.0, at.get("served", at["checkpoint"]) - at["checkpoint"]),
        "load": loaded.get("seconds", {}),
        "metrics": metrics,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("run", help="a new name for the run, such as my-run")
    parser.add_argument(
        "--trainable",
        choices=["lora", "full"],
        default="lora",
        help="full needs TANDEM_WEIGHTS=merged",
    )
    parser.add_argument("--rl-steps", type=int, default=15)
    arguments = parser.parse_args()

    def tell(what: str, row: dict[str, Any]) -> None:
        shown = (
            f"reward {row['reward']:.3f}"
            if "reward" in row
            else f"loss {row['metrics']['loss']:.3f}"
        )
        print(f"{what:<8} {arguments.run}@{row['step']}: {shown}", flush=True)

    report = asyncio.run(
        train(arguments.run, trainable=arguments.trainable, rl_steps=arguments.rl_steps, tell=tell)
    )
    print(
        f"mean reward of 200 samples: {report['sft_reward']:.3f} after SFT,"
        f" {report['rl_reward']:.3f} after RL"
    )
