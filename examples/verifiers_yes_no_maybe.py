"""Trains a model by Tandem on a taskset of verifiers (0.4). See docs/verifiers.md.

The task is to answer a question with yes (reward 0.5), no (0.75) or maybe (1.0). The first argument
is the run's name. The second argument is the base model's directory or hub name, from which the
program loads the tokenizer.

    TANDEM_URL=http://127.0.0.1:8080 TANDEM_INFERENCE_URL=http://127.0.0.1:8000 \
        python examples/verifiers_yes_no_maybe.py my-run Qwen/Qwen3-0.6B
"""

import argparse
import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

from tandem.client import AsyncTandem
from tandem.client.verifiers import VerifiersEnvironment

# with this list, verifiers and `tandem rl` accept the module's name as a taskset's name
__all__ = ["YesNoMaybe"]

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
QUESTIONS = ["Is the sky blue?", "Is water wet?", "Do cats like rain?", "Will it snow today?"]
PACKING = {"sequence_length": 256}


class YesNoMaybeTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def answer(self, trace: vf.Trace) -> float:
        return REWARDS.get(trace.last_reply, 0.0)


class YesNoMaybe(vf.Taskset[YesNoMaybeTask]):
    def load(self) -> Iterator[YesNoMaybeTask]:
        for question in QUESTIONS:
            yield YesNoMaybeTask(vf.TaskData(prompt=question))


async def main(run: str, tokenizer: str, *, epochs: int, steps: int, group_size: int) -> None:
    environment = VerifiersEnvironment(
        YesNoMaybe(vf.TasksetConfig()), tokenizer=tokenizer, sampling={"max_tokens": 8}
    )
    async with AsyncTandem() as tandem:
        status = await tandem.create_run(run)
        if status.newest_step == 0:
            examples = [
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                }
                for question in QUESTIONS
                for answer in REWARDS
            ]
            for rate in (5e-3, 5e-4):  # coarse, then fine
                optimizer = {"learning_rate": rate, "batch_size": len(examples), "epochs": epochs}
                await tandem.train_sft(
                    run, examples, optimizer=optimizer, packing=PACKING, wait="served"
                )
        for _ in range(steps):
            step = (await tandem.get_run(run)).newest_step
            groups = [group async for group in environment.groups(run, step, group_size=group_size)]
            rewards = [
                trajectory["reward"] for group in groups for trajectory in group["trajectories"]
            ]
            print(f"{run}@{step}: reward {sum(rewards) / len(rewards):.3f}", flush=True)
            optimizer = {"learning_rate": 1e-3, "batch_size": len(groups)}
            await tandem.train_rl(
                run,
                groups,
                base_step=step,
                max_off_policy_steps=0,
                optimizer=optimizer,
                packing=PACKING,
                wait="served",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("run", help="a name for the run; an existing one goes on")
    parser.add_argument("tokenizer", help="the base model's directory or hub name")
    parser.add_argument("--epochs", type=int, default=30, help="of each of the two parts of SFT")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group-size", type=int, default=16)
    asyncio.run(main(**vars(parser.parse_args())))
