"""Two real vLLM servers behind the real HAProxy: yes/no/maybe learns as with one server, although
one of the servers dies by kill -9. Requests from outside never get an older step than the announced
step."""

import asyncio
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from unittest import mock

import httpx
import pytest
import tiny_model
import yes_no_maybe

from free_ports import free_ports
from local_stack import LocalStack, succeeded, train
from tandem.errors import Conflict, NotFound
from tandem.supervise import proxy
from tandem.system import ports
from waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        shutil.which("haproxy") is None, reason=f"haproxy is not installed: {proxy.INSTALL}"
    ),
]
RUN = "both"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The test takes minutes, so it runs only with --all-cases."""
    ways = ["adapter", "merged", "nccl"] if metafunc.config.option.all_cases else []
    metafunc.parametrize("stack", ways, indirect=True, scope="module")


def three_ports() -> int:
    """The first of three consecutive unused ports."""
    while True:
        first = free_ports(1)[0]
        try:
            for number in (first + 1, first + 2):
                ports.reserve(number).close()
        except Conflict:
            continue
        return first


@pytest.fixture(scope="module")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    variables = {
        "TANDEM_WEIGHTS": "adapter" if request.param == "adapter" else "merged",
        "TANDEM_TRANSPORT": "nccl" if request.param == "nccl" else "auto",
        "TANDEM_INFERENCE_REPLICAS": "2",
        "TANDEM_INFERENCE_PORT": str(three_ports()),
        "TANDEM_MAX_LORA_RANK": "16",
        "OMP_NUM_THREADS": "2",
    }
    root = tmp_path_factory.mktemp(request.param) / "spool"
    tiny_model.write_tiny_qwen3(root / "models" / "tiny")  # the demo's model
    with LocalStack(root, **variables) as running:
        yield running


def ready(stack: LocalStack) -> set[str]:
    return {name for name, record in stack.spool.replicas.living().items() if record.ready}


class Stranger(threading.Thread):
    """Sends requests for the announced step without a pause, and records wrong answers."""

    def __init__(self, stack: LocalStack) -> None:
        super().__init__(daemon=True)
        self.stack, self.wrong, self.answers, self.stopped = stack, list[str](), 0, False
        self.unanswered = 0

    def run(self) -> None:
        try:
            self.ask()
        except Exception as error:
            self.wrong.append(repr(error))

    def ask(self) -> None:
        merged = self.stack.environment["TANDEM_WEIGHTS"] == "merged"
        headers = {"Authorization": f"Bearer {self.stack.api_key}"}
        url = f"{self.stack.inference_url}/v1/completions"
        while not self.stopped:
            time.sleep(0.05)
            record = None
            with suppress(NotFound):  # the run is not made yet
                record = self.stack.spool.served.get(RUN)
            if record is None:
                continue
            model = RUN if merged else record.model
            body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 2}
            answer = httpx.post(url, headers=headers, json=body, timeout=120)
            if answer.status_code in (502, 503):
                self.unanswered += 1  # both servers were away; the client tries again
                continue
            self.answers += 1
            step = int(answer.headers.get("x-tandem-weights", record.model).rpartition("@")[2])
            if answer.status_code != 200 or step < record.step:
                self.wrong.append(f"{record.model}: {answer.status_code} {step} {answer.text}")


def test_two_servers_learn_as_one_does_although_one_dies(stack: LocalStack) -> None:
    until("both are ready", lambda: ready(stack) == {"0", "1"}, 300)
    stranger = Stranger(stack)
    stranger.start()
    killed: list[int] = []

    def tell(what: str, row: dict[str, object]) -> None:
        print(what, row, flush=True)
        if what == "rl" and not killed:
            killed.append(stack.kill("vllm"))

    variables = {
        "TANDEM_URL": stack.controller_url,
        "TANDEM_INFERENCE_URL": stack.inference_url,
        "TANDEM_API_KEY": stack.api_key,
    }
    with mock.patch.dict("os.environ", variables):
        report = asyncio.run(yes_no_maybe.train(RUN, rl_steps=12, tell=tell))
    assert killed
    assert abs(report["sft_reward"] - 0.75) <= 0.06
    assert report["rl_reward"] >= 0.93
    until("both are ready again", lambda: ready(stack) == {"0", "1"}, 300)
    stranger.stopped = True
    stranger.join(150)
    assert not stranger.wrong, stranger.wrong[:3]
    assert stranger.answers > 50
    record = stack.spool.served.get(RUN)
    assert record is not None
    assert record.step == stack.spool.checkpoints.newest(RUN)
    for replica in "01":
        assert record.step in [s.step for s in stack.spool.replicas.serves(RUN, replica).steps]
    jobs = [stack.spool.checkpoints.manifest(RUN, n).job for n in range(1, record.step + 1)]
    events = [stack.spool.events.read(str(job)) for job in jobs]
    served = [[event.type for event in of].count("served") for of in events]
    assert set(served) == {1}, "one event for each step"
    if stack.environment["TANDEM_TRANSPORT"] == "nccl":
        # While one server was away, the other server alone served new steps.
        _, events_of_one = succeeded(stack.client, train(stack.client, RUN, 1, learning_rate=1e-4))
        for one in (events[0], events_of_one):
            sent = [event.data for event in one if event.type == "sent"]
            assert [data.get("servers") for data in sent] == [["0", "1"]], sent
    print(f"answers {stranger.answers}, unanswered {stranger.unanswered}, {report['rl_reward']}")
