"""The real vLLM on the CPU gets whole weights from running ranks or from files. The tests check
whether the weights came from ranks or from files, and check each bit of the weights."""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import tiny_model

from inference.stage import commit
from inference.test_merged_vllm import EVERYWHERE, MergedTrainer, complete
from inference.vllm_server import GPU, SENDERS, VllmServer
from inference.whole_weights_sender import Senders
from policies import write_random_adapter
from tandem.spool.schema import Served
from tiny import write_random_model
from waiting import answers, until

pytestmark = [pytest.mark.sample(1, of="vLLM and whole stacks"), pytest.mark.slow]

BOUND = 40.0
"""Seconds within which each process notices that another process is dead or stopped."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("whole")
    tiny_model.write_tokenizer(directory / "model")
    write_random_model(
        directory / "model",
        family="qwen2",
        vocab_size=320,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    with VllmServer(
        directory, directory / "model", TANDEM_WEIGHTS="merged", TANDEM_TRANSPORT="nccl"
    ) as server:
        yield server


class WholeTrainer(MergedTrainer):
    """A run whose steps are sent by ranks. `way`: `nccl` or `volume`."""

    def __init__(
        self, vllm: VllmServer, directory: Path, way: str, tp: int, replica: str | None = None
    ) -> None:
        super().__init__(vllm, directory, transport=way, replica=replica)
        self.senders = Senders(
            directory / "ranks", self.spool, self.run, way, 1 if GPU else tp, **SENDERS
        )

    def offer(self, seed: int) -> int:
        """Lets the ranks offer the weights of a step and commits the step. Returns the step's
        number."""
        adapter = write_random_adapter(
            self.directory / f"whole-{seed}", self.model, EVERYWHERE, seed=seed
        )
        job = self.senders.offer(adapter)
        self.adapters.append(adapter)
        return commit(self.spool, self.run, adapter, self.probe(adapter, lora=EVERYWHERE), job).step

    def serve(self, seed: int) -> Served:
        return self.serve_sent(self.send(seed))

    def send(self, seed: int) -> int:
        step = self.offer(seed)
        self.senders.send(step)
        return step

    def serve_sent(self, step: int) -> Served:
        served = self.publish(self.run)
        assert served.step == step
        self.check_bits(self.adapters[-1])
        return served


Make = Callable[..., WholeTrainer]


@pytest.fixture
def make(
    vllm: VllmServer, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not answers(f"{vllm.url}/health"):
        vllm.restart()
    made: list[WholeTrainer] = []

    def start(way: str, tp: int = 1) -> WholeTrainer:
        trainer = WholeTrainer(vllm, tmp_path, way, tp)
        made.append(trainer)
        trainer.senders.__enter__()
        return trainer

    yield start
    for trainer in made:
        trainer.senders.__exit__()


def sample(vllm: VllmServer, run: str, enough: Event) -> list[str]:
    """For each of several long answers, the steps whose weights computed the answer. One answer is
    not enough, because on a busy machine a swap may take longer than one answer."""
    found = []
    while not enough.is_set():
        found.append(complete(vllm, run, max_tokens=3500).headers["x-tandem-weights"])
    return found


@pytest.mark.sample(1, of="ways of whole weights")
def test_each_step_comes_from_the_ranks(vllm: VllmServer, make: Make) -> None:
    trainer = make("nccl", tp=2)
    first = trainer.publish(trainer.run)
    assert (first.step, first.transport) == (0, "merge"), "nobody trained step 0"
    with ThreadPoolExecutor(1) as pool:
        for step in (1, 2):
            assert trainer.send(seed=step) == step
            served_yet = Event()
            running = pool.submit(sample, vllm, trainer.run, served_yet)
            try:
                until("it runs", lambda: trainer.client.merged()["in_flight"] == 1)
                served = trainer.serve_sent(step)
            finally:
                served_yet.set()
            assert served.transport == "nccl"
            # The error is larger on a GPU, because vLLM's attention uses TF32 there.
            assert served.mean_abs_logprob_error < (0.02 if GPU else 1e-4)
            assert trainer.senders.sent()["transport"] == "nccl"
            assert f"{trainer.run}@{step - 1},{trainer.run}@{step}" in running.result()


@pytest.mark.sample(1, of="ways of whole weights")
def test_files_serve_each_step_and_a_server_that_starts_again(vllm: VllmServer, make: Make) -> None:
    trainer = make("volume", tp=2)
    for seed in (1, 2, 3):
        served = trainer.serve(seed)
        assert served.transport == "volume"
    assert "error" not in trainer.senders.sent()
    steps = [
        path.name[:8]
        for path in sorted((trainer.spool.root / "runs" / trainer.run / "merged").iterdir())
    ]
    assert steps == ["00000002", "00000003"], "the step that was served and the newest"
    vllm.restart()
    assert complete(vllm, trainer.run).status_code == 503
    again = trainer.publish(trainer.run)
    assert (again.step, again.transport) == (3, "volume")
    trainer.check_bits(trainer.adapters[3])
    # If the files are damaged, vLLM serves the step from the adapter.
    shard = next(
        (trainer.spool.root / "runs" / trainer.run).glob("merged/00000003-*/*.safetensors")
    )
    with shard.open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"damaged!")
    vllm.restart()
    again = trainer.publish(trainer.run)
    trainer.publish(trainer.run)
    assert (again.step, again.transport) == (3, "merge")
    trainer.check_bits(trainer.adapters[3])


def test_files_of_a_step_that_was_discarded_are_not_served(make: Make) -> None:
    trainer = make("volume")
    trainer.serve(1)
    trainer.senders.sent()
    trainer.senders.end_job()
    trainer.spool.checkpoints.rollback(trainer.run, 0)
    assert trainer.publish(trainer.run).step == 0
    adapter = trainer.step(5)
    served = trainer.publish(trainer.run)
    assert (served.step, served.transport) == (1, "merge")
    trainer.check_bits(adapter)


def test_a_refused_step_is_taken_back(vllm: VllmServer, make: Make) -> None:
    trainer = make("nccl")
    trainer.serve(1)
    adapter = write_random_adapter(trainer.directory / "refused", trainer.model, EVERYWHERE, seed=7)
    job = trainer.senders.offer(adapter)
    commit(
        trainer.spool,
        trainer.run,
        adapter,
        trainer.probe(trainer.adapters[0], lora=EVERYWHERE),
        job,
    )
    trainer.senders.send(2)
    served = trainer.publish(trainer.run)
    assert (served.step, served.refused_step) == (1, 2)
    trainer.check_bits(trainer.adapters[1])
    assert complete(vllm, f"{trainer.run}@1").status_code == 200
    trainer.adapters.append(adapter)
    assert trainer.serve(3).transport == "nccl"


@pytest.mark.sample(1)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_die_or_stop_before_they_send(
    vllm: VllmServer, make: Make, sig: signal.Signals
) -> None:
    trainer = make("nccl")
    trainer.serve(1)
    step = trainer.offer(2)
    trainer.senders.signal(sig)
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(trainer.publish, trainer.run)
        while not publishing.done():
            assert complete(vllm, trainer.run, max_tokens=1).status_code == 200, (
                "the old weights, or the new ones"
            )
        served = publishing.result()
    assert time.monotonic() - begin < BOUND + 5
    assert (served.step, served.transport) == (step, "merge")
    trainer.check_bits(trainer.adapters[2])


@pytest.mark.sample(1, of="a vLLM that starts again")
def test_a_server_that_dies_while_it_receives(vllm: VllmServer, make: Make) -> None:
    """The ranks report an error, and the next server merges the step from the step's checkpoint."""
    trainer = make("nccl", tp=2)
    trainer.serve(1)
    step = trainer.offer(2)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(trainer._publisher.once)
        time.sleep(1.0)  # After one second vLLM's workers wait in the store for the ranks.
        vllm._kill()
        begin = time.monotonic()
        trainer.senders.send(step)
        assert "error" in trainer.senders.sent(BOUND)
        assert time.monotonic() - begin < BOUND
        assert publishing.result(BOUND) is False
    trainer.senders.end_job()
    vllm.restart()
    assert complete(vllm, trainer.run).status_code == 503
    served = trainer.publish(trainer.run)
    assert (served.step, served.transport) == (step, "merge")
    trainer.check_bits(trainer.adapters[2])
    assert trainer.serve(3).transport == "nccl"
