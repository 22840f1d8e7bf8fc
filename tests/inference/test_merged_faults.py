"""The real vLLM on the CPU with merged weights. After any process dies in a publication, the served
name matches the served weights, and the next publication succeeds. 500 publications cost no
memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tiny_model

from inference import publish_and_stop
from inference.test_merged_vllm import MergedTrainer, complete
from inference.vllm_server import VllmServer
from policies import write_random_adapter
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.publisher.publisher import Publisher
from tandem.spool.schema import LoraShape
from tandem.system import processes
from tandem.vllm_client.client import InferenceUnavailable
from tiny import write_random_model
from waiting import alive, answers, until

pytestmark = [pytest.mark.sample(1, of="vLLM and whole stacks"), pytest.mark.slow]

BOUND = 40.0
"""Seconds within which all processes notice the death of a process."""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("faults")
    tiny_model.write_tokenizer(directory / "model")
    write_random_model(
        directory / "model",
        family="qwen3",
        vocab_size=320,
        hidden_size=64,
        head_dim=32,
        max_position_embeddings=4096,
    )
    with VllmServer(directory, directory / "model", TANDEM_WEIGHTS="merged") as server:
        yield server


@pytest.fixture
def trainer(
    vllm: VllmServer, alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MergedTrainer:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not answers(f"{vllm.url}/health"):
        vllm.restart()
    return MergedTrainer(vllm, tmp_path)


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def check_answers(vllm: VllmServer, trainer: MergedTrainer, step: int) -> None:
    """vLLM answers the run's name with exactly the weights of `step`."""
    answer = complete(vllm, trainer.run, max_tokens=1)
    assert (answer.status_code, answer.headers["x-tandem-weights"]) == (
        200,
        f"{trainer.run}@{step}",
    )
    trainer.check_bits(trainer.adapters[step])


@pytest.mark.sample(2)
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", list(publish_and_stop.PHASES))
def test_a_publisher_that_dies_or_stops(
    vllm: VllmServer, trainer: MergedTrainer, tmp_path: Path, phase: str, sig: signal.Signals
) -> None:
    trainer.step(1)
    trainer.publish(trainer.run)
    trainer.step(2)
    environment = trainer.publisher_environment(vllm, tmp_path)
    publisher = subprocess.Popen(
        [sys.executable, publish_and_stop.__file__, phase, str(int(sig))], env=environment
    )
    try:
        until(
            "it gets there",
            lambda: publisher.poll() is not None or stopped(publisher.pid),
            poll=0.01,
        )
        assert publisher.poll() in (None, -signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(complete, vllm, trainer.run, max_tokens=1)
            if phase not in ("ordered", "announced"):
                time.sleep(0.5)
                assert not request.done(), "nobody has verified these weights"
            trainer._publisher = Publisher(trainer.settings, trainer.client, grace=0.5)
            assert trainer.publish(trainer.run).step == 2
            # A request that arrived before the order is answered by the old step's weights. A
            # request that runs during the swap is answered by the weights of both steps.
            old, new = f"{trainer.run}@1", f"{trainer.run}@2"
            expected = [old, f"{old},{new}", new] if phase == "ordered" else [new]
            assert request.result().headers["x-tandem-weights"] in expected
        check_answers(vllm, trainer, 2)
        if sig == signal.SIGSTOP:
            publisher.send_signal(signal.SIGCONT)
            publisher.wait(30)
            check_answers(vllm, trainer, 2)
    finally:
        publisher.kill()
        publisher.wait(30)
    trainer.step(3)
    assert trainer.publish(trainer.run).step == 3
    check_answers(vllm, trainer, 3)


def engine_of(vllm: VllmServer) -> int:
    # The kernel truncates process names, here "EngineCore".
    [engine] = [p.pid for p in processes.descendants(vllm.pid) if "EngineCor" in p.command]
    return engine


@pytest.mark.sample(1)  # each case starts vLLM again
@pytest.mark.parametrize("dies", ["server", "engine"])
@pytest.mark.parametrize("moment", ["drain", "call"])
def test_a_server_or_engine_that_dies_in_mid_swap(
    vllm: VllmServer, trainer: MergedTrainer, dies: str, moment: str
) -> None:
    """`drain`: the process dies while the swap waits for a running request. `call`: the process
    dies before a worker has answered the engine."""
    trainer.step(1)
    trainer.publish(trainer.run)
    trainer.step(2)
    engine = engine_of(vllm)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(complete, vllm, trainer.run, max_tokens=3500)
        until("it runs", lambda: trainer.client.merged()["in_flight"] == 1)
        if moment == "call":
            os.kill(engine, signal.SIGSTOP)
        requests = "wait" if moment == "drain" else "keep"
        name, path = f"{trainer.run}@2", str(trainer.adapters[2])
        order = pool.submit(trainer.client.swap_merged, name, path, 2.5, requests, 100)
        if moment == "drain":
            until("it drains", lambda: trainer.client.merged()["phase"] == "swapping")
            waiting = pool.submit(complete, vllm, trainer.run, max_tokens=1)
        time.sleep(0.5)
        assert not order.done()
        assert not running.done()
        begin = time.monotonic()
        os.kill(vllm.pid if dies == "server" else engine, signal.SIGKILL)
        with pytest.raises(InferenceUnavailable):
            order.result(BOUND)
        for request in (running, *([waiting] if moment == "drain" else [])):
            assert not answered(request, begin)
    until(
        "both have ended",
        lambda: vllm.ended() and not alive(engine),
        BOUND - (time.monotonic() - begin),
    )
    vllm.restart()
    answer = complete(vllm, trainer.run)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert trainer.publish(trainer.run).step == 2
    check_answers(vllm, trainer, 2)


def answered(request: Future[httpx.Response], begin: float) -> bool:
    try:
        return request.result(max(0.0, BOUND - (time.monotonic() - begin))).status_code == 200
    except httpx.TransportError:
        return False


def test_an_engine_that_hangs_swaps_nothing_when_it_comes_back(
    vllm: VllmServer, trainer: MergedTrainer
) -> None:
    trainer.step(1)
    trainer.publish(trainer.run)
    trainer.step(2)
    engine = engine_of(vllm)
    os.kill(engine, signal.SIGSTOP)
    try:
        with pytest.raises(InferenceUnavailable, match="no answer from vLLM in time"):
            trainer.client.swap_merged(f"{trainer.run}@2", str(trainer.adapters[2]), 2.5, "keep", 2)
    finally:
        os.kill(engine, signal.SIGCONT)
    check_answers(vllm, trainer, 1)
    assert trainer.publish(trainer.run).step == 2
    check_answers(vllm, trainer, 2)


def memory(vllm: VllmServer) -> dict[str, int]:
    """Resident bytes of each process of the server."""
    found = {}
    for pid in (vllm.pid, *(p.pid for p in processes.descendants(vllm.pid))):
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        found[f"{status['Name'].strip()} {pid}"] = int(status["VmRSS"].split()[0]) * 1024
    return found


def test_500_publications_cost_no_memory(
    vllm: VllmServer, trainer: MergedTrainer, tmp_path: Path
) -> None:
    """An adapter has 1 MB, so leaked copies of adapters show in the processes' memory."""
    trainer.step(1)
    trainer.publish(trainer.run)
    lora = LoraShape(rank=128, alpha=1.0)
    paths = [
        write_random_adapter(tmp_path / f"big-{seed}", vllm.model, lora, seed=seed)
        for seed in range(3)
    ]
    size = (paths[0] / WEIGHTS_FILE).stat().st_size
    assert size > 1_000_000
    for number in range(550):
        if number == 50:
            before = memory(vllm)
        path = tmp_path / str(number)  # each checkpoint has a directory of its own
        path.mkdir()
        (path / WEIGHTS_FILE).hardlink_to(paths[number % 3] / WEIGHTS_FILE)
        trainer.client.swap_merged(f"{trainer.run}@{number}", str(path), 0.01, "keep", 60)
        trainer.client.announce_merged(str(path))
        if number % 10 == 0:
            assert complete(vllm, trainer.run).status_code == 200
    grown = {name: rss - before[name] for name, rss in memory(vllm).items() if name in before}
    assert len(grown) == len(before) >= 2
    assert max(grown.values()) < 20 * size
