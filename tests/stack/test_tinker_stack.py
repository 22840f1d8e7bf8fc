"""Tinker's package, unmodified, on a whole stack. A client's program trains a model and samples
from vLLM, although every program of the stack dies once."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from local_stack import API_KEY, LocalStack
from tandem.controller.tinker.names import model_of
from tinker_client import datum, service
from waiting import until

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
BASE = "models/tiny"
KEY = f"tml-{API_KEY}"
DATA = [datum([5, 6, 7, 8, 9]), datum([5, 6, 17, 18])]
ADAM = types.AdamParams(learning_rate=5e-3)


@pytest.fixture(scope="module")
def stack(loops_stack: LocalStack) -> LocalStack:
    return loops_stack


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[tinker.ServiceClient]:
    with service(stack.controller_url, KEY) as client:
        yield client


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def logprobs(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(one["logprobs"].data) for one in output.loss_fn_outputs]


def test_a_program_trains_and_samples_what_it_trained(
    client: tinker.ServiceClient, stack: LocalStack
) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=8, seed=1).result()
    losses = []
    for _ in range(5):
        passing, step = model.forward_backward(DATA, "cross_entropy"), model.optim_step(ADAM)
        losses.append(passing.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < 0.2 * losses[0]
    path = model.save_weights_for_sampler("here").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    trained = logprobs(model.forward(DATA, "cross_entropy").result())
    served = sampler.compute_logprobs(prompt([5, 6, 7, 8, 9])).result()
    assert np.abs(np.array(served[1:]) - trained[0]).max() < 1e-4
    # The saved state is one of Tandem's checkpoints.
    run = model_of(str(model.model_id)).run
    assert stack.spool.names.find(run, "sampler", "here").step == 1
    assert stack.client.get_run(run).served.step == 1

    state = model.save_state("here").result().path
    same = client.create_training_client_from_state_with_optimizer(state).result()
    assert logprobs(same.forward(DATA, "cross_entropy").result()) == trained
    for one in (model, same):
        one.forward_backward(DATA, "cross_entropy").result()
        one.optim_step(ADAM).result()
    after = [logprobs(one.forward(DATA, "cross_entropy").result()) for one in (model, same)]
    assert after[0] == after[1] != trained

    # A loss that the client computes has the value of the built-in loss, and trains the same step.
    def negative(_: object, values: list) -> tuple:
        return -sum(value.sum() for value in values), {}

    others = [client.create_training_client_from_state(state).result() for _ in range(2)]
    built_in = others[0].forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]
    own = others[1].forward_backward_custom(DATA, negative).result().metrics["loss:sum"]
    assert own == pytest.approx(built_in, rel=1e-5)
    for one in others:
        one.optim_step(ADAM).result()
    first, second = (logprobs(one.forward(DATA, "cross_entropy").result()) for one in others)
    assert first == second


def test_what_vllm_samples(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=BASE).result()
    given = [72, 101, 108, 108, 111]
    asked = types.SamplingParams(max_tokens=12, seed=2)
    found = sampler.sample(
        prompt(given),
        8,
        asked,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=2,
    ).result()
    assert len({tuple(one.tokens) for one in found.sequences}) > 1
    # The tiny model often repeats a token.
    chosen = next(i for i, seq in enumerate(found.sequences) if len(set(seq.tokens)) > 1)
    one = found.sequences[chosen]
    assert (len(one.tokens), one.stop_reason) == (12, "length")
    scored = sampler.compute_logprobs(prompt([*given, *one.tokens])).result()
    assert found.prompt_logprobs == scored[: len(given)]
    assert np.abs(np.array(scored[len(given) :]) - one.logprobs).max() < 1e-4
    assert one.topk_logprobs is not None
    assert all(len(best) == 2 and best[0][1] >= best[1][1] for best in one.topk_logprobs)
    again = sampler.sample(prompt(given), 8, asked).result()
    assert [seq.tokens for seq in again.sequences] == [seq.tokens for seq in found.sequences]
    # The stop token is the last token of the sample.
    at = next(i for i, token in enumerate(one.tokens) if token not in one.tokens[:i] and i > 0)
    stopping = types.SamplingParams(max_tokens=12, seed=2, stop=[one.tokens[at]])
    stopped = sampler.sample(prompt(given), 8, stopping).result().sequences[chosen]
    assert (stopped.tokens, stopped.stop_reason) == (one.tokens[: at + 1], "stop")
    endless = sampler.sample(prompt(given), 1, types.SamplingParams(stop=[])).result()
    assert len(endless.sequences[0].tokens) == 256 - len(given)


@pytest.mark.sample(1, of="programs of a whole stack are killed")
def test_every_program_dies_and_the_package_notices_nothing(
    client: tinker.ServiceClient, stack: LocalStack
) -> None:
    """The same calls with and without deaths give the same log-probs."""

    def calls(*deaths: str) -> list[list[float]]:
        model = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        waiting = [*deaths]
        for _ in range(4):
            passing, step = model.forward_backward(DATA, "cross_entropy"), model.optim_step(ADAM)
            if waiting:
                stack.kill(waiting.pop())
            passing.result()
            step.result()
        path = model.save_weights_for_sampler("end").result().path
        sampler = client.create_sampling_client(model_path=path).result()
        if deaths:
            stack.kill("publisher")
            stack.kill("vllm")
        scored = sampler.compute_logprobs(prompt([5, 6, 7, 8, 9])).result()
        trained = logprobs(model.forward(DATA, "cross_entropy").result())
        assert np.abs(np.array(scored[1:]) - trained[0]).max() < 1e-4
        return trained

    assert calls() == calls("controller", "runner", "forkserver")


def test_ranks_leave_and_come_back(client: tinker.ServiceClient, stack: LocalStack) -> None:
    model = client.create_lora_training_client(base_model=BASE, rank=8, seed=4).result()
    model.forward_backward(DATA, "cross_entropy").result()
    run = model_of(str(model.model_id)).run

    def idle() -> bool:
        return not stack.spool.jobs.list(run, states=("queued", "running"))

    until("the session's job ends", idle)
    # The next job recomputes the gradients.
    stepped = model.optim_step(ADAM).result()
    assert stepped.metrics["grad_norm"] > 0
    assert len([*stack.client.list_jobs(run)]) == 2


@pytest.mark.sample(1, of="programs of the documents")
def test_the_documents_program_runs(stack: LocalStack, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    for written, here in (
        ("http://127.0.0.1:8080", stack.controller_url),
        ("tml-choose-one", KEY),
        ("Qwen/Qwen3-0.6B", "any/tiny"),
        ("[9707, 11, 1879, 0]", "[72, 11, 18, 0]"),
    ):
        assert written in program
        program = program.replace(written, here)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *losses, sampled = done.stdout.splitlines()
    assert float(losses[2]) < float(losses[0])
    assert sampled.startswith("[")
