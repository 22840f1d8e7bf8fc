"""The whole stack with merged weights, for each way in which weights reach vLLM.

In the way `merge`, vLLM merges adapters. The model is a mixture of experts with adapters on the
experts, too. On the CPU vLLM can't serve adapters on experts without a merge. In the other ways the
ranks of real jobs send whole weights.
"""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
import tiny_model

from listening import LOOPBACK, watched
from local_stack import DEVICES, LocalStack, train
from tandem.errors import Conflict, InvalidInput
from tiny import write_random_model
from waiting import until

# By default this file tests one way only. `test_real_model.py` has a stack that merges. In
# tests/inference/test_whole_vllm.py a real vLLM gets whole weights from ranks.
pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.one_of("stack"),
]
RUN = "merged"
ON_GPUS = DEVICES["TANDEM_DEVICE"] == "cuda"
ERROR = 0.05 if ON_GPUS else 1e-3
"""The largest allowed error of the served log-probs, in nats."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fixture `stack` has a case for each way in which weights reach vLLM. `volume` is a case
    only with --all-cases, because tests/inference/test_whole_vllm.py also tests `volume`."""
    ways = [
        "merge",
        "nccl",
        *(["volume"] if metafunc.config.option.all_cases else []),
    ]
    metafunc.parametrize("stack", ways, indirect=True, scope="module")


@pytest.fixture(scope="module")
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    root = tmp_path_factory.mktemp(request.param) / "spool"
    targets: dict[str, list[str]] = {}
    if request.param == "merge":
        model = root / "models" / "tiny"
        tiny_model.write_tokenizer(model)
        write_random_model(
            model,
            family="qwen3_moe",
            vocab_size=320,
            hidden_size=64,
            head_dim=32,
            moe_intermediate_size=32,
            max_position_embeddings=4096,
        )
        targets = {"targets": ["q_proj", "v_proj", "gate_proj", "down_proj"]}
    variables = {"TANDEM_TRANSPORT": request.param, "TANDEM_EXPERT_LORA": str(int(bool(targets)))}
    with LocalStack(root, TANDEM_WEIGHTS="merged", **variables) as running:
        running.client.create_run(RUN, lora={"rank": 4, **targets})
        running.client.wait_served(RUN, 0, timeout=180)
        yield running


def way(stack: LocalStack) -> str:
    return stack.environment["TANDEM_TRANSPORT"]


def sample(stack: LocalStack, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0}
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    return httpx.post(
        f"{stack.inference_url}/v1/completions", headers=headers, json=body, timeout=120
    )


def test_each_step_is_trained_sent_and_served(stack: LocalStack) -> None:
    """All programs of the stack listen only on loopback, even while weights are sent."""
    with watched(stack.process.pid) as listeners:
        train_send_and_serve(stack)
    assert len(listeners) == 1, listeners
    assert set(listeners) <= LOOPBACK, f"strangers reach the weights: {listeners}"


def train_send_and_serve(stack: LocalStack) -> None:
    assert sample(stack, f"{RUN}@0").headers["x-tandem-weights"] == f"{RUN}@0"
    for step in (1, 2):
        job = train(stack.client, RUN, 3, learning_rate=1e-2)
        served = stack.client.wait_served(RUN, step, timeout=180)
        assert (served.weights, served.transport, served.refused_step) == (
            "merged",
            way(stack),
            None,
        )
        assert served.mean_abs_logprob_error < ERROR
        assert sample(stack, RUN).headers["x-tandem-weights"] == f"{RUN}@{step}"
        assert sample(stack, f"{RUN}@{step - 1}").status_code == 404
        assert stack.client.wait_job(job).state == "succeeded"
        told = [
            event
            for event in stack.spool.events.read(job)
            if event.type in ("offered", "sent", "served")
        ]
        ways = {event.type: event.data["transport"] for event in told}
        of_ranks = {} if way(stack) == "merge" else {"offered": way(stack), "sent": way(stack)}
        assert ways == {"served": way(stack)} | of_ranks
        assert all(event.data["bytes"] > 0 for event in told if event.type == "sent")
        print(f"\n{way(stack)}: {[event.data for event in told]}")
    with pytest.raises(InvalidInput, match="TANDEM_WEIGHTS"):
        stack.client.create_run("adapter", weights="adapter")
    with pytest.raises(Conflict, match=RUN):
        stack.client.create_run("second")


def test_a_run_of_all_weights_takes_the_place_of_a_deleted_one(stack: LocalStack) -> None:
    """Step 0 of a run of all weights is the base model. Later steps are published like the steps of
    adapters."""
    if way(stack) == "merge":
        pytest.skip("needs whole weights")
    stack.client.delete_run(RUN)
    stack.client.create_run("full", trainable="full")
    served = stack.client.wait_served("full", 0, timeout=180)
    assert (served.weights, served.transport) == ("merged", "volume")
    for step in (1, 2):
        train(stack.client, "full", 3, learning_rate=1e-3)
        served = stack.client.wait_served("full", step, timeout=180)
        assert (served.step, served.transport, served.refused_step) == (step, way(stack), None)
        assert served.mean_abs_logprob_error < ERROR


@pytest.mark.sample(1, of="a vLLM that starts again")
def test_a_vllm_that_starts_again_answers_nobody_before_it_has_the_newest_step(
    stack: LocalStack,
) -> None:
    """The new vLLM reads all weights from the checkpoint again."""
    (run,) = (found.spec.name for found in stack.client.list_runs())
    before, expected = stack.spool.served.get(run), sample(stack, run).json()["choices"]
    for pid in stack.pids("vllm"):
        os.kill(pid, signal.SIGKILL)
    answers = []

    def served() -> bool:
        try:
            answers.append(sample(stack, run))
        except httpx.TransportError:
            return False
        return answers[-1].status_code == 200

    until("the newest step is served again", served, 240, poll=0.2)
    assert {answer.status_code for answer in answers} <= {503, 404, 200}
    assert answers[-1].headers["x-tandem-weights"] == f"{run}@2"
    assert answers[-1].json()["choices"] == expected
    # The publisher admits requests before it writes the record. The start of vLLM removed the
    # earlier record.
    until(
        "the record is there",
        lambda: (now := stack.spool.served.get(run)) and now.verified > before.verified,
    )
    record = stack.spool.served.get(run)
    assert (record.step, record.transport) == (2, "merge" if way(stack) == "merge" else "volume")
