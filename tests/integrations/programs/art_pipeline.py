"""The program runs ART's PipelineTrainer with the trainer's retention of checkpoints. The program
also passes options that the backend refuses."""

import asyncio
import sys
from itertools import cycle
from types import SimpleNamespace

import art
import pytest
from art.pipeline_trainer import PipelineTrainer, make_group_rollout_fn
from art_yes_no_maybe import QUESTIONS, rollout

from tandem.client import RLLoss
from tandem.client.art import TandemBackend, _job_settings, _marker
from tandem.errors import InvalidInput

run, base_model = sys.argv[1:]


def options() -> None:
    """ART's default values are ignored; other values become Tandem's settings."""
    default = _job_settings(1e-5, 3, 256, {"loss_fn": "ppo"})
    assert default["loss"] == {
        "policy": "ppo",
        "normalisation": "trajectory",
        "advantage_scale": "mean_abs",
        "clip_low": pytest.approx(0.2),
        "clip_high": pytest.approx(0.2),
        "ratio_level": "token",
    }
    assert default["advantage"] == {"scale": "group"}
    changed = _job_settings(
        1e-5,
        3,
        256,
        {
            "loss_fn_config": {"clip_low_threshold": 0.1, "clip_high_threshold": 3.0},
            "normalize_advantages": False,
            "kl_penalty_coef": 0.1,
            "kl_penalty_reference_step": 2,
            "truncated_importance_sampling": 2.0,
            "importance_sampling_level": "sequence",
            "adam_params": SimpleNamespace(learning_rate=1e-2, beta1=0.8),
            "packed_sequence_length": 512,
            "save_checkpoint": False,
            "verbose": True,
            "advantage_balance": 0.0,
        },
    )
    assert changed == {
        "loss": {
            "policy": "cispo",
            "normalisation": "trajectory",
            "advantage_scale": "mean_abs",
            "clip_low": pytest.approx(0.9),
            "clip_high": pytest.approx(2.0),
            "ratio_level": "sequence",
            "kl_coef": 0.1,
            "kl_in": "advantage",
            "kl_reference": 2,
            "tis_cap": 2.0,
            "old_logprobs": "trainer",
        },
        "advantage": {"scale": "none"},
        "packing": {"sequence_length": 512},
        "optimizer": {"learning_rate": 1e-2, "beta1": 0.8, "batch_size": 3},
    }
    for scale in (
        {"normalize_advantages": False, "scale_rewards": False},
        {"scale_rewards": False},
    ):
        assert _job_settings(1e-5, 3, 256, scale)["advantage"] == {"scale": "none"}
    backend = TandemBackend(None, loss={"temperature": 0.7, "ratio_level": "sequence"})
    assert backend._with_options(default)["loss"] == {"temperature": 0.7} | default["loss"]
    for settings in (default, changed):
        RLLoss.model_validate(settings["loss"])


async def refusals(
    backend: TandemBackend, model: art.TrainableModel, group: art.TrajectoryGroup
) -> None:
    for field, options in {
        "mask_prob_ratio": {"mask_prob_ratio": True},
        "kimi_k2_tau": {"kimi_k2_tau": 0.1},
        "loss_fn": {"loss_fn": "dro"},
        "importance_sampling_level": {"importance_sampling_level": "average"},
        "new_option": {"new_option": 1},
        "loss_fn_config": {"loss_fn_config": {"beta": 1.0}},
    }.items():
        with pytest.raises(InvalidInput) as refused:
            await backend.train(model, [group], **options)
        assert refused.value.field == field
    # This choice was sampled without the rollout door, so it has no token ids.
    model.openai_client()._client.base_url = str(model.inference_base_url).replace("/rollout", "")
    plain = await rollout(model, QUESTIONS[0])
    model.openai_client()._client.base_url = model.inference_base_url
    with pytest.raises(InvalidInput, match="rollout door") as refused:
        await backend.train(model, [art.TrajectoryGroup([plain])])
    assert refused.value.field == "groups.0.trajectories.0.messages_and_choices.1.prompt_token_ids"


async def main() -> None:
    backend = TandemBackend(sequence_length=256)
    model = art.TrainableModel(name=run, project="yes-no-maybe", base_model=base_model)
    await model.register(backend)
    options()
    group = art.TrajectoryGroup([await rollout(model, QUESTIONS[0]) for _ in range(2)])
    await refusals(backend, model, group)
    trainer = PipelineTrainer(
        model,
        backend,
        make_group_rollout_fn(rollout, n=8),
        cycle(QUESTIONS),
        None,
        learning_rate=1e-3,
        max_steps=3,
        max_steps_off_policy=1,
        num_rollout_workers=2,
        min_batch_size=2,
        eval_at_start=False,
        max_batch_size=4,
        checkpoint_retention_strategy=lambda context: [
            info.step for info in context.checkpoints if info.step < 2
        ],
    )
    await trainer.train(handle_signals=False)
    # The strategy kept step 1. The strategy kept step 2 only if a rollout still used step 2.
    steps = {info.step for info in await backend._tandem.checkpoints(run)}
    assert {0, 1, 3} <= steps, steps
    known = _marker(model, 1)
    known.rmdir()  # now ART does not know step 1, as if another program had made step 1
    await model.delete_checkpoints()
    assert {0, 1, 3} == {info.step for info in await backend._tandem.checkpoints(run)}
    known.mkdir()
    await model.delete_checkpoints()
    print(
        model.get_inference_name(), [info.step for info in await backend._tandem.checkpoints(run)]
    )
    await backend.close()


asyncio.run(main())
