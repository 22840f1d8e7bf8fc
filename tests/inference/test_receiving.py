"""Whole weights from the trainer's ranks to vLLM's workers, over Gloo: what arrives, and what
happens when somebody dies or stands still."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.conftest import write_model
from inference.stage import make_run
from inference.worker_models import SCALE, Model, Workers
from policies import LORA
from tandem.inference.server.worker import landing
from tandem.inference.server.worker.landing import Source
from tandem.spool import Spool
from tandem.spool.schema import LORA_TARGETS
from whole_weights_sender import Senders

BOUND = 40.0
"""Seconds in which whoever waits notices that nobody sends any more."""
BUFFER_BYTES = 5000
"""Tensors are cut, and there are more buffers than are on their way at once."""
CASES = [("qwen3", 1, 1), ("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3_moe", 1, 1), ("qwen2", 1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def senders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Senders]:
    """Trainers of one rank, two tensor-parallel ones, and two stages; tied embeddings with biases,
    and experts."""
    family, tp, pp = request.param
    directory = tmp_path_factory.mktemp("senders")
    with start_ranks(directory, write_model(family, tmp_path_factory), tp, pp) as ranks:
        yield ranks


def start_ranks(directory: Path, model: Path, tp: int = 2, pp: int = 1) -> Senders:
    spool = Spool.create(directory / "spool")
    run = make_run(spool, "r", model, LORA).name
    return Senders(directory / "ranks", spool, run, "nccl", tp, pp, BUFFER_BYTES=str(BUFFER_BYTES))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "BUFFER_BYTES", BUFFER_BYTES)


def offered(senders: Senders, adapter: Path) -> Source:
    """Offer the adapter's weights; what vLLM's workers are told of it."""
    job = senders.offer(adapter)
    [event] = [event for event in senders.spool.events.read(job) if event.type == "offered"]
    meeting = str(senders.spool.root / event.data["meeting"])
    return {**event.data, "way": event.data["transport"], "meeting": meeting}


@pytest.mark.sample(3)
@pytest.mark.parametrize("count", [1, 2])
def test_twenty_publications_leave_no_trace(senders: Senders, tmp_path: Path, count: int) -> None:
    model = Model(Path(senders.spool.runs.get(senders.run).base_model))
    adapters = [model.adapter(tmp_path, seed) for seed in range(3)]
    workers = Workers(model, count, whole=True)
    touched = [
        v
        for n, v in model.tensors.items()
        if n.split(".")[-2] in LORA_TARGETS and n.endswith("weight")
    ]
    for number in range(20):
        adapter = adapters[number % 3]
        source = offered(senders, adapter)
        senders.send()
        assert workers.serve(f"{adapter}-{number}", source) == "nccl"
        told = senders.sent()
        assert told["transport"] == "nccl"
        assert told["bytes"] == sum(value.nbytes for value in touched), "each element is sent once"
        if number in (0, 1, 19):
            workers.check(adapter)


def failed(workers: Workers, version: Path) -> float:
    """Wait until a worker says that nothing will come; after how many seconds."""
    begin = time.monotonic()
    while time.monotonic() < begin + 60:
        try:
            for weights in workers.weights:
                weights.staged(str(version))
        except RuntimeError:
            return time.monotonic() - begin
        time.sleep(0.01)
    raise AssertionError("it waits for ever")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, dense: Model) -> Iterator[Senders]:
    """Two ranks, which no test may kill."""
    with start_ranks(tmp_path_factory.mktemp("ranks"), dense.directory) as senders:
        yield senders


@pytest.fixture
def adapters(dense: Model, tmp_path: Path) -> list[Path]:
    return [dense.adapter(tmp_path, seed) for seed in (1, 2)]


def arriving(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> None:
    """Do something when so many buffers have arrived at a worker."""
    arrived, count = landing._arrived, 0

    def arrive(*args: Any) -> Iterator[Any]:
        nonlocal count
        count += 1
        if count == number:
            action()
        yield from arrived(*args)

    monkeypatch.setattr(landing, "_arrived", arrive)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["before", "while"])
def test_ranks_that_die_or_stop(
    dense: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, sig: signal.Signals
) -> None:
    """The live weights stay, and the same weights come from the adapter."""
    adapter = dense.adapter(tmp_path, 1)
    workers = Workers(dense, 2, whole=True)
    begin = [0.0]

    def hit() -> None:
        mortal.signal(sig)
        begin[0] = time.monotonic()

    with start_ranks(tmp_path, dense.directory) as mortal:
        source = offered(mortal, adapter)
        if moment == "before":
            hit()
            workers.order(adapter, source)
        else:
            arriving(monkeypatch, 8, hit)
            workers.order(adapter, source)
            mortal.send()
        failed(workers, adapter)
        assert time.monotonic() - begin[0] < BOUND
        workers.check(None)
        workers.serve(adapter)
        workers.check(adapter)


def test_a_rank_that_stops_alone(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one and the workers notice; the next publication succeeds."""
    first, second = adapters
    workers = Workers(dense, whole=True)
    arriving(monkeypatch, 6, lambda: os.kill(ranks.ranks[1].pid, signal.SIGSTOP))
    workers.order(first, offered(ranks, first))
    ranks.send()
    assert failed(workers, first) < BOUND
    os.kill(ranks.ranks[1].pid, signal.SIGCONT)
    assert "error" in ranks.sent(2 * BOUND)
    source = offered(ranks, second)
    ranks.send()
    workers.serve(second, source)
    workers.check(second)
    assert "error" not in ranks.sent()


def test_a_worker_whose_connection_is_cut(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up in the middle: the ranks notice, and the job goes on."""
    workers = Workers(dense, 2, whole=True)

    def cut() -> None:
        raise ConnectionError("cut")

    arriving(monkeypatch, 7, cut)
    workers.order(adapters[0], offered(ranks, adapters[0]))
    ranks.send()
    begin = time.monotonic()
    assert failed(workers, adapters[0]) < BOUND
    assert "error" in ranks.sent(2 * BOUND)
    assert time.monotonic() - begin < 2 * BOUND
    workers.check(None)


def test_one_worker_does_not_get_all(ranks: Senders, dense: Model, adapters: list[Path]) -> None:
    """The order to take another way comes while the other worker still waits."""
    workers = Workers(dense, 2, whole=True)
    workers.weights[0].stage(str(adapters[0]), SCALE, offered(ranks, adapters[0]))
    workers.serve(adapters[0])
    workers.check(adapters[0])
    ranks.send()
    assert "error" in ranks.sent(2 * BOUND)


def test_nobody_comes_for_the_weights(ranks: Senders, adapters: list[Path]) -> None:
    ranks.offer(adapters[0])
    ranks.send()
    begin = time.monotonic()
    assert "error" in ranks.sent(BOUND)
    assert time.monotonic() - begin < BOUND


def test_ranks_with_another_layout_are_refused(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landing, "BUFFER_BYTES", 2 * BUFFER_BYTES)
    workers = Workers(dense, whole=True)
    source = offered(ranks, adapters[0])
    ranks.send()
    with pytest.raises(RuntimeError, match="this vLLM expects"):
        workers.stage(adapters[0], source)
    workers.check(None)
    assert "error" in ranks.sent(2 * BOUND)


def test_another_version_takes_the_landing_place(
    ranks: Senders, dense: Model, adapters: list[Path]
) -> None:
    """While a worker waits for ranks that never send, vLLM is told to serve other weights."""
    first, second = adapters
    workers = Workers(dense, 2, whole=True)
    workers.order(first, offered(ranks, first))
    time.sleep(0.5)
    workers.stage(second)
    ranks.send()
    assert "error" in ranks.sent(2 * BOUND)
    workers.serve(second)
    workers.check(second)
