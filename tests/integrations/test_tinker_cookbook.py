"""Unmodified programs of Tinker's cookbook run on a whole stack with local data."""

import asyncio
import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import chz
import datasets
import numpy as np
import pytest
from safetensors.numpy import load_file
from tinker import types
from tinker_cookbook.distillation import train_on_policy
from tinker_cookbook.distillation.datasets import (
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.preference.types import Comparison, LabeledComparison
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import (
    GuessNumberDatasetBuilder,
)
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.rl import train as rl_train
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.supervised import train as sft_train
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
from tinker_cookbook.tokenizer_utils import get_tokenizer

from local_stack import API_KEY, LocalStack
from tandem.controller.tinker.names import path_of
from tinker_client import datum, service

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
of_programs = pytest.mark.sample(1, of="the cookbook's programs")
RENDERER = "role_colon"


@pytest.fixture
def common(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings that all programs of the cookbook get."""
    monkeypatch.setenv("TINKER_API_KEY", f"tml-{API_KEY}")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return {
        "model_name": str(stack.root / "models" / "tiny"),
        "renderer_name": RENDERER,
        "recipe_name": "a-test",
        "log_path": str(tmp_path / "log"),
        "base_url": stack.controller_url,
        "lora_rank": 8,
        "learning_rate": 5e-3,
        "save_every": 2,
        "eval_every": 0,
    }


def metrics(common: dict[str, Any], name: str) -> list[float]:
    """The values of one metric, as the program has logged them."""
    lines = Path(common["log_path"], "metrics.jsonl").read_text().splitlines()
    return [one[name] for line in lines if name in (one := json.loads(line))]


def checkpoints(common: dict[str, Any]) -> list[dict[str, Any]]:
    lines = Path(common["log_path"], "checkpoints.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def chat(common: dict[str, Any], batch_size: int) -> ChatDatasetBuilderCommonConfig:
    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=common["model_name"],
        renderer_name=RENDERER,
        max_length=256,
        batch_size=batch_size,
        train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES,
    )


@of_programs
def test_supervised_training_on_a_file(common: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"Is it {i}?"},
                        {"role": "assistant", "content": "yes" if i % 2 else "no"},
                    ]
                }
            )
            + "\n"
            for i in range(32)
        )
    )
    dataset = FromConversationFileBuilder(common_config=chat(common, 8), file_path=str(path))
    settings = common | {"dataset_builder": dataset, "num_epochs": 2}
    asyncio.run(sft_train.main(sft_train.Config(**settings)))
    losses = metrics(common, "train_mean_nll")
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0]
    last = checkpoints(common)[-1]
    # The program continues from its checkpoint, with the optimizer's state.
    asyncio.run(sft_train.main(sft_train.Config(**settings | {"num_epochs": 3})))
    assert len(metrics(common, "train_mean_nll")) == 12
    # Another program begins from the weights of the first program's last checkpoint.
    other = settings | {
        "log_path": str(tmp_path / "other"),
        "load_checkpoint_path": last["state_path"],
        "num_epochs": 1,
    }
    asyncio.run(sft_train.main(sft_train.Config(**other)))
    assert metrics(other, "train_mean_nll")[0] < 0.6 * losses[0]


class Even(ProblemEnv):
    """An answer is right if the code of its first character is even. About a third of the untrained
    model's answers are right."""

    def __init__(self, number: int, renderer: Any) -> None:
        super().__init__(renderer)
        self.number = number

    def get_question(self) -> str:
        return f"{self.number}?"

    def check_answer(self, sample_str: str) -> bool:
        return sample_str != "" and ord(sample_str[0]) % 2 == 0

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "b"


class Numbers(RLDataset):
    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        rng = random.Random(index)
        numbers = [rng.randrange(100) for _ in range(4)]
        return [
            ProblemGroupBuilder(env_thunk=partial(Even, number, self.renderer), num_envs=8)
            for number in numbers
        ]

    def __len__(self) -> int:
        return 8


@chz.chz
class NumbersBuilder(RLDatasetBuilder):
    model_name: str

    async def __call__(self) -> tuple[RLDataset, None]:
        return Numbers(get_renderer(RENDERER, get_tokenizer(self.model_name))), None


@pytest.mark.sample(0, of="programs that sample without a seed")
@pytest.mark.parametrize(
    ("loss", "while_training"),
    [("importance_sampling", False), ("ppo", False), ("ppo", True)],
)
def test_rl_with_an_environment_of_our_own(
    common: dict[str, Any], loss: Any, while_training: bool
) -> None:
    settings = common | {
        "dataset_builder": NumbersBuilder(model_name=common["model_name"]),
        "max_tokens": 4,
        "loss_fn": loss,
        "learning_rate": 3e-3,
        "kl_penalty_coef": 0.01,
        "kl_reference_config": rl_train.KLReferenceConfig(base_model=common["model_name"]),
        "compute_post_kl": True,
    }
    if while_training:
        settings["async_config"] = rl_train.AsyncConfig(
            max_steps_off_policy=1, groups_per_batch=4, loss_fn=loss
        )
    asyncio.run(rl_train.main(rl_train.Config(**settings)))
    right = metrics(common, "env/all/correct")
    differences = metrics(common, "optim/kl_sample_train_v2")
    assert len(right) == len(differences) == 8
    assert right[0] < 0.6
    assert np.mean(right[-3:]) > right[0] + 0.3
    if not while_training:  # sampler and trainer have the same log-probs
        assert max(differences) < 1e-9


@chz.chz
class Pairs(ComparisonDatasetBuilder):
    def get_train_and_test_datasets(self) -> tuple[Any, None]:
        rows = [{"question": f"Is it {i}?"} for i in range(16)]
        return datasets.Dataset.from_list(rows), None

    def example_to_labeled_comparison(self, example: dict[str, Any]) -> LabeledComparison:
        comparison = Comparison(
            prompt_conversation=[{"role": "user", "content": example["question"]}],
            completion_A=[{"role": "assistant", "content": "yes"}],
            completion_B=[{"role": "assistant", "content": "no"}],
        )
        return LabeledComparison(comparison=comparison, label="A")


@of_programs
def test_dpo(common: dict[str, Any]) -> None:
    dataset = DPODatasetBuilderFromComparisons(
        common_config=chat(common, 4), comparison_builder=Pairs()
    )
    settings = common | {"dataset_builder": dataset, "dpo_beta": 0.1, "num_epochs": 2}
    train_dpo.main(train_dpo.Config(**settings))
    losses = metrics(common, "dpo_loss")
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)  # the policy equals the reference
    assert losses[-1] < 0.5


@chz.chz
class Prompts(RLDatasetBuilder):
    model_name: str

    async def __call__(self) -> tuple[RLDataset, None]:
        tokenizer = get_tokenizer(self.model_name)
        prompts = [f"{i}?" for i in range(32)]
        renderer = get_renderer(RENDERER, tokenizer)
        return PromptOnlyDataset(prompts, 4, 16, renderer, tokenizer), None


def teacher(common: dict[str, Any]) -> str:
    """The path of a model that samples early letters of the alphabet, each equally often."""
    rng = random.Random(1)
    with service(common["base_url"], f"tml-{API_KEY}") as client:
        model = client.create_lora_training_client(base_model=common["model_name"], rank=8).result()
        tokenizer = get_tokenizer(common["model_name"])
        words = ["".join(rng.choices("abcdefghijklm", k=12)) for _ in range(32)]
        data = [datum(tokenizer.encode(f"Assistant: {word}")) for word in words]
        for _ in range(12):
            passing = model.forward_backward(data, "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            passing.result()
        return model.save_weights_for_sampler("teacher").result().path


@pytest.mark.sample(0, of="programs that sample without a seed")
def test_on_policy_distillation(common: dict[str, Any]) -> None:
    name = common["model_name"]
    data = DistillationDatasetConfig(
        dataset_builder=Prompts(model_name=name),
        teacher_config=TeacherConfig(base_model=name, load_checkpoint_path=teacher(common)),
        groups_per_batch=4,
    )
    settings = common | {"dataset_configs": [data], "max_tokens": 8, "learning_rate": 1e-2}
    asyncio.run(train_on_policy.main(train_on_policy.Config(**settings)))
    kl = metrics(common, "teacher_kl")
    assert len(kl) == 8
    assert kl[0] > 3
    assert np.mean(kl[-2:]) < 0.5 * kl[0]  # in nats per token, over 64 samples


@of_programs
def test_guess_number(common: dict[str, Any], stack: LocalStack) -> None:
    """The untrained model never answers with a number. Each of ten turns costs 1, so all answers
    are equally good and no weight moves."""
    builder = GuessNumberDatasetBuilder(
        batch_size=2,
        model_name=common["model_name"],
        renderer_name=RENDERER,
        train_group_size=2,
    )
    settings = common | {"dataset_builder": builder, "max_tokens": 8, "max_steps": 2}
    asyncio.run(rl_train.main(rl_train.Config(**settings)))
    assert metrics(common, "env/all/reward/total") == [-10.0, -10.0]
    assert metrics(common, "env/all/turns_per_episode") == [10.0, 10.0]
    saved = path_of(checkpoints(common)[-1]["state_path"])
    run = saved.model.run
    step = stack.spool.names.find(run, saved.group, saved.name).step
    steps = [stack.spool.checkpoints.path(run, number) for number in (0, step)]
    first, last = (load_file(path / "adapter_model.safetensors") for path in steps)
    assert step > 0
    assert first.keys() == last.keys()
    assert all(np.array_equal(first[name], last[name]) for name in first)
