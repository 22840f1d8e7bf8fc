"""The publisher's decisions: what is loaded, refused, kept, unloaded; and dying anywhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fake_vllm
from fake_vllm import FakeVllm
from published_runs import LORA, commit, make_run, weights_of
from tandem.errors import Unauthorized
from tandem.families.arch import read_arch
from tandem.families.identity import write_identity_adapter
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.store import AdapterStore
from tandem.spool import Spool
from tandem.spool.schema import Probe, Served
from tandem.vllm_client.admin import AdminClient

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 60))]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import tiny_model

    return tiny_model.write_tiny_qwen3(tmp_path / "model", hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32)


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    server = FakeVllm()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.create(tmp_path / "spool")


class Stage:
    """One run on one spool, and publishers for it."""

    def __init__(self, spool: Spool, vllm: FakeVllm, model: Path, directory: Path) -> None:
        self.spool, self.vllm, self.model, self.directory = spool, vllm, model, directory
        make_run(spool, "run", model)
        self.effects = [0.0]

    def publisher(self, client: type[AdminClient] = AdminClient, **options: Any) -> Publisher:
        admin = client(self.vllm.url, api_key=fake_vllm.API_KEY, admin_token=fake_vllm.ADMIN_TOKEN, timeout=5.0)
        options = {"grace": 0.0, "max_listed": 99, **options}
        return Publisher(self.spool, admin, AdapterStore(self.directory / "store"), **options)

    def adapter(self, moved: float) -> Callable[[Path], None]:
        def write(directory: Path) -> None:
            write_identity_adapter(directory, read_arch(str(self.model)), LORA, base_model=str(self.model), seed=0)
            file = directory / "adapter_model.safetensors"
            weights = load_file(file)
            name = next(name for name in weights if "lora_B" in name)
            weights[name] = weights[name].copy()
            weights[name][0, 0] = moved
            save_file(weights, file)

        return write

    def probe(self, moved: float, before: float) -> Probe:
        return Probe(
            tokens=PROMPTS,
            logprobs=[fake_vllm.logprobs(tokens, moved) for tokens in PROMPTS],
            previous=[fake_vllm.logprobs(tokens, before) for tokens in PROMPTS],
            base=[fake_vllm.logprobs(tokens, 0.0) for tokens in PROMPTS],
        )

    def step(self, moved: float, *, weights: float | None = None, job: str | None = None) -> None:
        """A checkpoint whose probe says `moved`, with weights that do that, or something else."""
        before = self.effects[-1]
        commit(self.spool, "run", self.adapter(moved if weights is None else weights), self.probe(moved, before), job)
        self.effects.append(moved)

    def rollback(self, step: int) -> None:
        self.spool.checkpoints.rollback("run", step)
        del self.effects[step + 1 :]

    @property
    def served(self) -> Served:
        served = self.spool.served.get("run")
        assert served is not None
        return served

    @property
    def listed(self) -> list[str]:
        return sorted(self.vllm.adapters)


@pytest.fixture
def stage(spool: Spool, vllm: FakeVllm, model: Path, tmp_path: Path) -> Stage:
    return Stage(spool, vllm, model, tmp_path)


def test_every_step_is_served_and_its_job_told_once(stage: Stage) -> None:
    publisher = stage.publisher()
    publisher.once()
    assert (stage.served.step, stage.served.mean_abs_logprob_error) == (0, 0.0)
    stage.step(0.3, job="job-1")
    publisher.once()
    publisher.once()
    assert stage.served.model == "run@1"
    assert (
        stage.served.checkpoint == stage.spool.checkpoints.manifest("run", 1).files["adapter_model.safetensors"].sha256
    )
    assert stage.served.tokens_checked == 7 + 19
    assert stage.listed == ["run@0", "run@1"]
    stage.publisher().once()  # another publisher finds everything done, and verifies for itself
    assert stage.vllm.loads() == ["run@0", "run@1"]
    events = stage.spool.events.read("job-1")
    assert [event.type for event in events] == ["served"]
    assert events[0].data["step"] == 1
    assert events[0].data["model"] == "run@1"
    assert events[0].data["seconds"].keys() == {"copy", "load", "verify", "since_checkpoint"}


def test_nothing_is_done_when_nothing_changed(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    stage.vllm.calls.clear()
    publisher.once()
    assert [path for path, _ in stage.vllm.calls] == ["/v1/models"]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ("other weights", "differ from the trainer's"),
        ("weights of the step before", "nearer to those of the checkpoint before it"),
        ("swapped file", "altered"),
        ("truncated file", "truncated"),
        ("missing file", "missing"),
        ("truncated manifest", "manifest.json"),
        ("not finite", "not all finite"),
        ("not an adapter", "500"),
        ("step 0 that is not the identity", "the base model's"),
    ],
)
def test_wrong_checkpoints_are_refused_and_the_older_step_stays(stage: Stage, damage: str, word: str) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    match damage:
        case "other weights":
            stage.step(0.5, weights=0.9)
        case "weights of the step before":
            stage.step(0.305, weights=0.3)  # a step within the tolerance
        case "not finite":
            stage.step(0.5, weights=float("nan"))
        case "not an adapter":
            commit(stage.spool, "run", _no_adapter, stage.probe(0.5, 0.3))
        case "step 0 that is not the identity":
            commit(stage.spool, "run", stage.adapter(0.3), None)
        case _:
            stage.step(0.5)
            weights = weights_of(stage.spool, "run", 2)
            if damage == "swapped file":
                shutil.copy(weights_of(stage.spool, "run", 1), weights)
            elif damage == "truncated file":
                weights.write_bytes(weights.read_bytes()[:-1])
            elif damage == "missing file":
                weights.unlink()
            else:
                manifest = weights.with_name("manifest.json")
                manifest.write_bytes(manifest.read_bytes()[:50])
    publisher.once()
    assert (stage.served.step, stage.served.refused_step) == (1, 2)
    assert word in str(stage.served.refused_reason)
    assert stage.listed == ["run@0", "run@1"]
    # It is not tried over and over, nor by a new publisher more than once.
    stage.vllm.calls.clear()
    publisher.once()
    assert stage.vllm.loads() == []
    # A good step after it is served, and nothing is said of the refused one any more.
    stage.rollback(1)
    stage.step(0.7)
    publisher.once()
    assert (stage.served.step, stage.served.refused_step) == (2, None)


def _no_adapter(directory: Path) -> None:
    (directory / "adapter_model.safetensors").write_bytes(b"nothing")
    (directory / "adapter_config.json").write_bytes(b"{}")


def test_small_step_with_its_own_weights_is_served(stage: Stage) -> None:
    stage.step(0.3)
    stage.step(0.305)
    stage.publisher().once()
    assert (stage.served.step, stage.served.refused_step) == (2, None)


def test_vllm_that_ignores_adapters_is_found_out(stage: Stage) -> None:
    stage.vllm.ignores_weights = True
    stage.step(0.01)  # so little that the tolerance alone would let the base model pass
    stage.publisher().once()
    assert (stage.served.step, stage.served.refused_step) == (0, 1)
    assert "nearer" in str(stage.served.refused_reason)


def test_refused_checkpoint_is_tried_again_when_it_changes(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    weights = weights_of(stage.spool, "run", 1)
    good = weights.read_bytes()
    weights.write_bytes(good[:-1])
    publisher.once()
    assert (stage.served.step, stage.served.refused_step) == (0, 1)
    weights.write_bytes(good)
    publisher.once()
    assert (stage.served.step, stage.served.refused_step) == (1, None)


def test_rollback_replaces_what_was_loaded_under_the_same_name(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    stage.step(0.6)
    publisher.once()
    assert stage.listed == ["run@1", "run@2"]
    stage.rollback(0)
    publisher.once()
    assert stage.listed == ["run@0"]
    assert stage.served.step == 0
    stage.step(-0.4)
    # The publisher may have been away between the rollback and the new step: vLLM still lists the old one.
    stage.vllm.adapters["run@1"] = (str(stage.directory / "store" / "run@1-of-before"), 0.3)
    stage.publisher().once()
    assert stage.vllm.adapters["run@1"][1] == pytest.approx(-0.4)
    assert stage.served.step == 1


@pytest.mark.parametrize(("version", "resets"), [("0.32.0", False), ("0.31.1", True), ("0.26.0", True)])
def test_prefix_cache_is_reset_where_it_could_hold_the_old_adapter(stage: Stage, version: str, resets: bool) -> None:
    stage.vllm.stop()
    stage.vllm.version = version
    publisher = stage.publisher()
    assert not publisher.once()
    stage.vllm.start()  # this publisher has seen the server start, so it knows that nothing was loaded before
    stage.step(0.3)
    publisher.once()
    assert not [path for path, _ in stage.vllm.calls if path == "/reset_prefix_cache"]
    stage.rollback(0)
    publisher.once()
    stage.step(0.5)
    publisher.once()
    assert bool([path for path, _ in stage.vllm.calls if path == "/reset_prefix_cache"]) == resets


def test_restarted_vllm_gets_everything_again(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.step(0.3)
    publisher.once()
    stage.vllm.stop()
    assert not publisher.once()
    stage.vllm.start()
    assert publisher.once()
    assert stage.listed == ["run@0", "run@1"]
    # Even when it came back between two looks, with another base model behind it.
    stage.vllm.adapters.clear()
    stage.vllm.ignores_weights = True
    publisher.once()
    assert (stage.served.refused_step, stage.listed) == (1, ["run@0"])


def test_refused_checkpoint_is_tried_again_when_vllm_was_at_fault(stage: Stage) -> None:
    publisher = stage.publisher()
    stage.vllm.ignores_weights = True
    stage.step(0.3)
    publisher.once()
    assert stage.served.refused_step == 1
    stage.vllm.stop()
    publisher.once()
    stage.vllm.ignores_weights = False
    stage.vllm.start()
    publisher.once()
    assert (stage.served.step, stage.served.refused_step) == (1, None)


def test_old_steps_go_when_nobody_uses_them(stage: Stage) -> None:
    publisher = stage.publisher(keep=2)
    for moved in (0.1, 0.2):
        stage.step(moved)
        publisher.once()
    assert stage.listed == ["run@1", "run@2"]
    stage.vllm.in_use = {"run@1"}
    stage.step(0.3)
    publisher.once()
    publisher.once()
    assert stage.listed == ["run@1", "run@2", "run@3"]
    stage.vllm.in_use = set()
    publisher.once()
    assert stage.listed == ["run@2", "run@3"]


def test_old_steps_stay_for_the_grace_unless_there_are_too_many(stage: Stage) -> None:
    for moved in (0.1, 0.2, 0.3):
        stage.step(moved)
        stage.publisher(keep=1, grace=60.0).once()
    assert stage.listed == ["run@1", "run@2", "run@3"]
    stage.publisher(keep=1, grace=60.0, max_listed=3).once()  # the base model counts
    assert stage.listed == ["run@2", "run@3"]


def test_adapters_of_others_are_left_alone(stage: Stage) -> None:
    for name in ("somebody-elses", "of-another-spool@3", "run@latest"):
        stage.vllm.adapters[name] = ("/somewhere", 0.0)
    stage.vllm.adapters["run@9"] = ("/somewhere", 0.0)  # ours, of a step that is no more
    stage.publisher(keep=1).once()
    assert stage.listed == ["of-another-spool@3", "run@0", "run@latest", "somebody-elses"]


def test_one_broken_run_does_not_stop_the_others(stage: Stage) -> None:
    make_run(stage.spool, "another", stage.model)
    shutil.rmtree(stage.spool.checkpoints.path("another", 0))
    stage.publisher().once()
    assert stage.served.step == 0


def test_wrong_admin_token_is_said(stage: Stage) -> None:
    admin = AdminClient(stage.vllm.url, api_key=fake_vllm.API_KEY, admin_token="wrong")
    publisher = Publisher(stage.spool, admin, AdapterStore(stage.directory / "store"))
    with pytest.raises(Unauthorized, match="TANDEM_ADMIN_TOKEN"):
        admin.load_lora("run@0", "/somewhere")
    publisher.once()
    assert stage.spool.served.get("run") is None


def test_copies_of_unloaded_adapters_go_when_no_request_is_left(stage: Stage, tmp_path: Path) -> None:
    publisher = stage.publisher(keep=1)
    stage.step(0.3)
    publisher.once()  # loads step 1 only
    stage.vllm.in_use = {"run@1"}
    stage.step(0.4)
    stage.rollback(0)  # both are gone from the volume, and step 1 from vLLM at once, with a request still on it

    def copies() -> list[str]:
        return sorted(path.name.split("-")[0] for path in (tmp_path / "store").iterdir())

    publisher.once()
    publisher.once()
    assert (stage.listed, copies()) == (["run@0"], ["run@0", "run@1"])
    stage.vllm.in_use = set()
    publisher.once()
    assert copies() == ["run@0"]


def test_publisher_process_killed_and_started_again(stage: Stage) -> None:
    environment = {
        **os.environ,
        "TANDEM_ROOT": str(stage.spool.root),
        "TANDEM_INFERENCE_URL": stage.vllm.url,
        "TANDEM_API_KEY": fake_vllm.API_KEY,
        "TANDEM_ADMIN_TOKEN": fake_vllm.ADMIN_TOKEN,
        "TMPDIR": str(stage.directory),
    }
    for step in (0, 1, 2):
        if step:
            stage.step(0.2 * step)
        process = subprocess.Popen([sys.executable, "-m", "tandem.inference.publisher"], env=environment)
        try:
            deadline = time.monotonic() + 60
            while (served := stage.spool.served.get("run")) is None or served.step != step:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGTERM if step == 2 else signal.SIGKILL)
        assert process.wait(10) == (0 if step == 2 else -signal.SIGKILL)
    assert stage.vllm.loads() == ["run@0", "run@1", "run@2"]


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches kill -9."""


def test_publisher_killed_at_any_call_leaves_nothing_undone(stage: Stage, tmp_path: Path) -> None:
    calls = 0
    for point in range(100):
        stage.rollback(0)
        stage.publisher().once()
        moved = float(np.random.default_rng(point).uniform(0.1, 0.9))
        stage.step(moved, job=f"job-{point}")
        left = point

        class Dying(AdminClient):
            def _request(self, *args: Any, **kwargs: Any) -> Any:
                nonlocal left
                # Before a call and after it: the server did it, and nobody heard of it.
                if left == 0:
                    raise Killed
                answer = super()._request(*args, **kwargs)
                if left == 1:
                    raise Killed
                left -= 2
                return answer

        try:
            stage.publisher(Dying).once()
            finished = True
        except Killed:
            finished = False
        stage.publisher().once()
        assert (stage.served.step, stage.served.refused_step) == (1, None), point
        assert stage.vllm.adapters["run@1"][1] == pytest.approx(moved), point
        assert [event.type for event in stage.spool.events.read(f"job-{point}")] == ["served"], point
        if finished:
            break
        calls += 1
    assert calls >= 10
    assert not list((tmp_path / "store").glob(".partial-*"))
