"""The whole stack with merged weights: a mixture of experts, adapters on its experts too, which the CPU's vLLM can't
serve as adapters."""

import os
import signal
from collections.abc import Iterator

import httpx
import pytest
import tiny_model

from local_stack import LocalStack, train
from tandem.errors import Conflict, InvalidInput
from tiny import write_random_model
from waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "experts"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    root = tmp_path_factory.mktemp("merged") / "spool"
    model = root / "models" / "tiny"
    tiny_model.write_tokenizer(model)
    write_random_model(model, family="qwen3_moe", vocab_size=320, hidden_size=64, head_dim=32,
                       moe_intermediate_size=32, max_position_embeddings=4096)  # fmt: skip
    with LocalStack(root, TANDEM_WEIGHTS="merged", TANDEM_EXPERT_LORA="1") as running:
        running.client.create_run(RUN, lora={"rank": 4, "targets": ["q_proj", "v_proj", "gate_proj", "down_proj"]})
        running.client.wait_served(RUN, 0, timeout=180)
        yield running


def sample(stack: LocalStack, model: str) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0.0}
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    return httpx.post(f"{stack.inference_url}/v1/completions", headers=headers, json=body, timeout=120)


def test_a_step_is_trained_and_its_weights_are_served(stack: LocalStack) -> None:
    assert sample(stack, f"{RUN}@0").headers["x-tandem-weights"] == f"{RUN}@0"
    train(stack.client, RUN, 4, learning_rate=1e-2)
    served = stack.client.wait_served(RUN, 1, timeout=180)
    assert (served.weights, served.transport, served.refused_step) == ("merged", "merge", None)
    assert served.mean_abs_logprob_error < 1e-3
    assert sample(stack, f"{RUN}@1").headers["x-tandem-weights"] == f"{RUN}@1"
    assert sample(stack, f"{RUN}@0").status_code == 404


def test_what_cannot_be_served_beside_it_is_refused(stack: LocalStack) -> None:
    with pytest.raises(Conflict, match=RUN) as conflict:
        stack.client.create_run("second")
    assert conflict.value.field == "weights"
    with pytest.raises(InvalidInput, match="TANDEM_WEIGHTS"):
        stack.client.create_run("adapter", weights="adapter")
    assert [run.spec.name for run in stack.client.list_runs()] == [RUN]


@pytest.mark.sample(1, of="a vLLM that starts again")
def test_a_vllm_that_starts_again_answers_nobody_before_it_has_the_newest_step(stack: LocalStack) -> None:
    expected = sample(stack, RUN).json()["choices"]
    for pid in stack.pids("vllm"):
        os.kill(pid, signal.SIGKILL)
    answers = []

    def served() -> bool:
        try:
            answers.append(sample(stack, RUN))
        except httpx.TransportError:
            return False
        return answers[-1].status_code == 200

    until("the newest step is served again", served, 240, poll=0.2)
    assert {answer.status_code for answer in answers} <= {503, 404, 200}
    assert answers[-1].headers["x-tandem-weights"] == f"{RUN}@1"
    assert answers[-1].json()["choices"] == expected
