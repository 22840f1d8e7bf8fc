"""Whole jobs on a tiny model: they learn, they end in a checkpoint or in an error, and they are exactly repeatable."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from tandem.data.inputs import Group, Trajectory, Turn
from tandem.errors import CheckpointDamaged, InvalidInput
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE
from tandem.model.policy import Policy, RowTensors
from tandem.spool import Spool
from tandem.spool.schema import RLLoss, SFTLoss
from tandem.trainer.rank import checkpoint, model_loader, session, worker
from trainer_ranks import jobs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def spool(tmp_path: Path, model: Path) -> Spool:
    spool = Spool.create(tmp_path / "spool")
    jobs.make_run(spool, model)
    return spool


def test_sft_reduces_the_loss_and_leaves_a_whole_checkpoint(spool: Spool) -> None:
    jobs.submit_sft(spool, epochs=15, learning_rate=2e-2)
    checkpoint = jobs.run_here(spool, "sft")
    steps = jobs.steps_of(spool, "sft")
    per_epoch = len(steps) // 15
    first, last = (np.mean([s["loss"] for s in part]) for part in (steps[:per_epoch], steps[-per_epoch:]))
    assert last < 0.5 * first
    manifest = spool.checkpoints.verify("r", 1)
    assert manifest.job == "sft"
    assert sorted(manifest.files) == ["adapter_config.json", "adapter_model.safetensors", "optimizer/adam.safetensors"]
    assert manifest.metrics == steps[-1]
    assert (checkpoint / "adapter_config.json").read_bytes() == (
        spool.checkpoints.path("r", 0) / "adapter_config.json"
    ).read_bytes()
    assert [e.type for e in spool.events.read("sft") if e.type not in ("step", "claimed")] == [
        "started", "loaded", "checkpoint", "succeeded",
    ]  # fmt: skip
    loaded = next(e for e in spool.events.read("sft") if e.type == "loaded")
    assert {"data", "build", "base_weights", "state", "probe"} <= set(loaded.data["seconds"])


def test_a_lone_rank_makes_no_communicator(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes one for a group's first collective: each takes a part of a second, and device memory till the end."""
    collectives = {}
    destroy = dist.destroy_process_group

    def count() -> None:
        groups = dist.distributed_c10d._world.pg_map
        collectives.update({group.group_desc: group._get_sequence_number_for_group() for group in groups})  # type: ignore[attr-defined]
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", count)
    loss = RLLoss(policy="ppo", old_logprobs="trainer", tis_cap=3.0, kl_coef=0.2)
    jobs.run_here(spool, jobs.submit_rl(spool, loss=loss, epochs=2))
    assert collectives.pop("default_pg") == 4, "Megatron gathers Python objects twice, by Gloo on every device"
    assert len(collectives) > 5
    assert set(collectives.values()) == {0}


def test_sft_on_a_mixture_of_experts_learns_and_goes_on_where_it_was(spool: Spool, tmp_path: Path) -> None:
    """Adapters on every expert; the second job continues from the first one's files, the optimizer's state included."""
    experts = jobs.make_model(tmp_path / "experts", "qwen3_moe")
    for run in ("two", "one"):
        jobs.make_run(spool, experts, run)
    first = jobs.run_here(spool, jobs.submit_sft(spool, "two", "first", epochs=8, learning_rate=2e-2))
    steps = jobs.steps_of(spool, "first")
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    before, after = (jobs.tensors(path) for path in (first.parent / "00000000", first))
    name = "base_model.model.model.layers.1.mlp.experts.{}.down_proj.lora_B.weight"
    moved = [expert for expert in range(8) if np.abs(after[name.format(expert)] - before[name.format(expert)]).max()]
    assert len(moved) > 4
    second = jobs.run_here(spool, jobs.submit_sft(spool, "two", "second", epochs=1, learning_rate=2e-2))
    adam = load_file(second / "optimizer/adam.safetensors")
    assert int(adam["step"]) == len(steps) + len(jobs.steps_of(spool, "second"))
    assert adam[f"{name.format(moved[0])}.exp_avg"].shape == after[name.format(moved[0])].shape


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_rehearsal_changes_no_bit(spool: Spool, tmp_path: Path, monkeypatch, family: str) -> None:
    """What a GPU's rank does while its base weights are read, done on the CPU, and before any of them is there."""
    model = jobs.make_model(tmp_path / "model", family)
    for run in ("at-once", "rehearsed"):
        jobs.make_run(spool, model, run)
    plain = [jobs.run_here(spool, jobs.submit_rl(spool, "at-once", f"at-once-{number}")) for number in range(2)]
    rehearsed, read = threading.Event(), []
    rehearse, load_weights = Policy.rehearse, model_loader.load_weights

    def rehearsing(policy: Policy, row: RowTensors) -> None:
        rehearse(policy, row)
        rehearsed.set()

    def load_late(*arguments: Any, **cut: int) -> None:
        read.append(rehearsed.wait(60))
        load_weights(*arguments, **cut)

    monkeypatch.setattr(session, "device", jobs.gpu_like())
    monkeypatch.setattr(Policy, "rehearse", rehearsing)
    monkeypatch.setattr(model_loader, "load_weights", load_late)
    for number, expected in enumerate(plain):
        rehearsed.clear()
        job = jobs.submit_rl(spool, "rehearsed", f"rehearsed-{number}")
        assert jobs.same_bytes(jobs.run_here(spool, job), expected)
        loaded = next(event for event in spool.events.read(job) if event.type == "loaded")
        assert "rehearsal" in loaded.data["seconds"]
    assert read == [True, True]


def test_base_weights_that_can_t_be_read_are_told_of_whatever_else_goes_on(spool: Spool, monkeypatch) -> None:
    def fails(*arguments: Any, **cut: int) -> None:
        raise InvalidInput("model.safetensors can't be read: it ends at byte 7", field="base_model")

    monkeypatch.setattr(session, "device", jobs.gpu_like())
    monkeypatch.setattr(model_loader, "load_weights", fails)
    error = jobs.fail_here(spool, jobs.submit_sft(spool))
    assert (error.type, error.retriable) == ("invalid_input", False)
    assert "ends at byte 7" in error.message


def test_rl_raises_the_log_probs_of_rewarded_answers(spool: Spool) -> None:
    answers = {10: 0.0, 20: 0.5, 30: 1.0}
    prompt = [1, 2, 3]

    def turn(token: int) -> Turn:
        return Turn(prompt_token_ids=prompt, token_ids=[token, 0], logprobs=[-5.0, -5.0])

    groups = [Group(trajectories=[Trajectory(turns=[turn(t)], reward=r) for t, r in answers.items()])]
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    base: list[list[float]] = []
    for step in range(3):
        job = jobs.submit_rl(
            spool, job_id=f"rl{step}", groups=groups, loss=RLLoss(policy="cispo", old_logprobs="trainer"), epochs=4
        )
        jobs.run_here(spool, job)
        probe = spool.checkpoints.manifest("r", step + 1).probe
        assert probe is not None
        base = base or probe.previous  # of the first job
        assert probe.base == base, "the base model, whatever the adapter has become"
        for tokens, now, previous in zip(probe.tokens, probe.logprobs, probe.previous, strict=True):
            assert len(now) == len(previous) == len(tokens) - 1
            answer = tokens[3]
            before.setdefault(answer, previous[2])
            after[answer] = now[2]
    assert set(after) == set(answers)
    gain = {answer: after[answer] - before[answer] for answer in answers}
    assert gain[30] > 1.0
    assert gain[30] > gain[20] > gain[10]
    assert gain[10] < 0


RL_VARIANTS = {
    "cispo": RLLoss(),
    "ppo": RLLoss(policy="ppo", old_logprobs="trainer", tis_cap=2.0, normalisation="group", entropy_coef=0.01),
    "gspo": RLLoss(policy="gspo", normalisation="trajectory", kl_coef=0.1, temperature=0.7),
    "constant": RLLoss(policy="ppo", normalisation="constant", normalisation_constant=8.0, kl_metric=True),
}


@pytest.mark.parametrize("kind", ["sft", *RL_VARIANTS])
def test_the_same_job_gives_the_same_bytes_and_a_pause_changes_nothing(kind: str, spool: Spool, model: Path) -> None:
    """Run `r`: jobs A and B in turn. Run `again`: the same. Then B once more, in a fork of A's checkpoint."""

    def submit(run: str, job_id: str, seed: int) -> str:
        if kind == "sft":
            return jobs.submit_sft(spool, run, job_id, examples=jobs.random_examples(seed))
        return jobs.submit_rl(spool, run, job_id, groups=jobs.random_groups(seed), loss=RL_VARIANTS[kind])

    jobs.make_run(spool, model, "again")
    made = {}
    for run in ("r", "again"):
        for seed in (0, 1):
            made[run, seed] = jobs.run_here(spool, submit(run, f"{run}-{seed}", seed))
    for seed in (0, 1):
        assert jobs.same_bytes(made["r", seed], made["again", seed])
    assert not jobs.same_bytes(made["r", 0], made["r", 1])
    numbers = jobs.steps_of(spool, "r-1")[-1]
    assert all(math.isfinite(value) for value in numbers.values())
    expected = {"loss", "grad_norm", "learning_rate", "tokens", "trainable_tokens", "tokens_per_second", "entropy",
                "seconds_forward_backward", "seconds_optimizer", "memory_optimizer_peak_bytes"}  # fmt: skip
    if kind != "sft":
        expected |= {"ratio_mean", "ratio_max", "clip_fraction", "kl_sampler", "sampler_logprob_difference",
                     "reward_mean", "reward_std", "reward_min", "reward_max", "advantage_mean"}  # fmt: skip
    assert expected <= set(numbers)
    assert ("kl_reference" in numbers) == (kind in ("gspo", "constant"))


def test_optimizer_state_is_carried_over(spool: Spool, model: Path) -> None:
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="a", grad_accumulation_sequences=64))
    first = load_file(spool.checkpoints.path("r", 1) / "optimizer/adam.safetensors")
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="b", grad_accumulation_sequences=64))
    second = load_file(spool.checkpoints.path("r", 2) / "optimizer/adam.safetensors")
    per_job = len(jobs.steps_of(spool, "a"))
    assert int(first["step"]) == per_job
    assert int(second["step"]) == 2 * per_job
    # What the second job started from was what the first one ended with.
    assert jobs.steps_of(spool, "b")[0]["loss"] < jobs.steps_of(spool, "a")[0]["loss"]
    names = set(jobs.tensors(spool.checkpoints.path("r", 1)))
    assert set(first) == {"step"} | {f"{n}.{m}" for n in names for m in ("exp_avg", "exp_avg_sq")}
    assert all(first[f"{n}.exp_avg"].shape == t.shape for n, t in jobs.tensors(spool.checkpoints.path("r", 1)).items())


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_two_jobs_of_a_step_equal_one_job_of_two(kind: str, spool: Spool, model: Path) -> None:
    """On a single row, bit for bit: steps don't leak into each other, and everything survives the end of a job."""
    jobs.make_run(spool, model, "once")

    def submit(run: str, job_id: str, epochs: int) -> str:
        if kind == "sft":
            return jobs.submit_sft(spool, run, job_id, examples=jobs.random_examples(2, 2), epochs=epochs)
        return jobs.submit_rl(spool, run, job_id, groups=jobs.random_groups(2, 1), epochs=epochs)

    whole = jobs.run_here(spool, submit("once", "whole", 2))
    assert len(jobs.steps_of(spool, "whole")) == 2
    jobs.run_here(spool, submit("r", "half", 1))
    assert jobs.same_bytes(jobs.run_here(spool, submit("r", "rest", 1)), whole)


def test_jobs_in_processes_of_their_own_equal_jobs_in_one(spool: Spool, model: Path) -> None:
    jobs.make_run(spool, model, "here")
    for seed in (0, 1):
        loss = RLLoss(kl_coef=0.1, old_logprobs="trainer")
        here, apart = (
            jobs.submit_rl(spool, run, f"{run}-{seed}", groups=jobs.random_groups(seed), loss=loss, epochs=2)
            for run in ("here", "r")
        )
        expected = jobs.run_here(spool, here)
        assert jobs.same_bytes(jobs.run_in_process(spool, apart), expected)


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


def test_the_gradient_is_clipped_to_its_global_norm(spool: Spool) -> None:
    """With an epsilon far above every gradient, Adam's first step is learning_rate / epsilon times the gradient."""
    made = jobs.run_here(
        spool,
        jobs.submit_sft(spool, grad_accumulation_sequences=64, learning_rate=1e3, eps=1e3, max_grad_norm=0.01),
    )
    assert jobs.steps_of(spool, "sft")[0]["grad_norm"] > 0.1
    before, after = jobs.tensors(spool.checkpoints.path("r", 0)), jobs.tensors(made)
    moved = math.sqrt(sum(float(((after[name] - before[name]) ** 2).sum()) for name in before))
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_the_probe_is_what_the_model_says(spool: Spool, model: Path) -> None:
    """`previous` of a run's first job is the base model's: compared with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    jobs.run_here(spool, jobs.submit_rl(spool))
    probe = spool.checkpoints.manifest("r", 1).probe
    assert probe is not None
    assert 1 <= len(probe.tokens) <= 4
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for tokens, now, previous in zip(probe.tokens, probe.logprobs, probe.previous, strict=True):
        with torch.no_grad():
            table = base(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = [table[i, token].item() for i, token in enumerate(tokens[1:])]
        np.testing.assert_allclose(previous, expected, atol=1e-4)
        assert not np.allclose(now, previous, atol=1e-3)


def test_a_job_whose_checkpoint_exists_is_done_and_anothers_is_a_conflict(spool: Spool) -> None:
    jobs.submit_sft(spool)
    job = jobs.claim(spool, "sft")
    assert worker.main(spool.root, "sft", 1) == 0
    before = spool.checkpoints.manifest("r", 1)
    assert worker.main(spool.root, "sft", 1) == 0
    assert spool.checkpoints.manifest("r", 1) == before
    manifest = spool.checkpoints.path("r", 1) / "manifest.json"
    manifest.write_text(before.model_copy(update={"job": "somebody"}).model_dump_json())
    assert worker.main(spool.root, "sft", 1) == 1
    error = jobs.error_of(spool, job)
    assert error.type == "conflict"
    assert "somebody" in error.message


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer/adam.safetensors"])
def test_a_damaged_checkpoint_fails_the_job_and_nothing_is_reset(file: str, damage: str, spool: Spool) -> None:
    """R16: for the adapter and for the optimizer's state."""
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    path = spool.checkpoints.path("r", 1) / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-40] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    jobs.submit_sft(spool, job_id="second")
    error = jobs.fail_here(spool, "second")
    assert error.type == "checkpoint_damaged"
    assert Path(file).name in error.message
    assert damage in error.message
    assert not error.retriable
    assert spool.checkpoints.steps("r") == [0, 1]


def test_a_trained_checkpoint_without_optimizer_state_is_damaged(spool: Spool) -> None:
    """Even when its manifest agrees: both or neither."""
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    path = spool.checkpoints.path("r", 1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["optimizer/adam.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "optimizer/adam.safetensors").unlink()
    jobs.submit_sft(spool, job_id="second")
    error = jobs.fail_here(spool, "second")
    assert error.type == "checkpoint_damaged"
    assert "optimizer/adam.safetensors" in error.message


def test_what_is_not_finite_is_named_and_no_checkpoint_is_made(spool: Spool) -> None:
    """An advantage as large as float32 takes, at a ratio of 5."""
    groups = jobs.random_groups(0)
    turn = Turn(prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-20.0, -20.0])
    groups[0] = Group(trajectories=[Trajectory(turns=[turn], reward=1.0, advantage=3e38), *groups[0].trajectories])
    jobs.submit_rl(spool, groups=groups, grad_accumulation_sequences=64)
    error = jobs.fail_here(spool, "rl")
    assert error.type == "non_finite"
    assert "optimizer step 1 of 1: not finite: loss; the gradient of " in error.message
    assert "lora_B.weight" in error.message
    assert spool.checkpoints.steps("r") == [0]


def test_heartbeats_tell_phase_and_step(spool: Spool) -> None:
    jobs.submit_sft(spool)
    job = jobs.claim(spool, "sft")
    assert worker.main(spool.root, "sft", 1) == 0
    beat = json.loads((spool.paths.work_dir("sft", job.attempt) / "beat.0").read_text())
    assert beat["phase"] == "leave"
    assert beat["step"] == len(jobs.steps_of(spool, "sft"))


def test_an_unknown_reference_checkpoint_fails_the_job(spool: Spool) -> None:
    jobs.submit_rl(spool, loss=RLLoss(kl_coef=0.1, kl_reference=5))
    error = jobs.fail_here(spool, "rl")
    assert error.type == "invalid_input"
    assert "loss.kl_reference" in error.message
    assert "checkpoint 5" in error.message


def test_the_reference_is_the_named_checkpoint_and_the_policy_is_restored(spool: Spool) -> None:
    """Measuring a KL changes nothing that is trained; against the checkpoint a job starts from it begins at 0."""
    jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    adapters, divergence = {}, {}
    for name, reference in (("none", None), ("self", 1), ("zero", 0), ("base", "base")):
        loss = RLLoss() if reference is None else RLLoss(kl_metric=True, kl_reference=reference)
        made = jobs.run_here(spool, jobs.submit_rl(spool, job_id=name, loss=loss))
        adapters[name] = (made / "adapter_model.safetensors").read_bytes()
        divergence[name] = jobs.steps_of(spool, name)[0].get("kl_reference")
        spool.checkpoints.rollback("r", 1)
    assert len(set(adapters.values())) == 1
    assert divergence["none"] is None
    assert divergence["self"] == 0.0
    assert divergence["zero"] == divergence["base"]  # the step-0 adapter is the identity
    assert divergence["base"] > 1e-4


def test_sft_normalisations_differ(spool: Spool) -> None:
    for kind in ("token", "trajectory"):
        jobs.run_here(spool, jobs.submit_sft(spool, job_id=kind, loss=SFTLoss(normalisation=kind)))
    assert jobs.steps_of(spool, "token")[0]["loss"] != jobs.steps_of(spool, "trajectory")[0]["loss"]


@pytest.mark.parametrize("name", [WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE])
def test_a_checkpoint_that_reads_back_otherwise_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "previous").mkdir()
    (tmp_path / "previous" / CONFIG_FILE).write_text("{}")
    saved = checkpoint.CheckpointState({"a": torch.ones(3)}, {"b": torch.zeros(2)})
    checkpoint.write(saved, tmp_path / "previous", tmp_path / "good")
    assert load_file(tmp_path / "good" / WEIGHTS_FILE)["a"].tolist() == [1, 1, 1]
    write = Path.write_bytes

    def flip(path: Path, content: bytes) -> int:
        return write(path, content[:-1] + bytes([content[-1] ^ 1]) if path.match(f"*/{name}") else content)

    monkeypatch.setattr(Path, "write_bytes", flip)
    with pytest.raises(CheckpointDamaged, match=f"{name} does not read back"):
        checkpoint.write(saved, tmp_path / "previous", tmp_path / "bad")
