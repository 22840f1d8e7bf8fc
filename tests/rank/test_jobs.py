"""Whole jobs of one rank on a tiny model. The jobs learn, repeat exactly, and make correct
checkpoints."""

import base64
import io
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file
from safetensors.torch import save

from rank import jobs
from tandem.data.inputs import Group, Trajectory, Turn
from tandem.data.packed_format import PackedBatch
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.model.policy import Policy
from tandem.model.rows import RowTensors
from tandem.spool import Spool
from tandem.spool.schema import RLLoss
from tandem.trainer.rank import checkpoint, model_loader, train
from tandem.trainer.rank.probe import choose_long
from tiny import MOE, SHAPE


def test_sft_reduces_the_loss_and_makes_a_whole_checkpoint(spool: Spool) -> None:
    made = jobs.run_here(spool, jobs.submit_sft(spool, epochs=15, learning_rate=2e-2))
    steps = jobs.steps_of(spool, "sft")
    first, last = jobs.first_and_last_epoch(spool, "sft", 15)
    assert last < 0.5 * first
    manifest = spool.checkpoints.verify("r", 1)
    assert manifest.job == "sft"
    assert sorted(manifest.files) == [CONFIG_FILE, WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE]
    assert manifest.metrics == steps[-1]
    assert (made / CONFIG_FILE).read_bytes() == (
        spool.checkpoints.path("r", 0) / CONFIG_FILE
    ).read_bytes()
    adam, adapter = load_file(made / checkpoint.OPTIMIZER_FILE), jobs.tensors(made)
    assert int(adam.pop("step")) == len(steps)
    shapes = {
        f"{name}.{moment}": t.shape
        for name, t in adapter.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert {name: moment.shape for name, moment in adam.items()} == shapes
    events = [event for event in spool.events.read("sft") if event.type not in ("step", "claimed")]
    assert [event.type for event in events] == ["started", "loaded", "checkpoint", "succeeded"]
    assert {"data", "build", "base_weights", "state", "probe"} <= set(events[1].data["seconds"])


def test_a_lone_rank_makes_no_communicator(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator for a group's first collective operation. Making the communicator
    takes less than a second. The communicator keeps device memory until the process ends."""
    collectives = {}
    destroy = dist.destroy_process_group

    def count() -> None:
        groups = dist.distributed_c10d._world.pg_map
        for group in groups:
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            collectives[group.group_desc] = number
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", count)
    loss = RLLoss(policy="ppo", old_logprobs="trainer", tis_cap=3.0, kl_coef=0.2)
    jobs.run_here(spool, jobs.submit_rl(spool, loss=loss, epochs=2))
    assert len(collectives) > 5
    assert set(collectives.values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_rehearsal_changes_no_bit(spool: Spool, tmp_path: Path, monkeypatch, family: str) -> None:
    """The rank calls `Policy.rehearse`, as on a GPU, before it reads any base weight."""
    model = jobs.make_model(tmp_path / "model", family)
    for run in ("plain", "rehearsed"):
        jobs.make_run(spool, model, run)
    expected = [
        jobs.run_here(spool, jobs.submit_rl(spool, "plain", f"plain-{number}"))
        for number in range(2)
    ]
    rehearsed, read = threading.Event(), []
    rehearse, load_weights = Policy.rehearse, model_loader.load_weights

    def rehearsing(policy: Policy, row: RowTensors) -> None:
        rehearse(policy, row)
        rehearsed.set()

    def load_late(*arguments: Any, **cut: int) -> None:
        read.append(rehearsed.wait(60))
        load_weights(*arguments, **cut)

    monkeypatch.setattr(train, "device", jobs.gpu_like())
    monkeypatch.setattr(Policy, "rehearse", rehearsing)
    monkeypatch.setattr(model_loader, "load_weights", load_late)
    for number, plain in enumerate(expected):
        rehearsed.clear()
        job = jobs.submit_rl(spool, "rehearsed", f"rehearsed-{number}")
        assert jobs.same_bytes(jobs.run_here(spool, job), plain)
        loaded = next(event for event in spool.events.read(job) if event.type == "loaded")
        assert "rehearsal" in loaded.data["seconds"]
    assert read == [True, True]


def test_rl_raises_the_log_probs_of_rewarded_answers(spool: Spool) -> None:
    answers = {10: 0.0, 20: 0.5, 30: 1.0}

    def turn(token: int) -> Turn:
        return Turn(prompt_token_ids=[1, 2, 3], token_ids=[token, 0], logprobs=[-5.0, -5.0])

    groups = [
        Group(trajectories=[Trajectory(turns=[turn(t)], reward=r) for t, r in answers.items()])
    ]
    gain = dict.fromkeys(answers, 0.0)
    base: list[list[float]] = []
    for step in range(3):
        loss = RLLoss(policy="cispo", old_logprobs="trainer")
        jobs.run_here(
            spool, jobs.submit_rl(spool, job_id=f"rl{step}", groups=groups, loss=loss, epochs=4)
        )
        probe = spool.checkpoints.manifest("r", step + 1).probe
        assert probe is not None
        base = base or probe.previous  # The first job's log-probs before its steps.
        assert probe.base == base, "the base model's log-probs don't depend on the adapter"
        for tokens, now, previous in zip(probe.tokens, probe.logprobs, probe.previous, strict=True):
            assert len(now) == len(previous) == len(tokens) - 1
            gain[tokens[3]] += now[2] - previous[2]
    assert gain[30] > 1.0
    assert gain[30] > gain[20] > gain[10]
    assert gain[10] < 0


@pytest.mark.parametrize(
    ("kind", "family"), [("sft", "qwen3"), ("rl", "qwen3"), ("sft", "qwen3_moe")]
)
def test_two_jobs_of_a_step_equal_one_job_of_two(
    kind: str, family: str, spool: Spool, tmp_path: Path
) -> None:
    """One job of two steps and two jobs of one step make equal checkpoints, bit for bit. So the
    checkpoint contains all state that a later step needs. The data is a single row."""
    model = jobs.make_model(tmp_path / "model", family)
    for run in ("once", "twice"):
        jobs.make_run(spool, model, run)

    def submit(run: str, job_id: str, epochs: int) -> str:
        if kind == "sft":
            return jobs.submit_sft(
                spool, run, job_id, examples=jobs.random_examples(2, 2), epochs=epochs
            )
        return jobs.submit_rl(spool, run, job_id, groups=jobs.random_groups(2, 1), epochs=epochs)

    whole = jobs.run_here(spool, submit("once", "whole", 2))
    first, last = jobs.steps_of(spool, "whole")
    assert all(math.isfinite(value) for value in (first | last).values())
    expected = {
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens",
        "trainable_tokens",
        "tokens_per_second",
        "entropy",
        "seconds_forward_backward",
        "seconds_optimizer",
        "memory_optimizer_peak_bytes",
    }
    if kind == "rl":
        expected |= {
            "ratio_mean",
            "ratio_max",
            "clip_fraction",
            "kl_sampler",
            "sampler_logprob_difference",
            "reward_mean",
            "reward_std",
            "reward_min",
            "reward_max",
            "advantage_mean",
        }
    assert expected <= set(last)
    jobs.run_here(spool, submit("twice", "half", 1))
    assert jobs.same_bytes(jobs.run_here(spool, submit("twice", "rest", 1)), whole)
    for made in (["whole"], ["half", "rest"]):  # Optimizer steps are counted over a run's jobs.
        assert [step["optimizer_step"] for job in made for step in jobs.steps_of(spool, job)] == [
            1,
            2,
        ]


def aged(group: Group, step: int | None) -> Group:
    """The group as if the policy of step `step` had sampled it."""
    made = group.model_dump()
    for trajectory in made["trajectories"]:
        trajectory["turns"] = [turn | {"policy_step": step} for turn in trajectory["turns"]]
    return Group.model_validate(made)


def test_the_samplers_difference_is_told_by_the_age_of_the_turns(spool: Spool) -> None:
    """A turn is fresh if the job's base step sampled the turn, and stale if an older step sampled
    the turn. The sampler's log-probs of fresh turns differ from the trainer's by rounding only. The
    log-probs of stale turns differ by training too."""
    both = ("sampler_logprob_difference", "kl_sampler")
    parts = {f"{name}_{age}" for name in both for age in ("fresh", "stale")}
    groups = jobs.random_groups(2, 3)

    def train(job_id: str, chosen: list[Group]) -> dict[str, float]:
        jobs.run_here(
            spool,
            jobs.submit_rl(spool, "r", job_id, groups=chosen, grad_accumulation_sequences=64),
        )
        [metrics] = jobs.steps_of(spool, job_id)
        return metrics

    assert parts.isdisjoint(train("unknown", groups))
    items = [
        sum(len(turn.token_ids) for trajectory in group.trajectories for turn in trajectory.turns)
        for group in groups
    ]
    groups = [aged(group, step) for group, step in zip(groups, (1, 0, None), strict=True)]
    mixed, known = train("mixed", groups), train("known", groups[:2])
    assert parts < mixed.keys()
    for name in both:
        stale = known[f"{name}_stale"]
        assert f"{name}_fresh" not in known  # The base step is 2 now, so all turns are stale.
        assert stale == pytest.approx(known[name])
        parts_of_three = items[0] * mixed[f"{name}_fresh"] + items[1] * mixed[f"{name}_stale"]
        assert 0 < parts_of_three < sum(items) * mixed[name]


@pytest.mark.parametrize("old_logprobs", ["sampler", "trainer"])
def test_kl_in_the_advantage_changes_advantages_but_not_their_mean(
    old_logprobs: str, spool: Spool, model: Path
) -> None:
    jobs.make_run(spool, model, "plain")
    made = {}
    for run, more in (("plain", {}), ("r", {"kl_coef": 0.5, "kl_in": "advantage"})):
        # The first step moves the adapter away from the base model.
        jobs.run_here(spool, jobs.submit_rl(spool, run, f"{run}-away", learning_rate=5e-2))
        loss = RLLoss.model_validate({"policy": "ppo", "old_logprobs": old_logprobs, **more})
        job = jobs.submit_rl(
            spool, run, run, groups=jobs.random_groups(1), loss=loss, grad_accumulation_sequences=64
        )
        jobs.run_here(spool, job)
        (made[run],) = jobs.steps_of(spool, job)
    assert made["r"]["advantage_mean"] == pytest.approx(made["plain"]["advantage_mean"], abs=1e-6)
    assert made["r"]["advantage_std"] != pytest.approx(made["plain"]["advantage_std"], rel=1e-3)


def test_scaled_advantages_forget_the_scale_of_the_rewards(spool: Spool, model: Path) -> None:
    made = []
    for run, factor, scale in (
        ("a", 1, "mean_abs"),
        ("b", 2**20, "mean_abs"),
        ("c", 2**20, "none"),
    ):
        jobs.make_run(spool, model, run)
        groups = [
            Group(
                trajectories=[
                    m.model_copy(update={"advantage": m.reward * factor})
                    for m in group.trajectories
                ]
            )
            for group in jobs.random_groups(0)
        ]
        loss = RLLoss.model_validate({"policy": "ppo", "advantage_scale": scale})
        made.append(jobs.run_here(spool, jobs.submit_rl(spool, run, run, groups=groups, loss=loss)))
    assert jobs.same_bytes(made[0], made[1])
    assert not jobs.same_bytes(made[1], made[2])


def test_masks_and_weights_of_the_sampler_are_measured(spool: Spool) -> None:
    """The sampler's log-probs are random and far from the trainer's, so the ratios of many tokens
    are outside the mask's bounds."""
    loss = RLLoss(policy="ppo", old_logprobs="trainer", tis_mask_low=0.1, tis_mask_high=10.0)
    jobs.run_here(spool, jobs.submit_rl(spool, loss=loss, grad_accumulation_sequences=64))
    (numbers,) = jobs.steps_of(spool, "rl")
    assert 0.1 < numbers["masked_fraction"] < 0.9
    assert 0 < numbers["importance_weight_mean"] < 10.0 * (1 - numbers["masked_fraction"])


def test_the_ratio_is_against_the_policy_before_the_first_step(spool: Spool) -> None:
    loss = RLLoss(policy="ppo", old_logprobs="trainer")
    jobs.run_here(spool, jobs.submit_rl(spool, loss=loss, epochs=3, learning_rate=5e-2))
    first, *_, last = jobs.steps_of(spool, "rl")
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(last["ratio_mean"] - 1.0) > 0.02
    assert last["ratio_max"] > 1.02


def test_log_probs_are_those_at_the_sampling_temperature(spool: Spool, model: Path) -> None:
    jobs.make_run(spool, model, "hot")
    for run, temperature in (("r", 1.0), ("hot", 2.0)):
        jobs.run_here(spool, jobs.submit_rl(spool, run, run, loss=RLLoss(temperature=temperature)))
    assert jobs.steps_of(spool, "hot")[0]["entropy"] > jobs.steps_of(spool, "r")[0]["entropy"] + 0.5


@pytest.mark.parametrize(
    ("row", "vocab", "length"), [(160, 512, 160), (127, 512, 0), (160, 2**21, 128), (160, 2**22, 0)]
)
def test_the_long_probe_fills_a_row_within_what_vllm_can_score(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, row: int, vocab: int, length: int
) -> None:
    monkeypatch.setattr(jobs, "ROW", row)
    with PackedBatch.open(spool.paths.data_dir(jobs.submit_rl(spool))) as batch:
        tokens = choose_long(batch, vocab)
        assert len(tokens) == length
        assert set(tokens) <= set(
            np.concatenate([batch.row(0).tokens, batch.row(len(batch) - 1).tokens]).tolist()
        )


def test_a_checkpoint_of_long_rows_has_a_long_probe(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "ROW", 160)
    jobs.run_here(spool, jobs.submit_rl(spool))
    found = spool.checkpoints.manifest("r", 1).probe.long
    assert (len(found.tokens), len(found.positions), len(found.logprobs)) == (160, 64, 64)


def test_the_reference_is_the_named_checkpoint_and_the_policy_is_restored(spool: Spool) -> None:
    """A job that measures the KL divergence from a reference makes the same adapter as a job that
    does not. The divergence from the job's own starting checkpoint begins at 0."""
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    adapters, divergence = {}, {}
    for name, reference in (("none", None), ("self", 1), ("zero", 0), ("base", "base")):
        loss = RLLoss() if reference is None else RLLoss(kl_metric=True, kl_reference=reference)
        made = jobs.run_here(spool, jobs.submit_rl(spool, job_id=name, loss=loss))
        adapters[name] = (made / WEIGHTS_FILE).read_bytes()
        divergence[name] = jobs.steps_of(spool, name)[0].get("kl_reference")
        spool.checkpoints.rollback("r", 1)
    assert len(set(adapters.values())) == 1
    assert divergence["none"] is None
    assert divergence["self"] == 0.0
    assert divergence["zero"] == divergence["base"]  # Step 0's adapter does not change the base.
    assert divergence["base"] > 1e-4


def with_experts(groups: list[Group]) -> list[Group]:
    """The groups with random routed experts for each token of every turn."""
    rng, content = np.random.default_rng(3), [group.model_dump() for group in groups]
    for turn in (
        turn
        for group in content
        for trajectory in group["trajectories"]
        for turn in trajectory["turns"]
    ):
        tokens = len(turn["prompt_token_ids"]) + len(turn["token_ids"]) - 1
        ranks = rng.random((tokens, SHAPE["num_hidden_layers"], MOE["num_experts"])).argsort(-1)
        buffer = io.BytesIO()
        np.save(buffer, ranks[..., : MOE["num_experts_per_tok"]].astype(np.uint8))
        turn["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
    return [Group.model_validate(group) for group in content]


def test_a_job_uses_the_experts_of_its_turns(spool: Spool, tmp_path: Path) -> None:
    model, groups = jobs.make_model(tmp_path / "model", "qwen3_moe"), jobs.random_groups(0)
    entropy = {}
    for run, given in (
        ("free", groups),
        ("replayed", with_experts(groups)),
        ("again", with_experts(groups)),
    ):
        jobs.make_run(spool, model, run)
        jobs.run_here(spool, jobs.submit_rl(spool, run, run, groups=given))
        entropy[run] = [step["entropy"] for step in jobs.steps_of(spool, run)]
    assert entropy["replayed"] == entropy["again"]
    assert all(abs(a - b) > 1e-3 for a, b in zip(entropy["free"], entropy["replayed"], strict=True))


def test_a_file_has_the_bytes_of_safetensors_own_writer() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 3, 40):
        tensors = {
            f"layers.{i}.b": torch.randn(3, 5 + i, generator=generator) for i in range(count)
        }
        tensors |= {
            "step": torch.tensor(7),
            "a": torch.randn(2, generator=generator),
            "none": torch.empty(0, 4),
        }
        assert b"".join(checkpoint._parts(tensors)) == save(tensors, metadata={"format": "pt"})
