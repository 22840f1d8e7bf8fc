"""Jobs that can't be run: each ends in an error that names the cause, and changes no checkpoint."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rank import jobs
from tandem.data.inputs import Group, Trajectory, Turn
from tandem.data.packed_format import PackedBatch
from tandem.errors import CheckpointDamaged, InvalidInput, VolumeFull
from tandem.families.adapter import WEIGHTS_FILE
from tandem.model.layer.sublayers import SaveLevel
from tandem.model.policy import Policy
from tandem.spool import Spool
from tandem.spool.attempt import Attempt
from tandem.spool.events import Events
from tandem.spool.schema import Event, EventType, RLLoss
from tandem.trainer.rank import checkpoint, entry, full_volume, model_loader, train
from tandem.training.steps import Training


def refused(spool: Spool, job_id: str, kind: str, *says: str) -> None:
    """Checks that the job makes no checkpoint and fails for good. The error must have the type
    `kind`, and its message must contain `says`."""
    before = spool.checkpoints.steps("r")
    error = jobs.fail_here(spool, job_id)
    assert (error.type, error.retriable) == (kind, False)
    assert all(words in error.message for words in says), error.message
    assert spool.checkpoints.steps("r") == before


def test_fp8_without_a_gpu_is_refused(spool: Spool, monkeypatch) -> None:
    monkeypatch.setenv("TANDEM_BASE_PRECISION", "fp8")
    refused(
        spool,
        jobs.submit_sft(spool),
        "invalid_input",
        "the CPU has no FP8; set TANDEM_BASE_PRECISION=same",
    )


def test_base_weights_that_can_t_be_read_are_reported_although_other_threads_wait(
    spool: Spool, monkeypatch
) -> None:
    def fails(*arguments: Any, **cut: int) -> None:
        raise InvalidInput("model.safetensors can't be read: it ends at byte 7", field="base_model")

    monkeypatch.setattr(train, "device", jobs.gpu_like())
    monkeypatch.setattr(model_loader, "load_weights", fails)
    refused(spool, jobs.submit_sft(spool), "invalid_input", "ends at byte 7")


def test_a_checkpoint_that_exists_is_kept_and_is_a_conflict(spool: Spool) -> None:
    job = jobs.claim(spool, jobs.submit_sft(spool))
    assert entry.main(Attempt(spool, "sft", 1), jobs.settings()) == 0
    before = spool.checkpoints.manifest("r", 1)
    assert entry.main(Attempt(spool, "sft", 1), jobs.settings()) == 1
    assert jobs.error_of(spool, job).type == "conflict"
    assert spool.checkpoints.manifest("r", 1) == before
    manifest = spool.checkpoints.path("r", 1) / "manifest.json"
    manifest.write_text(before.model_copy(update={"job": "somebody"}).model_dump_json())
    assert entry.main(Attempt(spool, "sft", 1), jobs.settings()) == 1
    error = jobs.error_of(spool, job)
    assert error.type == "conflict"
    assert "somebody" in error.message


def test_a_volume_without_space_for_the_checkpoint_ends_the_job_before_it_trains(
    spool: Spool, monkeypatch
) -> None:
    def train(*_: Any) -> None:
        raise AssertionError("it trained")

    monkeypatch.setattr(Training, "train", train)
    monkeypatch.setattr(full_volume, "SPACE_SECONDS", 1.0)
    needed = sum(entry.size for entry in spool.checkpoints.manifest("r", 0).files.values())
    monkeypatch.setattr(
        "os.statvfs", lambda _: SimpleNamespace(f_blocks=100, f_frsize=1, f_bavail=needed - 1)
    )
    error = jobs.fail_here(spool, jobs.submit_sft(spool))
    assert (error.type, error.retriable) == ("spool_unusable", True)
    assert (
        f"has {needed - 1} bytes left, and the checkpoint that this job makes takes {needed}"
        in error.message
    )


def test_a_step_whose_event_a_full_volume_refuses_is_trained_all_the_same(
    spool: Spool, monkeypatch
) -> None:
    append = Events.append

    def refuse_steps(self: Events, job_id: str, kind: EventType, **data: Any) -> Event:
        if kind == "step":
            raise VolumeFull("the volume is full")
        return append(self, job_id, kind, **data)

    monkeypatch.setattr(Events, "append", refuse_steps)
    jobs.run_here(spool, jobs.submit_sft(spool))
    assert jobs.steps_of(spool, "sft") == []


@pytest.mark.parametrize("listed", [True, False])
def test_a_missing_optimizer_state_fails_the_job(listed: bool, spool: Spool) -> None:
    """The job fails even if the manifest doesn't list the missing file. The job does not begin with
    a new state of Adam."""
    directory = jobs.run_here(spool, jobs.submit_sft(spool, job_id="first"))
    (directory / checkpoint.OPTIMIZER_FILE).unlink()
    if not listed:
        manifest = json.loads((directory / "manifest.json").read_text())
        del manifest["files"][checkpoint.OPTIMIZER_FILE]
        (directory / "manifest.json").write_text(json.dumps(manifest))
    refused(
        spool,
        jobs.submit_sft(spool, job_id="second"),
        "checkpoint_damaged",
        "adam.safetensors",
        " missing",
    )


def test_an_adapter_config_that_was_altered_during_a_job_is_not_copied(spool: Spool) -> None:
    """The job checks the adapter's config at its start and copies it at its end."""
    directory = jobs.run_here(spool, jobs.submit_sft(spool))
    config = directory / checkpoint.CONFIG_FILE
    assert checkpoint.config_file(spool, "r", 1) == config.read_bytes()
    config.write_bytes(config.read_bytes() + b" ")
    with pytest.raises(CheckpointDamaged, match="adapter_config"):
        checkpoint.config_file(spool, "r", 1)
    config.unlink()
    with pytest.raises(CheckpointDamaged, match="adapter_config"):
        checkpoint.config_file(spool, "r", 1)


def test_packed_data_that_was_altered_fails_the_job(spool: Spool) -> None:
    """The altered arrays still fit together, so only their hash shows the damage."""
    job = jobs.submit_sft(spool)
    directory = spool.paths.data_dir(job)
    with PackedBatch.open(directory) as batch:
        weights = batch.row(0).item_weight
    for file in directory.iterdir():
        file.write_bytes(file.read_bytes().replace(weights.tobytes(), (2 * weights).tobytes()))
    PackedBatch.open(directory).close()
    refused(spool, job, "invalid_input", "altered")


def test_values_that_are_not_finite_are_named_and_no_checkpoint_is_made(spool: Spool) -> None:
    """The advantage is near the largest number of float32, and the token's ratio is 5, so their
    product is infinite."""
    groups = jobs.random_groups(0)
    turn = Turn(prompt_token_ids=[1, 2], token_ids=[3, 4], logprobs=[-20.0, -20.0])
    groups[0] = Group(
        trajectories=[Trajectory(turns=[turn], reward=1.0, advantage=3e38), *groups[0].trajectories]
    )
    job = jobs.submit_rl(spool, groups=groups, grad_accumulation_sequences=64)
    refused(
        spool, job, "non_finite", "step 1 of 1: not finite: loss; the gradient of ", "lora_B.weight"
    )


def test_a_last_step_that_makes_log_probs_nan_ends_the_job_once(spool: Spool) -> None:
    """The last step's loss is computed before this step changes the weights. The probe is the first
    computation with the last step's new weights."""
    job = jobs.submit_sft(spool, learning_rate=1e30, grad_accumulation_sequences=64)
    refused(spool, job, "non_finite", "log-probs are not finite", "lower the learning rate")


def one_token_each(advantages: list[float], logprob: float) -> list[Group]:
    """A group whose trajectories have one token each. The group is built without pydantic's checks,
    because the controller would refuse some of the tests' values."""
    members = [
        Trajectory.model_construct(
            turns=[
                Turn.model_construct(prompt_token_ids=[1, 2], token_ids=[token], logprobs=[logprob])
            ],
            reward=float(token),
            advantage=advantage,
            messages=None,
            metrics={},
        )
        for token, advantage in enumerate(advantages, 3)
    ]
    return [Group.model_construct(trajectories=members)]


@pytest.mark.parametrize(("policy", "old_logprobs"), [("cispo", "sampler"), ("gspo", "trainer")])
def test_a_log_prob_that_no_sampler_gives_fails_the_job(spool: Spool, policy, old_logprobs) -> None:
    loss = RLLoss(policy=policy, old_logprobs=old_logprobs)
    job = jobs.submit_rl(spool, groups=one_token_each([1.0, 2.0], -9998.0), loss=loss)
    refused(
        spool, job, "invalid_input", "optimizer step 1 of 1: the log-prob of a trained token is 99"
    )


def test_a_policy_may_learn_in_later_epochs_what_its_sampler_found_impossible(spool: Spool) -> None:
    loss, groups = (
        RLLoss(policy="ppo", old_logprobs="trainer", clip_high=1e9),
        one_token_each([1.0], -25.0),
    )
    jobs.run_here(
        spool, jobs.submit_rl(spool, groups=groups, loss=loss, epochs=3, learning_rate=5e-2)
    )
    first, *_, last = jobs.steps_of(spool, "rl")
    assert first["above_sampler_max"] < 20 < last["above_sampler_max"]


@pytest.mark.parametrize(
    ("policy", "advantages", "logprob", "says"),
    [
        ("ppo", [1e-30, -1e-30], -5.0, "advantage_std is 1e-30"),
        ("ppo", [1e-50, -1e-50], -5.0, "norm 0,"),  # 1e-50 is 0 in float32.
        # The two tokens' ratios are below PPO's lower bound.
        ("ppo", [-1.0, -2.0], 0.0, "clip_fraction is 1"),
        # The two tokens' ratios are far above 1.
        ("sapo", [1.0, 2.0], -15.0, "gates are closed"),
    ],
)
def test_a_job_that_moves_nothing_fails_and_says_so(
    spool: Spool, policy, advantages, logprob, says
) -> None:
    job = jobs.submit_rl(
        spool, groups=one_token_each(advantages, logprob), loss=RLLoss(policy=policy)
    )
    refused(spool, job, "nothing_to_learn", "the policy did not move", says)


def test_a_job_that_moved_in_one_of_its_steps_succeeds(spool: Spool) -> None:
    """The job has two steps. The first step moves the weights. In the second step the token's ratio
    is above PPO's upper bound, so the gradient is 0."""
    loss, groups = RLLoss(policy="ppo", old_logprobs="trainer"), one_token_each([1.0], -5.0)
    jobs.run_here(
        spool, jobs.submit_rl(spool, groups=groups, loss=loss, epochs=2, learning_rate=5e-2)
    )
    first, last = jobs.steps_of(spool, "rl")
    assert first["grad_norm"] > 0
    assert (last["grad_norm"], last["clip_fraction"]) == (0, 1)


def test_a_reference_checkpoint_that_is_gone_fails_the_job(spool: Spool) -> None:
    """The controller refuses a job whose reference checkpoint it can't find. In this test the
    checkpoint is removed after the job's submission."""
    jobs.run_here(spool, jobs.submit_sft(spool))
    job = jobs.submit_rl(spool, loss=RLLoss(kl_coef=0.1, kl_reference=0))
    shutil.rmtree(spool.checkpoints.path("r", 0))
    refused(spool, job, "invalid_input", "loss.kl_reference", "checkpoint 0")


def test_running_out_of_memory_has_an_error_type_and_a_last_beat(spool: Spool, monkeypatch) -> None:
    original = Training._optimizer_step

    def second_runs_out(training, step, *rest):
        if step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(training, step, *rest)

    monkeypatch.setattr(Training, "_optimizer_step", second_runs_out)
    error = jobs.fail_here(spool, jobs.submit_sft(spool, epochs=4))
    assert (error.type, error.retriable) == ("oom", True)
    assert "Tried to allocate" in error.message
    beat = Attempt(spool, "sft", 1).beats()[0]
    assert (beat.phase, beat.step) == ("out of memory", 1)


def test_a_step_that_runs_out_of_memory_begins_again_with_layers_that_keep_less(
    spool: Spool, monkeypatch
) -> None:
    """The error does not change the bytes of the checkpoint. If all layers already keep nothing,
    the job fails, because the layers can't free more memory."""
    original, levels = Policy.forward, list[list[SaveLevel]]()

    def small(policy, *arguments, **options):
        levels.append([layer.save_level for layer in policy.gpt.decoder.layers])
        outputs = original(policy, *arguments, **options)
        if torch.is_grad_enabled() and sum(levels[-1]) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return outputs

    room = 1000
    monkeypatch.setattr(Policy, "forward", small)
    expected = (jobs.run_here(spool, jobs.submit_sft(spool, epochs=2)) / WEIGHTS_FILE).read_bytes()
    assert {max(row) for row in levels} == {SaveLevel.ALL}
    spool.checkpoints.rollback("r", 0)
    room = 1
    again = jobs.run_here(spool, jobs.submit_sft(spool, epochs=2, job_id="again"))
    assert (again / WEIGHTS_FILE).read_bytes() == expected
    assert sum(levels[-1]) == 1
    spool.checkpoints.rollback("r", 0)
    room = -1
    error = jobs.fail_here(spool, jobs.submit_sft(spool, epochs=2, job_id="never"))
    assert (error.type, error.retriable) == ("oom", True)
    assert sum(levels[-1]) == 0


@pytest.mark.parametrize("name", [WEIGHTS_FILE, checkpoint.OPTIMIZER_FILE])
def test_what_the_volume_alters_while_it_is_written_is_noticed_by_whoever_reads_it(
    spool: Spool, monkeypatch, name: str
) -> None:
    write = checkpoint._write_and_sync

    def flip(path: Path, parts: list[memoryview]) -> None:
        *content, last = b"".join(parts)
        write(path, [memoryview(bytes([*content, last ^ 1]))] if path.match(f"*/{name}") else parts)

    monkeypatch.setattr(checkpoint, "_write_and_sync", flip)
    jobs.claim(spool, jobs.submit_sft(spool))
    assert entry.main(Attempt(spool, "sft", 1), jobs.settings()) == 0
    with pytest.raises(CheckpointDamaged, match=f"{name} is altered"):
        spool.checkpoints.verify("r", 1)
