"""The whole stack with a tiny model of each newer family. A trained step is verified and served,
and the model gives the trained answers. With `--all-cases` the tests also serve the model that
`tandem export` merges, on a stack of its own. For families whose adapters Tandem merges into vLLM's
weights, the tests also use `TANDEM_WEIGHTS=merged`. `tests/model/test_vision_wrappers.py` compares
merged models with their adapters."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_model

from local_stack import LocalStack, succeeded, train
from tandem.spool.schema import DELTA_NET_TARGETS, LORA_TARGETS
from tiny import GEMMA4_MOE, MINISTRAL3, write_random_model

pytestmark = [
    pytest.mark.sample(1, of="vLLM and whole stacks"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
RUN = "taught"


@dataclass(frozen=True)
class Family:
    model_type: str
    shape: dict[str, Any]
    targets: tuple[str, ...]
    """The targets of a run that names no targets."""
    error: float = 1e-4
    """The largest allowed error of served log-probs, in nats. The error is some 1e-6 nats in fp32,
    and whole nats with a wrong kernel."""
    variables: dict[str, str] = field(default_factory=dict)


# vLLM's kernels for the CPU support only these sizes.
DELTA_NETS = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
GEMMA = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "global_head_dim": 64,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
BFLOAT16 = {"TANDEM_DTYPE": "bfloat16"}
OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
OF_GEMMA = tuple(target for target in LORA_TARGETS if target != "k_proj")

FAMILIES = {
    "qwen3_5": Family(
        "qwen3_5", DELTA_NETS, LORA_TARGETS + DELTA_NET_TARGETS, error=0.1, variables=BFLOAT16
    ),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        DELTA_NETS,
        LORA_TARGETS[:4] + DELTA_NET_TARGETS,
        error=0.1,
        variables=BFLOAT16,
    ),
    "glm4_moe_lite": Family("glm4_moe_lite", LATENTS, OF_LATENTS),
    "deepseek_v3": Family("deepseek_v3", LATENTS, OF_LATENTS),
    "gemma4": Family("gemma4", GEMMA, OF_GEMMA),
    "gemma4_moe": Family("gemma4", GEMMA | GEMMA4_MOE, OF_GEMMA[:3]),
    "qwen3_vl_moe": Family("qwen3_vl_moe", {"head_dim": 32}, LORA_TARGETS[:4]),
    "olmo3": Family("olmo3", {"head_dim": 32}, LORA_TARGETS),
    "seed_oss": Family("seed_oss", {"head_dim": 32}, LORA_TARGETS),
}
# vLLM has a table of `original_max_position_embeddings` times `factor` positions, and computes NaN
# for later positions.
LONG_YARN = MINISTRAL3["rope_parameters"] | {
    "original_max_position_embeddings": 16,
    "factor": 16.0,
}
# tests/cli/test_families.py has the families for which merged weights are refused.
MERGED = {
    "gemma3_text": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma4_text": GEMMA | {"attention_k_eq_v": False},
    "ministral3": {"head_dim": 32, "rope_parameters": LONG_YARN},
    "olmo3": {"head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "smollm3": {"head_dim": 32},
}


def write_model(root: Path, model_type: str, shape: dict[str, Any]) -> None:
    model = root / "models" / "tiny"
    tiny_model.write_tokenizer(model)
    write_random_model(
        model,
        family=model_type,
        spread=1.0,
        vocab_size=320,
        hidden_size=64,
        max_position_embeddings=4096,
        **shape,
    )


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


def teach(stack: LocalStack, step: int, error: float) -> None:
    """The run's next step is trained, accepted by the verification, and served."""
    job = train(stack.client, RUN, 20, learning_rate=1e-2)
    succeeded(stack.client, job, timeout=300)
    served = stack.client.wait_served(RUN, step, timeout=240)
    assert served.refused_step is None
    assert served.mean_abs_logprob_error is not None
    print(f"step {step}: {served.mean_abs_logprob_error} nats")
    assert served.mean_abs_logprob_error < error


def export(stack: LocalStack, step: int, directory: Path) -> None:
    base = ["--base-model", str(stack.root / "models" / "tiny")]
    command = [sys.executable, "-m", "tandem", "export", RUN, str(step), str(directory), *base]
    subprocess.run(
        command, env=stack.environment | {"TANDEM_URL": stack.controller_url}, check=True
    )


@pytest.mark.sample(1, of="families that vLLM serves")
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_is_served(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    family, first, second = FAMILIES[name], tmp_path / "first", tmp_path / "second"
    write_model(first, family.model_type, family.shape)
    # Delta nets need a state for each concurrent request of vLLM, in addition to the KV cache.
    variables = {"TANDEM_VLLM_ARGS": "", **family.variables}
    with LocalStack(first, **variables) as stack:
        run = stack.client.create_run(RUN, lora={"rank": 8})
        assert run.spec.lora is not None
        assert set(run.spec.lora.targets) == set(family.targets)
        stack.client.wait_served(RUN, 0, timeout=240)
        before = answer(stack, f"{RUN}@0")
        for step in (1, 2):
            teach(stack, step, family.error)
        taught = answer(stack, f"{RUN}@2")
        assert taught in ("yes", "no"), before
        assert answer(stack, f"{RUN}@0") == before
        if not pytestconfig.option.all_cases:
            return
        (second / "models").mkdir(parents=True)
        export(stack, 2, second / "models" / "tiny")
    with LocalStack(second, **variables) as stack:
        stack.client.create_run(RUN, lora={"rank": 8})
        stack.client.wait_served(RUN, 0, timeout=240)
        assert answer(stack, f"{RUN}@0") == taught
        teach(stack, 1, family.error)


@pytest.mark.sample(0)
@pytest.mark.parametrize("model_type", MERGED)
def test_merged_weights_are_served(model_type: str, tmp_path: Path) -> None:
    """This test runs only with `--all-cases`."""
    write_model(tmp_path, model_type, MERGED[model_type])
    with LocalStack(tmp_path, TANDEM_WEIGHTS="merged") as stack:
        stack.client.create_run(RUN, lora={"rank": 8})
        stack.client.wait_served(RUN, 0, timeout=240)
        before = answer(stack, f"{RUN}@0")
        for step in (1, 2):
            teach(stack, step, 1e-3)
        assert answer(stack, RUN) in ("yes", "no"), before
