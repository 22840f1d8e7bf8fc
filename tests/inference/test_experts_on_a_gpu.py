"""Adapters on experts in the real vLLM, which serves such adapters only on a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_model

from inference.vllm_server import VllmServer
from tiny import write_random_model

TOKENS = np.random.default_rng(5).integers(0, 256, 100).tolist()
CPU_LOGPROBS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from policies import linear_row, make_policy, write_random_adapter
from tandem.model import device, parallel
from tandem.spool.schema import LoraShape
directory, tokens = Path(sys.argv[2]), json.loads(sys.argv[3])
device.activate("cpu"); parallel.init_parallel()
lora, model = LoraShape(rank=8, alpha=8.0), directory / "model"
adapters = {"base": None, "everywhere": write_random_adapter(directory / "everywhere", model, lora)}
found = {
    name: make_policy(model, lora, path)(linear_row(tokens)).logprobs.tolist()
    for name, path in adapters.items()
}
(directory / "expected.json").write_text(json.dumps(found))
parallel.destroy()
"""


@pytest.mark.slow
@pytest.mark.gpu
def test_adapters_on_experts_are_served(tmp_path: Path) -> None:
    """With `TANDEM_EXPERT_LORA=1`, the log-probs of vLLM agree with log-probs that the CPU computes
    in fp32. Every token uses all experts, so rounding to bf16 can't change the choice of
    experts."""
    tiny_model.write_tokenizer(tmp_path / "model")
    write_random_model(
        tmp_path / "model",
        family="qwen3_moe",
        vocab_size=320,
        hidden_size=256,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        max_position_embeddings=4096,
    )
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", CPU_LOGPROBS, tests, str(tmp_path), json.dumps(TOKENS)]
    subprocess.run(command, check=True, timeout=300)
    expected = {
        name: np.array(values)
        for name, values in json.loads((tmp_path / "expected.json").read_text()).items()
    }
    moved = np.mean(np.abs(expected["everywhere"] - expected["base"]))
    assert moved > 0.5
    variables = {
        "TANDEM_DEVICE": "cuda",
        "TANDEM_EXPERT_LORA": "1",
        "TANDEM_MAX_LORA_RANK": "8",
        "TANDEM_GPU_MEMORY_UTILIZATION": "0.3",
        "TANDEM_ENFORCE_EAGER": "1",
    }
    with VllmServer(tmp_path, tmp_path / "model", **variables) as server:
        client = server.client()
        client.load_lora("everywhere", str(tmp_path / "everywhere"))
        for name, logprobs in expected.items():
            error = np.mean(np.abs(np.array(client.prompt_logprobs(name, TOKENS)[0]) - logprobs))
            print(
                f"{name}: mean |vLLM bf16 - fp32| = {error:.3f} nats; the adapter moved {moved:.2f}"
            )
            assert error < 0.1 * max(moved, 1.0), name
