"""Training data of addition problems for SFT and DPO, and the mean reward of a served step.

    python examples/sums_data.py examples > sums-sft.jsonl        # the right answers to 32 sums
    python examples/sums_data.py pairs RUN@STEP > sums-dpo.jsonl  # the best and worst of 8 answers
    python examples/sums_data.py reward RUN@STEP                  # the mean of one answer to each

`pairs` and `reward` sample from vLLM; vLLM's address and key come from TANDEM_INFERENCE_URL and
TANDEM_API_KEY. A sum whose 8 answers have equal rewards gives no pair.
"""

import argparse
import asyncio
import json
import os
import random
from typing import Any

import sums
from openai import AsyncOpenAI, DefaultAioHttpClient

from tandem.client.vllm import vllm_url

TASKS = sums.Sums(largest=9).tasks()


async def answers(model: str, count: int) -> list[list[tuple[float, str]]]:
    """`count` answers to each sum, with their rewards."""
    client = AsyncOpenAI(
        base_url=f"{vllm_url(None)}/v1",
        api_key=os.environ["TANDEM_API_KEY"],
        http_client=DefaultAioHttpClient(),
    )

    async def of_sum(a: int, b: int) -> list[tuple[float, str]]:
        asked: Any = sums.question(a, b)
        told = await client.chat.completions.create(
            model=model, messages=asked, n=count, max_tokens=10, temperature=1.0
        )
        texts = [choice.message.content or "" for choice in told.choices]
        judged = [sums.judge(text, a + b) for text in texts]
        rewards = [right + 0.2 * alone for right, alone in judged]
        return list(zip(rewards, texts, strict=True))

    async with client:
        return await asyncio.gather(*(of_sum(a, b) for a, b in TASKS))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("examples", "pairs", "reward"))
    parser.add_argument("model", nargs="?", help="a served step, as sums@0")
    options = parser.parse_args()
    if options.what == "examples":
        for a, b in random.Random(1).sample(TASKS, 32):
            answer = {"role": "assistant", "content": str(a + b)}
            print(json.dumps({"messages": [*sums.question(a, b), answer]}))
        return
    if options.model is None:
        parser.error(f"{options.what} needs a model: RUN@STEP")
    if options.what == "reward":
        found = asyncio.run(answers(options.model, 1))
        print(f"{sum(reward for ((reward, _),) in found) / len(found):.3f}")
        return
    for (a, b), sampled in zip(TASKS, asyncio.run(answers(options.model, 8)), strict=True):
        (least, worst), (most, best) = min(sampled), max(sampled)
        if most > least:
            pair = {"prompt": sums.question(a, b)}
            pair |= {
                name: [{"role": "assistant", "content": text}]
                for name, text in (("chosen", best), ("rejected", worst))
            }
            print(json.dumps(pair))


if __name__ == "__main__":
    main()
