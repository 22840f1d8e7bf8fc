"""Whole weights from the trainer's ranks to vLLM's workers, over Gloo: what arrives, and what happens when somebody
dies or stands still."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.stage import make_run
from inference.test_landing import Workers, check, land
from inference.test_merged_weights import Model
from policies import LORA
from tandem.inference.server.worker import receiver
from tandem.inference.server.worker.landing import LandingWeights, Source
from tandem.spool import Spool
from tandem.spool.schema import LORA_TARGETS
from tiny import MERGED_SIZES, write_random_model
from whole_weights_sender import Senders

BOUND = 12.0
"""Seconds in which whoever waits notices that nobody sends any more."""
BUFFER_BYTES = 5000
"""Tensors are cut, and there are more buffers than are on their way at once."""
CASES = [("qwen3", 1, 1), ("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3_moe", 1, 1), ("qwen2", 1, 2)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def senders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Senders]:
    """Trainers of one rank, two tensor-parallel ones, and two stages; tied embeddings with biases, and experts."""
    family, tp, pp = request.param
    directory = tmp_path_factory.mktemp("senders")
    model = write_random_model(directory / "model", family=family, **MERGED_SIZES[family])
    spool = Spool.create(directory / "spool")
    run = make_run(spool, "r", model, LORA).name
    with Senders(directory / "ranks", spool, run, "nccl", tp, pp, BUFFER_BYTES=str(BUFFER_BYTES)) as ranks:
        yield ranks


@pytest.fixture
def model(senders: Senders) -> Model:
    return Model(Path(senders.spool.runs.get(senders.run).base_model))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "BUFFER_BYTES", BUFFER_BYTES)


def workers_of(model: Model, count: int) -> Workers:
    made = [model.worker(count, rank) for rank in range(count)]
    directory = str(model.directory)
    return [(w, LandingWeights(w.model, directory, lambda _: "device", (i, count))) for i, w in enumerate(made)]


def offered(senders: Senders, adapter: Path) -> Source:
    """Offer the adapter's weights; what vLLM's workers are told of it."""
    job = senders.offer(adapter)
    [event] = [event for event in senders.spool.events.read(job) if event.type == "offered"]
    return {**event.data, "way": event.data["transport"]}


@pytest.mark.sample(3)
@pytest.mark.parametrize("count", [1, 2])
def test_twenty_publications_leave_no_trace(senders: Senders, model: Model, tmp_path: Path, count: int) -> None:
    adapters = [model.adapter(tmp_path, seed) for seed in range(3)]
    workers = workers_of(model, count)
    for number in range(20):
        adapter = adapters[number % 3]
        source = offered(senders, adapter)
        senders.send()
        land(workers, f"{adapter}-{number}", source)
        told = senders.sent()
        assert told["transport"] == "nccl"
        touched = [v for n, v in model.tensors.items() if n.split(".")[-2] in LORA_TARGETS and n.endswith("weight")]
        assert told["bytes"] == sum(value.nbytes for value in touched), "each element is sent once"
        for _, weights in workers:
            assert weights.staged(f"{adapter}-{number}") == "nccl"
            weights.swap(f"{adapter}-{number}")
        if number in (0, 1, 19):
            check(model, workers, adapter)


def stage(workers: Workers, version: str, source: Source) -> None:
    for _, weights in workers:
        weights.stage(version, 2.5, source)


def failed(workers: Workers, version: str) -> float:
    """Wait until a worker says that nothing will come; after how many seconds."""
    begin = time.monotonic()
    while time.monotonic() < begin + 60:
        try:
            for _, weights in workers:
                weights.staged(version)
        except RuntimeError:
            return time.monotonic() - begin
        time.sleep(0.01)
    raise AssertionError("it waits for ever")


@pytest.fixture
def alone_senders(tmp_path: Path) -> Iterator[Senders]:
    """Two ranks that a test may kill."""
    model = write_random_model(tmp_path / "model", family="qwen3")
    spool = Spool.create(tmp_path / "spool")
    run = make_run(spool, "r", model, LORA).name
    with Senders(tmp_path / "ranks", spool, run, "nccl", 2, BUFFER_BYTES=str(BUFFER_BYTES)) as ranks:
        yield ranks


def arriving(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> None:
    """Do something when so many buffers have arrived at a worker."""
    arrived, count = receiver._arrived, 0

    def arrive(*args: Any) -> Iterator[Any]:
        nonlocal count
        count += 1
        if count == number:
            action()
        yield from arrived(*args)

    monkeypatch.setattr(receiver, "_arrived", arrive)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["before", "while"])
def test_ranks_that_die_or_stop(
    alone_senders: Senders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, sig: signal.Signals
) -> None:
    """The live weights stay, and the same weights come from the adapter."""
    senders = alone_senders
    model = Model(tmp_path / "model")
    adapter = model.adapter(tmp_path, 1)
    workers = workers_of(model, 2)
    source = offered(senders, adapter)
    begin = [time.monotonic()]

    def hit() -> None:
        senders.signal(sig)
        begin[0] = time.monotonic()

    if moment == "before":
        hit()
        stage(workers, str(adapter), source)
    else:
        arriving(monkeypatch, 8, hit)
        stage(workers, str(adapter), source)
        senders.send()
    failed(workers, str(adapter))
    assert time.monotonic() - begin[0] < BOUND
    check(model, workers, None)
    land(workers, str(adapter))
    for _, weights in workers:
        weights.swap(str(adapter))
    check(model, workers, adapter)


def test_a_rank_that_stops_alone(alone_senders: Senders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one and the workers notice; the next publication succeeds."""
    senders = alone_senders
    model = Model(tmp_path / "model")
    first, second = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = workers_of(model, 1)
    arriving(monkeypatch, 6, lambda: os.kill(senders.ranks[1].pid, signal.SIGSTOP))
    stage(workers, str(first), offered(senders, first))
    senders.send()
    assert failed(workers, str(first)) < BOUND
    os.kill(senders.ranks[1].pid, signal.SIGCONT)
    assert "error" in senders.sent(2 * BOUND)
    source = offered(senders, second)
    senders.send()
    land(workers, str(second), source)
    for _, weights in workers:
        weights.swap(str(second))
    check(model, workers, second)
    assert "error" not in senders.sent()


def test_a_worker_whose_connection_is_cut(
    alone_senders: Senders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up in the middle: the ranks notice, and the job goes on."""
    senders = alone_senders
    model = Model(tmp_path / "model")
    adapter = model.adapter(tmp_path, 1)
    workers = workers_of(model, 2)

    def cut() -> None:
        raise ConnectionError("cut")

    arriving(monkeypatch, 7, cut)
    stage(workers, str(adapter), offered(senders, adapter))
    senders.send()
    begin = time.monotonic()
    assert failed(workers, str(adapter)) < BOUND
    assert "error" in senders.sent(2 * BOUND)
    assert time.monotonic() - begin < 2 * BOUND
    check(model, workers, None)


def test_one_worker_does_not_get_all(alone_senders: Senders, tmp_path: Path) -> None:
    """The order to take another way comes while the other worker still waits."""
    model = Model(tmp_path / "model")
    adapter = model.adapter(tmp_path, 1)
    workers = workers_of(model, 2)
    source = offered(alone_senders, adapter)
    stage(workers[:1], str(adapter), source)
    land(workers, str(adapter))
    for _, weights in workers:
        weights.swap(str(adapter))
    check(model, workers, adapter)


def test_nobody_comes_for_the_weights(alone_senders: Senders, tmp_path: Path) -> None:
    adapter = Model(tmp_path / "model").adapter(tmp_path, 1)
    alone_senders.offer(adapter)
    alone_senders.send()
    begin = time.monotonic()
    assert "error" in alone_senders.sent(BOUND)
    assert time.monotonic() - begin < BOUND


def test_ranks_with_another_layout_are_refused(
    alone_senders: Senders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BUFFER_BYTES", 2 * BUFFER_BYTES)
    model = Model(tmp_path / "model")
    adapter = model.adapter(tmp_path, 1)
    workers = workers_of(model, 1)
    stage(workers, str(adapter), offered(alone_senders, adapter))
    alone_senders.send()
    failed(workers, str(adapter))
    with pytest.raises(RuntimeError, match="this vLLM expects"):
        workers[0][1].staged(str(adapter))
    check(model, workers, None)


def test_another_version_takes_the_landing_place(alone_senders: Senders, tmp_path: Path) -> None:
    """While a worker waits for ranks that never send, vLLM is told to serve other weights."""
    model = Model(tmp_path / "model")
    first, second = (model.adapter(tmp_path, seed) for seed in (1, 2))
    workers = workers_of(model, 2)
    stage(workers, str(first), offered(alone_senders, first))
    time.sleep(0.5)
    land(workers, str(second))
    alone_senders.send()
    assert "error" in alone_senders.sent(2 * BOUND)
    for _, weights in workers:
        weights.swap(str(second))
    check(model, workers, second)
