"""Two real vLLMs on the CPU serve merged weights. In each phase of a publication, kill -9 ends one
vLLM and its publisher. No answer is older than the announced step, and the killed replica comes
back."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import tiny_model

from inference import publish_and_stop, replica_and_stop
from inference.test_merged_vllm import EVERYWHERE, MergedTrainer, complete
from inference.vllm_server import VllmServer
from tandem.inference.spot_check import SpotCheck
from tandem.spool.replicas import DEAD_SECONDS
from tiny import write_random_model
from waiting import until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@contextmanager
def two_vllms(directory: Path, **variables: str) -> Iterator[dict[str, VllmServer]]:
    """Servers of the replicas a and b, with merged weights of one model."""
    tiny_model.write_tokenizer(directory / "model")
    sizes = {"vocab_size": 320, "hidden_size": 64, "head_dim": 32, "max_position_embeddings": 4096}
    write_random_model(directory / "model", family="qwen3", **sizes)
    made = {}
    for name in "ab":
        (directory / name).mkdir()
        made[name] = VllmServer(
            directory / name,
            directory / "model",
            TANDEM_WEIGHTS="merged",
            TANDEM_REPLICA=name,
            **variables,
        )
    with made["a"], made["b"]:
        yield made


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    with two_vllms(tmp_path_factory.mktemp("two")) as made:
        yield made


class Asker(threading.Thread):
    """Sends requests to both servers without a break. Records wrong answers. An answer is wrong if
    its weights are older than the announced step."""

    def __init__(self, trainer: MergedTrainer, vllms: dict[str, VllmServer]) -> None:
        super().__init__(daemon=True)
        self._trainer, self._vllms = trainer, vllms
        self.wrong: list[str] = []
        # Number of answers by server and weights.
        self.answers: Counter[tuple[str, str]] = Counter()
        self.ended = threading.Event()

    def run(self) -> None:
        run = self._trainer.run
        while not self.ended.wait(0.02):
            for name, vllm in self._vllms.items():
                announced = self._trainer.spool.served.get(run)
                with suppress(httpx.HTTPError):
                    answer = complete(vllm, run, max_tokens=1)
                    weights = answer.headers.get("x-tandem-weights", "")
                    if answer.status_code == 200:
                        self.answers[name, weights] += 1
                        oldest = weights.split(",")[0].rpartition("@")[2]
                        if announced is not None and int(oldest) < announced.step:
                            self.wrong.append(f"{name}: {weights}, announced {announced.model}")
                    elif answer.status_code != 503:
                        self.wrong.append(f"{name}: {answer.status_code} {answer.text}")


class ReplicaB:
    """The publisher of replica b, in a process of its own."""

    def __init__(self, trainer: MergedTrainer, vllm: VllmServer, directory: Path) -> None:
        self._log = directory / "b.log"
        self._environment = trainer.publisher_environment(vllm, directory) | {
            "TANDEM_REPLICA": "b",
            "PYTHONPATH": replica_and_stop.TESTS,
        }

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command], env=self._environment, stdout=log, stderr=log
            )


@contextmanager
def publishing(trainer: MergedTrainer) -> Iterator[None]:
    """A thread calls the trainer's publisher again and again until the `with` block ends."""
    ended = threading.Event()

    def publish() -> None:
        while not ended.wait(0.2):
            trainer._publisher.once()

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join(60)
    trainer._publisher._records.stop()  # type: ignore[attr-defined]


@pytest.fixture
def trainer(
    vllms: dict[str, VllmServer], alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MergedTrainer]:
    """A trainer whose publisher belongs to replica a. The publisher runs until the test ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = MergedTrainer(vllms["a"], tmp_path, replica="a")
    with publishing(trainer):
        yield trainer


def announced(trainer: MergedTrainer) -> int | None:
    record = trainer.spool.served.get(trainer.run)
    return None if record is None else record.step


def ready(trainer: MergedTrainer) -> set[str]:
    return {name for name, record in trainer.spool.replicas.living().items() if record.ready}


@pytest.mark.sample(1, of="a replica that dies")
@pytest.mark.parametrize("phase", list(publish_and_stop.PHASES))
def test_kill_9_of_a_replica_in_each_phase_of_a_merge(
    vllms: dict[str, VllmServer], trainer: MergedTrainer, tmp_path: Path, phase: str
) -> None:
    replica, go = ReplicaB(trainer, vllms["b"], tmp_path), tmp_path / "go"
    publisher = replica.start(replica_and_stop.__file__, phase, str(go))
    asker = Asker(trainer, vllms)
    try:
        until("b is ready", go.with_suffix(".ready").exists)
        until("both are ready", lambda: ready(trainer) == {"a", "b"})
        assert announced(trainer) == 0
        asker.start()
        trainer.step(1)
        until("a has it", lambda: trainer.spool.replicas.serves(trainer.run, "a").steps[0].step)
        assert announced(trainer) == 0, "b has not"
        go.touch()
        assert publisher.wait(60) == -signal.SIGKILL
        os.killpg(vllms["b"].pid, signal.SIGKILL)
        assert announced(trainer) == 0
        until("the others go on", lambda: announced(trainer) == 1, DEAD_SECONDS + 30)
        assert "a" in ready(trainer)
        asker_saw = asker.answers["b", f"{trainer.run}@1"]
        assert asker_saw == 0 or phase == "announced", "nobody had verified it"
        vllms["b"].restart()
        publisher = replica.start("-m", "tandem.inference.publisher")
        until("b is back", lambda: ready(trainer) == {"a", "b"})
        until("b answers", lambda: asker.answers["b", f"{trainer.run}@1"] > asker_saw)
        check = SpotCheck(str(trainer.model), "float32")
        expected = check.adapter_rows(trainer.adapters[1], EVERYWHERE)
        for vllm in vllms.values():
            assert expected.wrong(vllm.client().merged_rows(expected.rows)) == ""
    finally:
        asker.ended.set()
        publisher.kill()
        publisher.wait(30)
        print(Path(tmp_path / "b.log").read_text())
    asker.join(150)
    assert asker.wrong == []
    assert asker.answers["a", f"{trainer.run}@0"]
    assert asker.answers["a", f"{trainer.run}@1"]
