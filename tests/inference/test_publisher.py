"""The tests check which steps the publisher loads into vLLM, refuses, keeps in vLLM and unloads. A
kill of the publisher at any point does no harm."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import fake_vllm
from inference.stage import PROMPTS, Stage, commit, make_run
from tandem.inference.publisher import checkpoint_loader
from tandem.spool import runs
from tandem.spool.checkpoints import Checkpoints
from tandem.vllm_client.client import (
    InferenceFailed,
    InferenceGone,
    InferenceRefused,
    InferenceUnavailable,
    VllmClient,
)
from tandem.vllm_client.names import NOT_HELD
from waiting import until


def test_each_step_is_served_and_its_job_gets_one_event(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stage.publisher()
    publisher.once()
    assert (stage.record().step, stage.record().mean_abs_logprob_error) == (0, 0.0)
    stage.step(0.3, job="job-1")
    publisher.once()
    stage.vllm.calls.clear()
    with monkeypatch.context() as reading:
        reading.setattr(
            Checkpoints, "manifest", lambda *_: pytest.fail("it reads a manifest again")
        )
        publisher.once()
    assert [path for path, _ in stage.vllm.calls] == ["/v1/models"], (
        "without a change it only asks for the list"
    )
    record = stage.record()
    sha256 = stage.spool.checkpoints.manifest("run", 1).files["adapter_model.safetensors"].sha256
    assert (record.model, record.checkpoint, record.tokens_checked) == ("run@1", sha256, 7 + 19)
    assert stage.listed() == ["run@0", "run@1"]
    # A second publisher loads nothing, but verifies the step that vLLM already has.
    stage.publisher().once()
    assert stage.vllm.loads() == []
    (_, event) = stage.spool.events.read("job-1")
    assert (event.type, event.data["step"], event.data["model"]) == ("served", 1, "run@1")
    assert event.data["seconds"] == record.seconds
    assert record.seconds.keys() == {"copy", "load", "verify", "since_checkpoint"}


def no_adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"nothing")
    (directory / "adapter_config.json").write_bytes(b"{}")


def then(
    change: Callable[[Path], object], file: str = "adapter_model.safetensors"
) -> Callable[[Stage], object]:
    """A function that commits a good step 2 and then changes the file `file` of step 2's
    checkpoint."""

    def commit_and_change(stage: Stage) -> None:
        stage.step(0.5)
        change(stage.weights(2).with_name(file))

    return commit_and_change


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (lambda stage: stage.step(0.5, weights=0.9), "differ from the trainer's"),
        # The checkpoint has the weights of the step before it. The log-probs of the checkpoint and
        # of the step before it differ by less than the tolerance.
        (
            lambda stage: stage.step(0.305, weights=0.3),
            "nearer to those of the checkpoint before it",
        ),
        (lambda stage: stage.step(0.5, weights=float("nan")), "not all finite"),
        (lambda stage: commit(stage.spool, "run", no_adapter, stage.probe(0.5)), "500"),
        (
            lambda stage: commit(stage.spool, "run", partial(stage.write_adapter, 0.3), None),
            "the base model's",
        ),
        (then(lambda file: shutil.copy(file.parents[1] / "00000001" / file.name, file)), "altered"),
        (
            then(lambda file: file.write_bytes(file.read_bytes()[:-1])),
            "00000002: adapter_model.safetensors is trunc",
        ),
        (then(Path.unlink), "00000002: adapter_model.safetensors is missing"),
        (
            then(lambda file: file.write_bytes(file.read_bytes()[:50]), "manifest.json"),
            "manifest.json",
        ),
    ],
)
def test_a_wrong_checkpoint_is_refused_once_and_the_older_step_stays(
    stage: Stage,
    wrong: Callable[[Stage], object],
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint_loader, "VISIBLE_SECONDS", 0.0)
    publisher = stage.publisher(keep_served=1)
    stage.step(0.3)
    publisher.once()
    wrong(stage)
    publisher.once()
    assert stage.served() == (1, 2)
    assert word in str(stage.record().refused_reason)
    stage.vllm.calls.clear()
    publisher.once()
    assert stage.vllm.loads() == []
    # After many refused steps, the last good step is still served.
    stage.rollback(1)
    for effect in (0.4, 0.5, 0.6):
        stage.step(effect, weights=-0.9)
    publisher.once()
    publisher.once()
    assert (stage.served(), stage.listed()) == ((1, 4), ["run@1"])
    # A refused step is tried again when its files change. A later good step is served, and the
    # record then names no refused step.
    stage.rollback(1)
    stage.step(0.7)
    good = stage.weights(2).read_bytes()
    stage.weights(2).write_bytes(good[:-1])
    publisher.once()
    assert stage.served() == (1, 2)
    stage.weights(2).write_bytes(good)
    publisher.once()
    assert stage.served() == (2, None)


def test_a_first_step_that_is_refused_is_told_though_nothing_is_served(stage: Stage) -> None:
    """Without a record of the refusal, clients that wait for the first step would wait for ever."""
    publisher = stage.publisher()
    good = stage.weights(0).read_bytes()
    stage.weights(0).write_bytes(good[:-1])
    publisher.once()
    told = stage.spool.served.refused("run")
    assert told is not None
    assert told.step == 0
    assert "adapter_model.safetensors" in told.reason
    stage.weights(0).write_bytes(good)
    publisher.once()
    assert stage.served() == (0, None)
    assert stage.spool.served.refused("run") is None


def test_a_record_names_the_manifest_that_is_on_the_volume(stage: Stage) -> None:
    """The record has the manifest's inode and time of change, so the controller identifies the
    served checkpoint without opening the manifest."""
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    manifest = stage.spool.checkpoints.path("run", 1) / "manifest.json"
    for _ in range(2):
        status = manifest.stat()
        assert stage.record().manifest == (status.st_ino, status.st_mtime_ns)
        manifest.with_suffix(".new").write_bytes(manifest.read_bytes())
        # A file that is restored from a backup has a new inode.
        manifest.with_suffix(".new").replace(manifest)
        assert stage.spool.checkpoints.has("run", stage.record())
        publisher.once()


def test_an_adapter_whose_file_appears_late_is_not_refused_but_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stage.publisher(keep_served=1)
    stage.step(0.3)
    publisher.once()
    stage.step(0.4)
    whole = stage.weights(2).read_bytes()
    stage.weights(2).unlink()
    for _ in range(3):
        publisher.once()
    assert stage.served() == (1, None)  # waiting clients are not told that the step is refused
    told = [trouble for trouble in publisher._troubles.values() if "run@2" in trouble]
    assert len(told) == 1
    assert told[0].startswith("run@2 is tried again until 60 s after it was made, since its")
    stage.weights(2).write_bytes(whole)
    publisher.once()
    assert stage.served() == (2, None)
    assert not publisher._troubles.get("run is not visible")

    stage.step(0.5)
    whole = stage.weights(3).read_bytes()
    stage.weights(3).unlink()
    # With 0 s a missing file counts as damage at once, as it does 60 s after the commit.
    monkeypatch.setattr(checkpoint_loader, "VISIBLE_SECONDS", 0.0)
    publisher.once()
    assert stage.served() == (2, 3)
    stage.weights(3).write_bytes(whole)
    publisher.once()
    assert stage.served() == (3, None)


def test_a_discarded_step_is_not_served_although_all_steps_after_the_rollback_are_refused(
    stage: Stage,
) -> None:
    publisher = stage.publisher(keep_served=1)
    stage.step(0.3)
    publisher.once()
    stage.rollback(0)
    for effect in (0.4, 0.5, 0.6):
        stage.step(effect, weights=-0.9)
    publisher.once()
    publisher.once()
    assert (stage.served(), stage.listed()) == ((0, 3), ["run@0"])


def test_an_older_step_is_loaded_while_somebody_asks_for_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stage.publisher(keep_served=1, grace=0.0)
    for effect in (0.3, 0.4, 0.5):
        stage.step(effect)
    publisher.once()
    assert stage.listed() == ["run@3"]
    stage.spool.served.want("run", 1)
    stage.spool.served.want("run", 9)  # The run has no step 9.
    for _ in range(2):
        publisher.once()
        assert stage.listed() == ["run@1", "run@3"]
    assert stage.served() == (3, None)
    monkeypatch.setattr(runs, "WANTED_SECONDS", 0.0)
    publisher.once()
    assert stage.listed() == ["run@3"]


def test_damaged_optimizer_state_does_not_unload_a_served_step(stage: Stage) -> None:
    def adapter_and_adam(directory: Path) -> None:
        stage.write_adapter(0.3, directory)
        (directory / "adam.safetensors").write_bytes(b"\0" * 64)

    commit(stage.spool, "run", adapter_and_adam, stage.probe(0.3))
    for content in (b"\0" * 64, b"\1" * 64):
        stage.weights(1).with_name("adam.safetensors").write_bytes(content)
        stage.publisher().once()
        assert (stage.served(), stage.listed()) == ((1, None), ["run@0", "run@1"])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/load_lora_adapter", "/v1/completions"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_fault_of_vllm_is_no_refusal(stage: Stage, path: str, status: int) -> None:
    publisher = stage.publisher()
    publisher.once()
    stage.step(0.3, job="job-1")
    stage.vllm.statuses[path] = [status]
    for _ in range(2):
        with suppress(InferenceRefused):
            publisher.once()
        assert stage.record().refused_step is None
    assert stage.served() == (1, None)


def test_a_checkpoint_that_vllm_answers_with_500_is_tried_again_later(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = stage.publisher()
    publisher.once()
    stage.step(0.3)
    stage.vllm.statuses["/v1/load_lora_adapter"] = [500] * checkpoint_loader.TRIES
    publisher.once()
    publisher.once()
    assert stage.served() == (0, 1)
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + checkpoint_loader.TRY_AGAIN_SECONDS + 1)
    publisher.once()
    assert stage.served() == (1, None)


def test_an_adapter_that_a_worker_does_not_hold_is_refused_after_one_load(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker does not hold the adapter, vLLM answers the load with status 500. A transient
    fault also gives status 500, and the publisher tries the load again after a transient fault."""
    publisher = stage.publisher()
    publisher.once()
    stage.step(0.3)
    stage.vllm.problem = f"ValueError: {NOT_HELD} of /x: no layer took q_proj"
    stage.vllm.statuses["/v1/load_lora_adapter"] = [500]
    stage.vllm.calls.clear()
    publisher.once()
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + checkpoint_loader.TRY_AGAIN_SECONDS + 1)
    publisher.once()
    assert (stage.served(), stage.vllm.loads()) == ((0, 1), ["run@1"])
    assert "no layer took q_proj" in str(stage.record().refused_reason)


def test_a_slow_list_of_models_makes_the_publisher_forget_nothing(stage: Stage) -> None:
    publisher = stage.publisher(client=VllmClient(stage.settings(), timeout=2))
    stage.step(0.3)
    publisher.once()
    stage.vllm.list_seconds = 4.0
    assert not publisher.once()
    stage.vllm.list_seconds = 0.0
    stage.vllm.calls.clear()
    assert publisher.once()
    assert stage.called("/v1/completions") == 0
    assert stage.served() == (1, None)


def test_no_secret_goes_to_a_proxy_of_the_environment(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert VllmClient(stage.settings()).models() == {"base": "/model"}


def test_a_restarted_vllm_gets_all_checkpoints_again_and_no_record_names_one_before(
    stage: Stage,
) -> None:
    make_run(stage.spool, "zero", stage.model)
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    records: list[object] = []

    class Client(VllmClient):
        def load_lora(self, name: str, path: str) -> None:
            if not records:
                records.extend([stage.spool.served.get("run"), stage.spool.served.get("zero")])
            super().load_lora(name, path)

    # vLLM restarts between two polls of the same publisher, or together with the publisher.
    for second in (publisher, stage.publisher()):
        stage.vllm.adapters.clear()
        second._transport._client = Client(stage.settings())
        second.once()
        assert records == [None, None]
        records.clear()
        assert stage.served() == (1, None)
    # The next vLLM loads the step but computes without the step's weights.
    stage.vllm.adapters.clear()
    stage.vllm.ignores_weights = True
    publisher.once()
    assert (stage.served(), stage.listed()) == ((0, 1), ["run@0", "zero@0"])
    stage.vllm.stop()
    assert not publisher.once()
    assert stage.spool.served.get("run") is None
    # vLLM caused the refusal, so the checkpoint is tried again on the next server.
    stage.vllm.ignores_weights = False
    stage.vllm.start()
    assert publisher.once()
    assert (stage.served(), stage.listed()) == ((1, None), ["run@0", "run@1", "zero@0"])


def test_after_a_rollback_the_name_serves_the_new_checkpoint(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    stage.step(0.6)
    publisher.once()
    assert stage.listed() == ["run@1", "run@2"]
    stage.rollback(0)
    publisher.once()
    assert (stage.listed(), stage.served()) == (["run@0"], (0, None))
    stage.step(-0.4)
    # The next publisher did not run between the rollback and the new step, so vLLM still lists the
    # old checkpoint under the new step's name.
    stage.vllm.adapters["run@1"] = ("/copies/run@1-of-before", 0.3)
    stage.publisher().once()
    assert stage.vllm.adapters["run@1"][1] == pytest.approx(-0.4)
    assert stage.served() == (1, None)


def test_of_many_refused_steps_few_are_tried_in_a_turn(stage: Stage) -> None:
    for number in range(8):
        stage.step(0.1 * (number + 1), weights=-0.9)
    stage.publisher(keep_served=1).once()
    assert stage.vllm.loads() == ["run@8", "run@7", "run@6"]


def test_a_restarted_vllm_gets_the_last_good_step_however_many_behind_it_are_refused(
    stage: Stage,
) -> None:
    publisher = stage.publisher(keep_served=1)
    stage.step(0.3)
    publisher.once()
    for number in range(7):
        stage.step(0.1 * (number + 4), weights=-0.9)
    publisher.once()
    assert stage.served() == (1, 8)
    stage.vllm.adapters.clear()
    for _ in range(3):
        publisher.once()
    assert (stage.served(), stage.listed()) == ((1, 8), ["run@1"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("version", "resets"), [("0.32.0", 0), ("0.31.1", 1), ("0.26.0", 1), ("dev", 1)]
)
def test_the_prefix_cache_is_reset_where_it_could_hold_the_old_adapter(
    stage: Stage, version: str, resets: int, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost`: vLLM loads the old adapter, but vLLM's answer to the load gets lost."""
    stage.vllm.stop()
    stage.vllm.version = version
    publisher = stage.publisher()
    assert not publisher.once()
    # The publisher has seen vLLM's start, so it knows that vLLM has loaded no adapter before.
    stage.vllm.start()
    stage.step(0.3)
    if lost:
        load = stage.client.load_lora

        def load_and_lose(name: str, path: str) -> None:
            load(name, path)
            monkeypatch.setattr(stage.client, "load_lora", load)
            raise InferenceFailed("no answer")

        monkeypatch.setattr(stage.client, "load_lora", load_and_lose)
        publisher.once()
    publisher.once()
    assert stage.served() == (1, None)
    assert stage.called("/reset_prefix_cache") == 0
    stage.rollback(0)
    publisher.once()
    stage.step(0.5)
    publisher.once()
    assert stage.called("/reset_prefix_cache") == resets


def test_old_steps_stay_in_use_and_for_the_grace_unless_there_are_too_many(stage: Stage) -> None:
    for number in range(5):
        # No client uses the steps of these runs. The steps of these runs displace no steps of the
        # run `run`.
        make_run(stage.spool, f"idle-{number}", stage.model)
    for step in range(1, 7):
        stage.step(step / 10)
        stage.publisher(keep_served=1, grace=60.0).once()

    def steps() -> list[int]:
        return [
            int(name.removeprefix("run@")) for name in stage.listed() if name.startswith("run@")
        ]

    assert steps() == [1, 2, 3, 4, 5, 6]
    # The publisher keeps at most 4 * `max_loras` old steps.
    stage.publisher(keep_served=1, grace=60.0, max_loras=1).once()
    assert steps() == [2, 3, 4, 5, 6]
    publisher = stage.publisher(keep_served=2)
    stage.vllm.in_use = {"run@2"}
    publisher.once()
    publisher.once()
    assert steps() == [2, 5, 6]
    stage.vllm.in_use = set()
    publisher.once()
    assert steps() == [5, 6]


def test_the_run_that_was_used_last_is_served_first(stage: Stage) -> None:
    for name in ("another", "sampled", "zero"):
        make_run(stage.spool, name, stage.model)
    stage.step(0.3)
    publisher = stage.publisher()
    publisher.once()
    stage.vllm.used = {"sampled@0": time.time() + 60}
    # A second publisher sees that a client used a step, and writes the time of the use into the
    # record. A third publisher reads the time from the record.
    stage.publisher().once()
    stage.vllm.stop()
    stage.vllm.used.clear()
    stage.vllm.start()
    stage.vllm.calls.clear()
    stage.publisher().once()
    assert stage.vllm.loads() == ["sampled@0", "run@1", "zero@0", "another@0", "run@0"]


def test_a_new_checkpoint_does_not_wait_for_old_runs_after_a_restart(stage: Stage) -> None:
    for name in ("another", "zero"):
        make_run(stage.spool, name, stage.model)

    class Client(VllmClient):
        def load_lora(self, name: str, path: str) -> None:
            if name == "zero@0":
                stage.step(0.3)
            super().load_lora(name, path)

    stage.publisher(client=Client(stage.settings())).once()
    # The newest step of each run is loaded before older steps of other runs.
    assert stage.vllm.loads() == ["zero@0", "run@1", "another@0", "run@0"]


def test_a_run_whose_steps_come_faster_than_they_are_loaded_keeps_no_other_waiting(
    stage: Stage,
) -> None:
    for name in ("another", "zero"):
        make_run(stage.spool, name, stage.model)
    stage.step(0.1)

    class Client(VllmClient):
        def load_lora(self, name: str, path: str) -> None:
            if name.startswith("run@") and len(stage.effects) < 20:
                stage.step(len(stage.effects) / 10)
            super().load_lora(name, path)

    stage.publisher(client=Client(stage.settings()), keep_served=1).once()
    assert stage.vllm.loads() == ["run@1", "run@2", "zero@0", "run@3", "another@0"]
    assert stage.listed() == ["another@0", "run@3", "zero@0"]


def test_an_adapter_that_vllm_refuses_to_unload_is_not_taken_for_unloaded(stage: Stage) -> None:
    stage.publisher().once()
    stage.vllm.statuses["/v1/unload_lora_adapter"] = [400]
    with pytest.raises(InferenceRefused, match="not now"):
        stage.client.unload_lora("run@0")
    for _ in range(2):  # vLLM answers the second unload with 404.
        stage.client.unload_lora("run@0")
    assert stage.listed() == []


def test_adapters_of_others_are_left_alone_and_a_broken_run_stops_no_other(stage: Stage) -> None:
    for name in ("somebody-elses", "of-another-spool@3", "run@latest"):
        stage.vllm.adapters[name] = ("/somewhere", 0.0)
    stage.vllm.adapters["run@9"] = ("/somewhere", 0.0)  # A discarded step of the run `run`.
    make_run(stage.spool, "another", stage.model)
    shutil.rmtree(stage.spool.checkpoints.path("another", 0))
    (stage.spool.paths.runs / "empty").mkdir()
    stage.publisher(keep_served=1, client=VllmClient(stage.settings(admin_token="wrong"))).once()
    assert stage.spool.served.get("run") is None
    stage.publisher(keep_served=1).once()
    assert stage.listed() == ["of-another-spool@3", "run@0", "run@latest", "somebody-elses"]
    assert stage.served() == (0, None)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_copy_that_an_earlier_publisher_left_damaged_is_made_again(
    stage: Stage, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    stage.step(0.3)
    stage.publisher().once()
    [copy] = tmp_path.rglob("run@1-*/adapter_model.safetensors")
    whole = copy.read_bytes()
    damage(copy)
    stage.vllm.adapters.clear()
    stage.publisher().once()
    assert (stage.served(), copy.read_bytes()) == ((1, None), whole)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_copy_that_was_damaged_under_this_publisher_is_made_again(
    stage: Stage, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    [copy] = tmp_path.rglob("run@1-*/adapter_model.safetensors")
    whole = copy.read_bytes()
    damage(copy)
    stage.vllm.adapters.clear()
    publisher.once()
    assert (stage.served(), copy.read_bytes()) == ((1, None), whole)


def test_the_files_of_listed_copies_look_used(stage: Stage, tmp_path: Path) -> None:
    """The publisher renews the times of each file of a copy, because systemd-tmpfiles removes each
    old file by itself."""
    publisher = stage.publisher()
    publisher.once()
    [copy] = tmp_path.rglob("run@0-*")
    paths = [copy, *copy.iterdir()]
    assert len(paths) == 3
    for path in paths:
        os.utime(path, (0, 0))
    publisher.once()
    assert all(min(path.stat().st_atime, path.stat().st_mtime) > time.time() - 60 for path in paths)


def test_copies_of_unloaded_adapters_are_removed_when_no_request_is_left(
    stage: Stage, tmp_path: Path
) -> None:
    publisher = stage.publisher(keep_served=1)
    stage.step(0.3)
    publisher.once()  # The publisher loads only step 1.
    stage.vllm.in_use = {"run@1"}
    stage.step(0.4)
    # After the rollback the volume contains neither step 1 nor step 2. The publisher unloads step 1
    # at once, although a request runs with it.
    stage.rollback(0)

    def copies() -> list[str]:
        return sorted(path.name.split("-")[0] for path in tmp_path.glob("tandem-adapters-*/*"))

    publisher.once()
    publisher.once()
    assert (stage.listed(), copies()) == (["run@0"], ["run@0", "run@1"])
    stage.vllm.in_use = set()
    publisher.once()
    assert copies() == ["run@0"]


def test_the_program_ends_at_once_when_it_is_told_to(stage: Stage, tmp_path: Path) -> None:
    settings = stage.settings()
    values = {
        "ROOT": settings.root,
        "INFERENCE_URL": stage.vllm.url,
        "API_KEY": fake_vllm.API_KEY,
        "ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
    }
    environment = os.environ | {f"TANDEM_{name}": str(value) for name, value in values.items()}
    command = [sys.executable, "-m", "tandem.inference.publisher"]
    with subprocess.Popen(command, env=environment | {"TMPDIR": str(tmp_path)}) as process:
        try:
            until("step 0 is served", lambda: stage.spool.served.get("run"))
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_a_second_publisher_is_refused_in_words_until_the_first_is_gone(
    stage: Stage, tmp_path: Path
) -> None:
    settings = stage.settings()
    values = {
        "ROOT": settings.root,
        "INFERENCE_URL": stage.vllm.url,
        "API_KEY": fake_vllm.API_KEY,
        "ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
    }
    environment = os.environ | {f"TANDEM_{name}": str(value) for name, value in values.items()}
    environment["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tandem.inference.publisher"]

    def start(log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    first, log = start(tmp_path / "first.log"), tmp_path / "second.log"
    processes = [first]
    try:
        until("step 0 is served", lambda: stage.spool.served.get("run"))
        processes.append(start(log))
        refusal = f"has a publisher already: publisher, pid {first.pid} on host"
        until("the second one says so", lambda: refusal in log.read_text())
        first.kill()
        first.wait(60)
        stage.step(0.3)
        until("the second one goes on", lambda: stage.served() == (1, None))
        assert log.read_text().count(refusal) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait(60)


def test_a_long_call_waits_no_longer_for_a_connection_than_a_short_one(stage: Stage) -> None:
    asked: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.extensions["timeout"])
        return httpx.Response(200, json={"data": []})

    client = VllmClient(stage.settings(), timeout=7.0, work_timeout=70.0)
    client._http._transport = httpx.MockTransport(answer)
    client.models()
    client.load_lora("run@0", "/somewhere")
    assert [(limits["read"], limits["connect"]) for limits in asked] == [(7.0, 5.0), (70.0, 5.0)]


@pytest.mark.parametrize(
    ("error", "tries", "gone"),
    [(httpx.ReadError, 3, False), (httpx.ConnectError, 3, True), (httpx.ReadTimeout, 1, False)],
)
def test_only_calls_without_side_effects_are_tried_again(
    stage: Stage, error: type[httpx.TransportError], tries: int, gone: bool
) -> None:
    asked: list[str] = []

    def fail(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        raise error("broken")

    client = VllmClient(stage.settings())
    client._http._transport = httpx.MockTransport(fail)
    for call, allowed in (
        (client.models, tries),
        (lambda: client.prompt_logprobs("base", [1, 2]), tries),
        (lambda: client.load_lora("run@0", "/somewhere"), 1),
        (client.sleep, 1),
        (client.wake_up, 1),
    ):
        asked.clear()
        with pytest.raises(InferenceUnavailable) as caught:
            call()
        assert (len(asked), isinstance(caught.value, InferenceGone)) == (allowed, gone)


def test_verification_passes_waiting_requests_and_waits_for_one_place(stage: Stage) -> None:
    stage.step(0.3)
    stage.publisher(keep_served=1).once()
    bodies = [body for path, body in stage.vllm.calls if path == "/v1/completions"]
    # The first request is for the step. The second request is for the base model and measures
    # vLLM's own error.
    assert [body["model"] for body in bodies] == ["run@1", "base"]
    assert [(body["prompt"], body["priority"]) for body in bodies] == [(PROMPTS, -1)] * 2
    queued = VllmClient(stage.settings())
    queued._http._transport = httpx.MockTransport(raise_timeout)
    with pytest.raises(
        InferenceUnavailable,
        match=r"within 120 s: it has a long queue, or TANDEM_MAX_LORAS adapters",
    ):
        queued.prompt_logprobs("base", [1, 2])


def raise_timeout(_: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("timed out")


class Killed(BaseException):
    """An exception that stands for kill -9. After kill -9 no handler of exceptions runs. No handler
    catches this exception, because it is a BaseException."""


class DyingClient(VllmClient):
    """A client that dies at one call. If `calls_left` is even, the client dies before the server
    gets the call. If `calls_left` is odd, the client dies after the call, and the answer is
    lost."""

    calls_left = 0

    def _request(self, *args: Any, **kwargs: Any) -> Any:
        if self.calls_left == 0:
            raise Killed
        answer = super()._request(*args, **kwargs)
        if self.calls_left == 1:
            raise Killed
        self.calls_left -= 2
        return answer


@pytest.mark.slow
def test_a_publisher_killed_at_any_call_leaves_nothing_undone(stage: Stage, tmp_path: Path) -> None:
    client = DyingClient(stage.settings())
    for point in range(100):
        stage.rollback(0)
        stage.publisher().once()
        effect = 0.1 + point / 100
        stage.step(effect, job=f"job-{point}")
        client.calls_left = point
        finished = False
        try:
            stage.publisher(client=client).once()
            finished = True
        except Killed:
            stage.publisher().once()
        assert stage.served() == (1, None), point
        assert stage.vllm.adapters["run@1"][1] == pytest.approx(effect), point
        assert [event.type for event in stage.spool.events.read(f"job-{point}")] == [
            "cancelled",
            "served",
        ], point
        if finished:
            break
    assert point >= 10
    assert not list(tmp_path.glob("tandem-adapters-*/.partial-*"))
