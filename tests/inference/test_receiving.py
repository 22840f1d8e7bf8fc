"""The trainer's ranks send whole weights to vLLM's workers over Gloo. The tests check the tensors
that arrive, and the outcome when a process dies or hangs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.conftest import write_model
from inference.stage import make_run
from inference.whole_weights_sender import Senders
from inference.worker_models import SCALE, Model, Workers
from policies import LORA
from tandem.inference.server.worker import landing
from tandem.inference.server.worker.landing import Source
from tandem.model.transfer import members
from tandem.spool import Spool
from tandem.spool.schema import LORA_TARGETS, ONLY, Replica, VllmPlace
from tandem.system.network import network_name

BOUND = 40.0
"""Seconds within which a process that waits for buffers notices that no process sends any more."""
BUFFER_BYTES = 5000
"""Buffers of this size are smaller than some tensors, so a tensor is cut. A transfer needs more
buffers than may be under way at the same time."""
CASES = [("qwen3", 1, 1), ("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3_moe", 1, 1), ("qwen2", 1, 2)]
of_transfers = pytest.mark.sample(2, of="transfers that fail")


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def senders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Senders]:
    """A trainer of one rank, of two tensor-parallel ranks, or of two stages. The trainer's model is
    a plain dense model, a dense model with biases and tied embeddings, or a mixture of experts."""
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


def offered(senders: Senders, adapter: Path, server: str = ONLY) -> Source:
    """Lets the ranks offer the merged weights of the adapter. Returns the order that the workers of
    `server` get."""
    job = senders.offer(adapter)
    [event] = [event for event in senders.spool.events.read(job) if event.type == "offered"]
    meeting = str(senders.spool.root / event.data["meeting"])
    return {**event.data, "way": event.data["transport"], "meeting": meeting, "server": server}


@pytest.mark.slow
@pytest.mark.sample(2)
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
    """Wait until a worker reports that no weights will come. Returns the seconds until the
    report."""
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
    """Two ranks that all tests share. No test may kill these ranks."""
    with start_ranks(tmp_path_factory.mktemp("ranks"), dense.directory) as senders:
        yield senders


@pytest.fixture
def adapters(dense: Model, tmp_path: Path) -> list[Path]:
    return [dense.adapter(tmp_path, seed) for seed in (1, 2)]


def arriving(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> None:
    """Calls `action` when a worker takes the buffer with the number `number`. The buffers of all
    workers are counted together."""
    arrived, count = landing._arrived, 0

    def arrive(*args: Any) -> Iterator[Any]:
        nonlocal count
        count += 1
        if count == number:
            action()
        yield from arrived(*args)

    monkeypatch.setattr(landing, "_arrived", arrive)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["before", "while"])
def test_ranks_that_die_or_stop(
    dense: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, sig: signal.Signals
) -> None:
    """When ranks die or stop, the live weights do not change. The workers merge the new weights
    from the adapter if the ranks do not send them."""
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


@pytest.mark.slow
@of_transfers
def test_a_rank_that_stops_alone(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ranks gets SIGSTOP. The workers give up, and the ranks report an error. After
    SIGCONT the next publication succeeds."""
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


@pytest.mark.slow
@of_transfers
def test_a_worker_whose_connection_is_cut(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker gives up in the middle of a transfer. The ranks report an error, and the job goes
    on."""
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


@pytest.mark.slow
@of_transfers
def test_one_worker_does_not_get_all(ranks: Senders, dense: Model, adapters: list[Path]) -> None:
    """One of two workers gets the order to take the weights from the ranks. While this worker waits
    for the other worker, both workers get the order to merge the adapter instead."""
    workers = Workers(dense, 2, whole=True)
    workers.weights[0].stage(str(adapters[0]), SCALE, offered(ranks, adapters[0]))
    workers.serve(adapters[0])
    workers.check(adapters[0])
    ranks.send()
    assert "error" in ranks.sent(2 * BOUND)


@pytest.mark.slow
@of_transfers
def test_nobody_comes_for_the_weights(ranks: Senders, adapters: list[Path]) -> None:
    ranks.offer(adapters[0])
    ranks.send()
    begin = time.monotonic()
    assert "error" in ranks.sent(BOUND)
    assert time.monotonic() - begin < BOUND


@pytest.mark.slow
@of_transfers
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
    """While the workers wait for ranks that do not send yet, vLLM gets the order to serve other
    weights."""
    first, second = adapters
    workers = Workers(dense, 2, whole=True)
    workers.order(first, offered(ranks, first))
    time.sleep(0.5)
    workers.stage(second)
    ranks.send()
    assert "error" in ranks.sent(2 * BOUND)
    workers.serve(second)
    workers.check(second)


@pytest.fixture
def servers(ranks: Senders) -> Iterator[None]:
    """Two inference servers are ready; a third is alive but not ready."""
    record = Replica(
        replica="0",
        url="",
        host="",
        place=VllmPlace(address="127.0.0.1", network=network_name()),
        pid=1,
        started=0,
        beat=time.time() + 20,
    )
    (ranks.spool.root / "replicas").mkdir(exist_ok=True)
    for name in "012":
        change = {"replica": name, "ready": name != "2"}
        ranks.spool.replicas.put(record.model_copy(update=change))
    yield
    for name in "012":
        (ranks.spool.root / "replicas" / f"{name}.json").unlink()


@pytest.mark.usefixtures("servers")
def test_two_servers_get_the_weights_at_once(
    ranks: Senders, dense: Model, adapters: list[Path]
) -> None:
    """The ranks send to both servers in one group, although the servers have different tensor
    parallelism. The ranks do not wait for the third server, which isn't ready."""
    both = [Workers(dense, 2, whole=True), Workers(dense, 1, whole=True)]
    for adapter in adapters:
        source = offered(ranks, adapter, "0")
        assert source["servers"] == ["0", "1"]
        both[1].order(adapter, {**source, "server": "1"})
        ranks.send()
        assert both[0].serve(adapter, source) == "nccl"
        assert both[1].serve(adapter, {**source, "server": "1"}) == "nccl"
        assert ranks.sent()["servers"] == ["0", "1"]
        for workers in both:
            workers.check(adapter)


@pytest.mark.slow
@of_transfers
@pytest.mark.usefixtures("servers")
def test_ranks_go_on_without_a_server_that_does_not_come(
    ranks: Senders, dense: Model, adapters: list[Path]
) -> None:
    """The ranks wait for servers for a limited time. A server that joins later gets an error at
    once, and must take the weights in another way."""
    there, late = Workers(dense, whole=True), Workers(dense, 2, whole=True)
    source = offered(ranks, adapters[0], "0")
    # Only one of the late server's two workers joins in time.
    late.weights[0].stage(str(adapters[0]), SCALE, {**source, "server": "1"})
    ranks.send()
    begin = time.monotonic()
    assert there.serve(adapters[0], source) == "nccl"
    assert ranks.sent()["servers"] == ["0"]
    assert members.JOIN_SECONDS <= time.monotonic() - begin < BOUND
    late.weights[1].stage(str(adapters[0]), SCALE, {**source, "server": "1"})
    with pytest.raises(RuntimeError, match="the ranks send to 0: it came too late"):
        until_failed([late], adapters[0])
    late.serve(adapters[0])
    for workers in (there, late):
        workers.check(adapters[0])


@pytest.mark.slow
@of_transfers
@pytest.mark.usefixtures("servers")
def test_a_server_that_is_cut_off_in_mid_transfer_stops_nobody_for_long(
    ranks: Senders, dense: Model, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' job goes on, and both servers take the weights in another way."""
    both = [Workers(dense, whole=True), Workers(dense, whole=True)]
    source = offered(ranks, adapters[0], "0")

    def cut() -> None:
        raise ConnectionError("cut")

    arriving(monkeypatch, 9, cut)  # The error at buffer 9 cuts off one of the two servers.
    both[1].order(adapters[0], {**source, "server": "1"})
    both[0].order(adapters[0], source)
    ranks.send()
    begin = time.monotonic()
    for workers in both:
        assert failed(workers, adapters[0]) < BOUND
    assert "error" in ranks.sent(2 * BOUND)
    assert time.monotonic() - begin < BOUND
    for workers in both:
        workers.check(None)
        workers.serve(adapters[0])
        workers.check(adapters[0])
    source = offered(ranks, adapters[1], "0")
    both[1].order(adapters[1], {**source, "server": "1"})
    ranks.send()
    assert both[0].serve(adapters[1], source) == "nccl"
    assert ranks.sent()["servers"] == ["0", "1"]


@pytest.mark.slow
@of_transfers
@pytest.mark.usefixtures("servers")
def test_a_server_that_starts_again_does_not_come_twice(
    ranks: Senders, dense: Model, adapters: list[Path]
) -> None:
    source = offered(ranks, adapters[0], "0")
    both = [Workers(dense, whole=True) for _ in range(2)]
    for workers in both:
        workers.order(adapters[0], source)
    ranks.send()
    # Each of the server's two vLLMs joins in a thread of its own, so either may be the first.
    with pytest.raises(RuntimeError, match="an earlier vLLM of this server has come"):
        until_failed(both, adapters[0])
    assert ranks.sent()["servers"] == ["0"]


def test_ranks_do_not_wait_where_no_server_is_ready(
    ranks: Senders, servers: None, adapters: list[Path]
) -> None:
    for name, record in ranks.spool.replicas.all().items():
        ranks.spool.replicas.put(record.model_copy(update={"ready": False, "replica": name}))
    assert offered(ranks, adapters[0])["servers"] == []
    begin = time.monotonic()
    ranks.send()
    assert "none was ready" in ranks.sent()["error"]["message"]
    assert time.monotonic() - begin < members.JOIN_SECONDS


def until_failed(servers: list[Workers], version: Path) -> None:
    """Polls the workers until a worker raises the error about weights that did not arrive."""
    end = time.monotonic() + BOUND
    while time.monotonic() < end:
        for weights in [weights for workers in servers for weights in workers.weights]:
            weights.staged(str(version))
        time.sleep(0.01)
