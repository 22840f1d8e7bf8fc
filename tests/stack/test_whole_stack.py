"""The whole stack with whole weights: real jobs, whose ranks send them to vLLM or write them to the volume."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from local_stack import DEVICES, LocalStack, train
from tandem.spool import Spool
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "whole"
ON_GPUS = DEVICES["TANDEM_DEVICE"] == "cuda"


@pytest.fixture(scope="module", params=["nccl", "volume", *(["ipc"] if ON_GPUS else [])])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    if request.param == "volume" and not request.config.option.all_cases:
        pytest.skip("tests/inference/test_whole_vllm.py has files too; the stack is for --all-cases")
    root = tmp_path_factory.mktemp(request.param) / "spool"
    with LocalStack(root, TANDEM_WEIGHTS="merged", TANDEM_TRANSPORT=request.param) as running:
        running.client.create_run(RUN, lora={"rank": 4})
        running.client.wait_served(RUN, 0, timeout=180)
        yield running


def sample(stack: LocalStack) -> httpx.Response:
    body = {"model": RUN, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0}
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    return httpx.post(f"{stack.inference_url}/v1/completions", headers=headers, json=body, timeout=120)


def test_each_step_is_trained_sent_and_served(stack: LocalStack) -> None:
    way = stack.environment["TANDEM_TRANSPORT"]
    for step in (1, 2):
        job = train(stack.client, RUN, 3, learning_rate=1e-2)
        served = stack.client.wait_served(RUN, step, timeout=180)
        assert (served.weights, served.transport, served.refused_step) == ("merged", way, None)
        assert served.mean_abs_logprob_error < (0.05 if ON_GPUS else 1e-3)
        assert sample(stack).headers["x-tandem-weights"] == f"{RUN}@{step}"
        assert stack.client.wait_job(job).state == "succeeded"
        events = Spool(stack.root).events.read(job)
        told = [event for event in events if event.type in ("offered", "sent", "served")]
        assert sorted(event.type for event in told) == ["offered", "sent", "served"]
        assert [event.data["transport"] for event in told] == [way] * 3
        [sent] = [event for event in told if event.type == "sent"]
        assert sent.data["bytes"] > 0
        print(f"\n{way}: sent {sent.data}; served {served.seconds}")


def test_a_vllm_that_starts_again_has_the_newest_step_before_it_answers(stack: LocalStack) -> None:
    expected = sample(stack).json()["choices"]
    for pid in stack.pids("vllm"):
        os.kill(pid, signal.SIGKILL)
    answers = []

    def served() -> bool:
        try:
            answers.append(sample(stack))
        except httpx.TransportError:
            return False
        return answers[-1].status_code == 200

    until("the newest step is served again", served, 240, poll=0.2)
    assert {answer.status_code for answer in answers} <= {503, 404, 200}
    assert answers[-1].json()["choices"] == expected
    # The publisher lets requests in before it writes the record.
    record = until("the record is there", lambda: Spool(stack.root).served.get(RUN), 30)
    assert record is not None
    assert (record.step, record.transport) == (
        2,
        "volume" if stack.environment["TANDEM_TRANSPORT"] == "volume" else "merge",
    )


def test_a_run_of_all_weights_takes_the_place_of_a_deleted_one(stack: LocalStack) -> None:
    """Its step 0 is the base model; later steps come as the adapter's did, and are read from the checkpoint again when
    vLLM has started again."""
    way, full = stack.environment["TANDEM_TRANSPORT"], "full"
    stack.client.delete_run(RUN)
    stack.client.create_run(full, trainable="full")
    served = stack.client.wait_served(full, 0, timeout=180)
    assert (served.weights, served.transport) == ("merged", "volume")
    for step in (1, 2):
        train(stack.client, full, 3, learning_rate=1e-3)
        served = stack.client.wait_served(full, step, timeout=180)
        assert (served.step, served.transport, served.refused_step) == (step, way, None)
        assert served.mean_abs_logprob_error < (0.05 if ON_GPUS else 1e-3)
        print(f"\n{way}: served {served.seconds}")
    for pid in stack.pids("vllm"):
        os.kill(pid, signal.SIGKILL)

    def served_again() -> bool:
        record = Spool(stack.root).served.get(full)
        return record is not None and record.verified > served.verified

    until("the newest step is served again", served_again, 240, poll=0.2)
    record = Spool(stack.root).served.get(full)
    assert record is not None
    assert (record.step, record.transport) == (2, "volume")
