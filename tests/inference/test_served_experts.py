"""A mixture of experts in the real vLLM on the CPU: what it serves right, and what is not let through."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_model

from policies import linear_row, make_policy, write_random_adapter
from published_runs import commit, make_run
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.store import AdapterStore
from tandem.spool import Spool
from tandem.spool.schema import LoraShape, Probe
from tandem.vllm_client.admin import AdminClient
from tiny import write_random_model
from vllm_server import ADMIN_TOKEN, API_KEY, VllmServer

pytestmark = pytest.mark.slow

ATTENTION = LoraShape(rank=4, alpha=10.0, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
EVERYWHERE = LoraShape(rank=4, alpha=10.0)
TOKENS = np.random.default_rng(5).integers(0, 256, 100).tolist()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    directory = tmp_path_factory.mktemp("vllm")
    tiny_model.write_tokenizer(directory / "model")
    write_random_model(directory / "model", family="qwen3_moe", vocab_size=320, hidden_size=64, head_dim=32,
                       moe_intermediate_size=32, max_position_embeddings=4096)  # fmt: skip
    server = VllmServer(directory, directory / "model")
    try:
        server.start()
        yield server
    finally:
        server.close()


def test_adapters_on_attention_are_served_and_those_on_experts_are_not(
    experts: VllmServer, alone: None, tmp_path: Path
) -> None:
    spool = Spool.create(tmp_path / "spool")

    def logprobs(lora: LoraShape, adapter: Path | None) -> list[float]:
        return make_policy(experts.model, lora, adapter)(linear_row(TOKENS)).logprobs.tolist()

    base = logprobs(ATTENTION, None)
    with AdminClient(experts.url, api_key=API_KEY, admin_token=ADMIN_TOKEN) as admin:
        publisher = Publisher(spool, admin, AdapterStore(tmp_path / "store"), grace=0.5)
        assert admin.prompt_logprobs("base", TOKENS) == pytest.approx(base, abs=1e-3)
        for run, lora in (("attention", ATTENTION), ("everywhere", EVERYWHERE)):
            make_run(spool, run, experts.model, lora)
            adapter = write_random_adapter(tmp_path / run, experts.model, lora)
            trained = logprobs(lora, adapter)
            assert np.mean(np.abs(np.array(trained) - base)) > 0.5
            commit(spool, run, adapter, Probe(tokens=[TOKENS], logprobs=[trained], previous=[base], base=[base]))
        publisher.once()
        served = spool.served.get("attention")
        assert served is not None
        assert (served.step, served.refused_step) == (1, None)
        assert served.mean_abs_logprob_error < 1e-4
        # vLLM takes the file, says nothing, and leaves the experts' adapters out (0.32).
        served = spool.served.get("everywhere")
        assert served is not None
        assert (served.step, served.refused_step) == (0, 1)
        assert "differ from the trainer's" in str(served.refused_reason)
        assert experts.healthy()


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
found = {name: make_policy(model, lora, path)(linear_row(tokens)).logprobs.tolist() for name, path in adapters.items()}
(directory / "expected.json").write_text(json.dumps(found))
parallel.destroy()
"""


@pytest.mark.gpu
def test_adapters_on_experts_are_served_on_a_gpu(tmp_path: Path) -> None:
    """`TANDEM_EXPERT_LORA=1` against fp32 on the CPU. Every token goes to all experts: none to others in bf16."""
    tiny_model.write_tokenizer(tmp_path / "model")
    write_random_model(tmp_path / "model", family="qwen3_moe", vocab_size=320, hidden_size=256, head_dim=64,
                       num_experts=4, num_experts_per_tok=4, moe_intermediate_size=128,
                       max_position_embeddings=4096)  # fmt: skip
    tests = str(Path(__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", CPU_LOGPROBS, tests, str(tmp_path), json.dumps(TOKENS)], check=True, timeout=300
    )
    expected = {name: np.array(values) for name, values in json.loads((tmp_path / "expected.json").read_text()).items()}
    moved = np.mean(np.abs(expected["everywhere"] - expected["base"]))
    assert moved > 0.5
    server = VllmServer(
        tmp_path, tmp_path / "model", TANDEM_DEVICE="cuda", TANDEM_EXPERT_LORA="1", TANDEM_MAX_LORA_RANK="8",
        TANDEM_GPU_MEMORY_UTILIZATION="0.3", TANDEM_ENFORCE_EAGER="1",
    )  # fmt: skip
    try:
        server.start(500)
        with AdminClient(server.url, api_key=API_KEY, admin_token=ADMIN_TOKEN) as admin:
            admin.load_lora("everywhere", str(tmp_path / "everywhere"))
            for name, logprobs in expected.items():
                error = np.mean(np.abs(np.array(admin.prompt_logprobs(name, TOKENS)) - logprobs))
                print(f"{name}: mean |vLLM bf16 - fp32| = {error:.3f} nats; the adapter moved {moved:.2f}")
                assert error < 0.1 * max(moved, 1.0), name
    finally:
        server.close()
