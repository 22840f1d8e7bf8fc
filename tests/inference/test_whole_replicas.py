"""Two real vLLMs on the CPU are in one group with the ranks that send whole weights. One vLLM and
its publisher die by kill -9 in each phase of the transfer. The other vLLM gets the step, no answer
is older than the announced step, and both vLLMs get the next step."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference import publish_and_stop, replica_and_stop
from inference.test_merged_replicas import Asker, ReplicaB, announced, publishing, ready, two_vllms
from inference.test_whole_vllm import BOUND, WholeTrainer
from inference.vllm_server import VllmServer
from tandem.spool.replicas import DEAD_SECONDS
from waiting import answers, until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    with two_vllms(tmp_path_factory.mktemp("two"), TANDEM_TRANSPORT="nccl") as made:
        yield made


@pytest.fixture
def trainer(
    vllms: dict[str, VllmServer], alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WholeTrainer]:
    """A trainer and the publisher of replica a. A thread calls the publisher again and again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for vllm in vllms.values():
        if not answers(f"{vllm.url}/health"):
            vllm.restart()
    trainer = WholeTrainer(vllms["a"], tmp_path, "nccl", 1, replica="a")
    with publishing(trainer), trainer.senders:
        yield trainer


def way(trainer: WholeTrainer, replica: str) -> str:
    return trainer.spool.replicas.serves(trainer.run, replica).steps[0].transport


@pytest.mark.sample(1, of="a replica that dies")
@pytest.mark.parametrize("phase", ["joined", "receiving", *publish_and_stop.PHASES])
def test_kill_9_of_a_replica_in_each_phase_of_a_transfer(
    vllms: dict[str, VllmServer], trainer: WholeTrainer, tmp_path: Path, phase: str
) -> None:
    """`joined`: vLLM b dies after it has got the order to receive weights and before the ranks
    send. `receiving`: vLLM b dies while the ranks send."""
    replica, go = ReplicaB(trainer, vllms["b"], tmp_path), tmp_path / "go"
    stops = "ordered" if phase in ("joined", "receiving") else phase
    publisher = replica.start(replica_and_stop.__file__, stops, str(go))
    asker = Asker(trainer, vllms)
    try:
        until("b is ready", go.with_suffix(".ready").exists)
        until("both are ready", lambda: ready(trainer) == {"a", "b"})
        asker.start()
        step = trainer.offer(1)
        go.touch()
        if phase in ("joined", "receiving"):
            assert publisher.wait(60) == -signal.SIGKILL
        if phase == "joined":
            os.killpg(vllms["b"].pid, signal.SIGKILL)
        trainer.senders.send(step)
        assert publisher.wait(60) == -signal.SIGKILL
        if phase != "joined":
            os.killpg(vllms["b"].pid, signal.SIGKILL)
        sent = trainer.senders.sent(BOUND)
        until("the other goes on", lambda: announced(trainer) == step, DEAD_SECONDS + 60)
        assert "a" in ready(trainer)
        assert way(trainer, "a") == ("nccl" if "a" in sent.get("servers", []) else "merge")
        if phase in ("swapped", "checked", "verified", "announced"):
            assert sent["servers"] == ["a", "b"], "it died after it had received"
        trainer.check_bits(trainer.adapters[step])
        vllms["b"].restart()
        publisher = replica.start("-m", "tandem.inference.publisher")
        until("b is back", lambda: ready(trainer) == {"a", "b"})
        step = trainer.offer(2)
        trainer.senders.send(step)
        assert trainer.senders.sent(BOUND)["servers"] == ["a", "b"]
        until("both serve the next step", lambda: announced(trainer) == step)
        assert [way(trainer, name) for name in "ab"] == ["nccl", "nccl"]
    finally:
        asker.ended.set()
        publisher.kill()
        publisher.wait(30)
        print(Path(tmp_path / "b.log").read_text())
    asker.join(150)
    assert asker.wrong == []
    assert asker.answers["a", f"{trainer.run}@{step - 1}"]
