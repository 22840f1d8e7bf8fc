"""Trains by ART (openpipe-art) on Tandem: by ART's own loop or PipelineTrainer (--pipeline).
See docs/art.md.

The task is ART's: answer a question with yes (reward 0.5), no (0.75) or maybe (1.0).

    TANDEM_URL=http://127.0.0.1:8080 TANDEM_INFERENCE_URL=http://127.0.0.1:8000 \
        python examples/art_yes_no_maybe.py my-run Qwen/Qwen3-0.6B
"""

import argparse
import asyncio
from itertools import cycle

import art
from art.pipeline_trainer import PipelineTrainer, make_group_rollout_fn

from tandem.client.art import TandemBackend

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
QUESTIONS = ["Is the sky blue?", "Is water wet?", "Do cats like rain?", "Will it snow today?"]


async def rollout(
    model: art.TrainableModel, question: str, _config: object = None
) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": question}]
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, temperature=1.0
    )
    choice = answer.choices[0]
    reward = REWARDS.get((choice.message.content or "").strip(), 0.0)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def teach(model: art.TrainableModel, epochs: int) -> None:
    """SFT on every question with every answer, first with a high learning rate and then with a low
    one. After this SFT the model gives all three answers, so RL can choose among the answers."""
    answers = [
        art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        )
        for question in QUESTIONS
        for answer in REWARDS
    ]
    rates = [5e-3] * epochs + [5e-4] * epochs
    await model.train_sft(
        answers * len(rates), art.TrainSFTConfig(learning_rate=rates, batch_size=len(answers))
    )


async def improve(
    model: art.TrainableModel, backend: TandemBackend, steps: int, group_size: int
) -> None:
    """ART's plain loop, which gathers trajectories, trains and logs in turn."""
    for _ in range(steps):
        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, question) for _ in range(group_size))
            for question in QUESTIONS
        )
        result = await backend.train(model, groups, learning_rate=1e-3)
        await model.log(groups, split="train", metrics=result.metrics, step=result.step)
        rewards = [trajectory.reward for group in groups for trajectory in group]
        print(
            f"{model.get_inference_name()}: reward {sum(rewards) / len(rewards):.3f} before this"
            " step",
            flush=True,
        )


async def main(
    run: str, base_model: str, *, pipeline: bool, epochs: int, steps: int, group_size: int
) -> None:
    backend = TandemBackend(sequence_length=256)
    model = art.TrainableModel(name=run, project="yes-no-maybe", base_model=base_model)
    await model.register(backend)
    if await model.get_step() == 0:
        await teach(model, epochs)
    if pipeline:  # PipelineTrainer continues the rollouts while a step is trained
        trainer = PipelineTrainer(
            model,
            backend,
            make_group_rollout_fn(rollout, n=group_size),
            cycle(QUESTIONS),
            None,
            learning_rate=1e-3,
            max_steps=steps,
            max_steps_off_policy=1,
            num_rollout_workers=4,
            min_batch_size=4,
        )
        await trainer.train()
    else:
        await improve(model, backend, steps, group_size)
    print(f"{model.get_inference_name()} is served", flush=True)
    await backend.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("run", help="a name for the run; an existing one goes on")
    parser.add_argument("base_model", help="the deployment's TANDEM_BASE_MODEL")
    parser.add_argument("--pipeline", action="store_true", help="use ART's PipelineTrainer")
    parser.add_argument("--epochs", type=int, default=30, help="of each of the two parts of SFT")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--group-size", type=int, default=16)
    asyncio.run(main(**vars(parser.parse_args())))
