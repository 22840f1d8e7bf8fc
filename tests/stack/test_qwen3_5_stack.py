"""The whole stack with a tiny Qwen3.5, whose checkpoint has a vision tower: what is trained is
verified and served, and answers as it was taught."""

from pathlib import Path

import httpx
import pytest
import tiny_model

from local_stack import LocalStack, succeeded, train
from tandem.spool.schema import DELTA_NET_TARGETS, LORA_TARGETS
from tiny import write_random_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN = "hybrid"


def answer(stack: LocalStack, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Is it?"}],
        "max_tokens": 3,
        "temperature": 0.0,
    }
    response = httpx.post(
        f"{stack.inference_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {stack.api_key}"},
        json=body,
        timeout=120,
    ).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def test_what_is_trained_is_served(tmp_path: Path) -> None:
    model = tmp_path / "spool" / "models" / "tiny"
    tiny_model.write_tokenizer(model)
    write_random_model(
        model,
        family="qwen3_5",
        spread=1.0,
        vocab_size=320,
        hidden_size=64,
        head_dim=32,
        num_hidden_layers=3,
        # The only sizes of heads that vLLM's kernels for the CPU take.
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
    )
    with LocalStack(tmp_path / "spool", TANDEM_DTYPE="bfloat16") as stack:
        run = stack.client.create_run(RUN, lora={"rank": 8})
        assert run.spec.lora is not None
        assert set(run.spec.lora.targets) == {*LORA_TARGETS, *DELTA_NET_TARGETS}
        stack.client.wait_served(RUN, 0, timeout=240)
        before = answer(stack, f"{RUN}@0")
        for step in (1, 2):
            job = train(stack.client, RUN, 20, learning_rate=1e-2)
            succeeded(stack.client, job, timeout=300)
            served = stack.client.wait_served(RUN, step, timeout=240)
            assert served.refused_step is None
            print(f"step {step}: {served.mean_abs_logprob_error} nats")
        assert answer(stack, f"{RUN}@2") in ("yes", "no"), before
        assert answer(stack, f"{RUN}@0") == before
