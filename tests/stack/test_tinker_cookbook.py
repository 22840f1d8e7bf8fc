"""Programs of Tinker's cookbook, unmodified, on a whole stack with local data. Skipped where the
package `tinker_cookbook` is not installed (docs/tinker.md says how it is)."""

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from local_stack import API_KEY, LocalStack
from tinker_client import datum, service

cookbook = pytest.importorskip("tinker_cookbook")

import chz  # noqa: E402
import datasets  # noqa: E402
from tinker_cookbook.distillation import train_on_policy  # noqa: E402
from tinker_cookbook.distillation.datasets import (  # noqa: E402
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo  # noqa: E402
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons  # noqa: E402
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder  # noqa: E402
from tinker_cookbook.preference.types import Comparison, LabeledComparison  # noqa: E402
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import (  # noqa: E402
    GuessNumberDatasetBuilder,
)
from tinker_cookbook.renderers import TrainOnWhat, get_renderer  # noqa: E402
from tinker_cookbook.rl import train as rl_train  # noqa: E402
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder  # noqa: E402
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder  # noqa: E402
from tinker_cookbook.supervised import train as sft_train  # noqa: E402
from tinker_cookbook.supervised.data import FromConversationFileBuilder  # noqa: E402
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # noqa: E402
from tinker_cookbook.tokenizer_utils import get_tokenizer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RENDERER = "role_colon"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    root = tmp_path_factory.mktemp("cookbook")
    with LocalStack(root, TANDEM_MAX_MODEL_LEN="4096") as stack:
        yield stack


@pytest.fixture
def common(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of every program."""
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
    # It goes on from its checkpoint, with the optimizer's state.
    asyncio.run(sft_train.main(sft_train.Config(**settings | {"num_epochs": 3})))
    assert len(metrics(common, "train_mean_nll")) == 12
    # Another program begins from its weights.
    other = settings | {
        "log_path": str(tmp_path / "other"),
        "load_checkpoint_path": last["state_path"],
        "num_epochs": 1,
    }
    asyncio.run(sft_train.main(sft_train.Config(**other)))
    assert metrics(other, "train_mean_nll")[0] < 0.6 * losses[0]


class Parity(ProblemEnv):
    """The answer is one letter."""

    def __init__(self, number: int, renderer: Any) -> None:
        super().__init__(renderer)
        self.number = number

    def get_question(self) -> str:
        return f"{self.number}?"

    def check_answer(self, sample_str: str) -> bool:
        return "e" in sample_str

    def check_format(self, sample_str: str) -> bool:
        return bool(re.search("[a-z]", sample_str))

    def get_reference_answer(self) -> str:
        return "e"


class Numbers(RLDataset):
    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        rng = random.Random(index)
        numbers = [rng.randrange(100) for _ in range(4)]
        return [
            ProblemGroupBuilder(env_thunk=partial(Parity, number, self.renderer), num_envs=4)
            for number in numbers
        ]

    def __len__(self) -> int:
        return 3


@chz.chz
class NumbersBuilder(RLDatasetBuilder):
    model_name: str

    async def __call__(self) -> tuple[RLDataset, None]:
        return Numbers(get_renderer(RENDERER, get_tokenizer(self.model_name))), None


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_rl_with_an_environment_of_our_own(common: dict[str, Any], loss: str) -> None:
    settings = common | {
        "dataset_builder": NumbersBuilder(model_name=common["model_name"]),
        "max_tokens": 8,
        "loss_fn": loss,
        "learning_rate": 1e-3,
        "kl_penalty_coef": 0.01,
        "kl_reference_config": rl_train.KLReferenceConfig(base_model=common["model_name"]),
        "compute_post_kl": True,
    }
    asyncio.run(rl_train.main(rl_train.Config(**settings)))
    differences = metrics(common, "optim/kl_sample_train_v2")
    assert len(differences) == 3
    # The sampler's log-probs are the trainer's.
    assert all(abs(one) < 1e-3 for one in differences)


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


def test_dpo(common: dict[str, Any]) -> None:
    dataset = DPODatasetBuilderFromComparisons(
        common_config=chat(common, 4), comparison_builder=Pairs()
    )
    settings = common | {"dataset_builder": dataset, "dpo_beta": 0.1, "num_epochs": 2}
    train_dpo.main(train_dpo.Config(**settings))
    losses = metrics(common, "dpo_loss")
    assert len(losses) == 8
    assert abs(losses[0] - 0.693) < 0.01  # log 2: the policy is its reference
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
    """The path of a model that says one thing."""
    with service(common["base_url"], f"tml-{API_KEY}") as client:
        model = client.create_lora_training_client(base_model=common["model_name"], rank=8).result()
        tokenizer = get_tokenizer(common["model_name"])
        data = [datum(tokenizer.encode(f"Assistant: {word}")) for word in ("eeee", "e!e!")]
        for _ in range(8):
            passing = model.forward_backward(data, "cross_entropy")
            model.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            passing.result()
        return model.save_weights_for_sampler("teacher").result().path


def test_on_policy_distillation(common: dict[str, Any]) -> None:
    name = common["model_name"]
    data = DistillationDatasetConfig(
        dataset_builder=Prompts(model_name=name),
        teacher_config=TeacherConfig(base_model=name, load_checkpoint_path=teacher(common)),
        groups_per_batch=4,
    )
    settings = common | {"dataset_configs": [data], "max_tokens": 8}
    asyncio.run(train_on_policy.main(train_on_policy.Config(**settings)))
    kl = metrics(common, "teacher_kl")
    assert len(kl) == 8
    assert kl[0] > 0.5
    assert np.mean(kl[-3:]) < 0.9 * np.mean(kl[:3])  # of what 64 samples say each time


def test_guess_number(common: dict[str, Any]) -> None:
    builder = GuessNumberDatasetBuilder(
        batch_size=2,
        model_name=common["model_name"],
        renderer_name=RENDERER,
        train_group_size=2,
    )
    settings = common | {"dataset_builder": builder, "max_tokens": 8, "max_steps": 2}
    asyncio.run(rl_train.main(rl_train.Config(**settings)))
    assert len(metrics(common, "optim/lr")) == 2
