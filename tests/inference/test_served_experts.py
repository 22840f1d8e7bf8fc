"""A mixture of experts in the real vLLM on the CPU: what it serves right, and what is not let through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_model

from policies import linear_row, make_policy, write_random_adapter
from published_runs import commit, make_run
from tandem.inference.admin import AdminClient
from tandem.inference.publisher import Publisher
from tandem.inference.store import AdapterStore
from tandem.model import device, parallel
from tandem.spool import Spool
from tandem.spool.schema import LoraShape, Probe
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


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    device.activate("cpu")
    parallel.init_parallel()
    yield
    parallel.destroy()


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
            commit(spool, run, adapter, Probe(tokens=[TOKENS], logprobs=[trained], previous=[base]))
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
