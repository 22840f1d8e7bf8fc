"""vLLM serves the adapters and models that the oracle's ranks have trained. The log-probs of vLLM
agree with those of transformers and PEFT within 1e-4 nats.

vLLM serves adapters without merging them. On the CPU vLLM can't serve adapters on experts, so such
adapters are merged into models as by `tandem export`.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from oracle import reference, serve
from oracle.breaks import of_experts
from oracle.cases import SERVED, SERVED_FAMILIES, Case, draw
from oracle.test_oracle import Oracle
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.merged_model import write_merged_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SEEDS = range(SERVED, SERVED + 4 * len(SERVED_FAMILIES))
NATS = 1e-4


def sequences(case: Case) -> list[list[int]]:
    return [tokens for row in case.rows()[:2] for tokens in row.sequences if len(tokens) > 1][:6]


def trained(case: Case, directory: Path, made: dict[str, Any]) -> serve.Order:
    """The order that makes vLLM load the result of a case. Writes the result's files."""
    order: serve.Order = {
        "model": str(directory / "model"),
        "adapter": None,
        "sequences": sequences(case),
    }
    if case.lora is None:
        shutil.copy(directory / "model/config.json", made["made"])
        return order | {"model": str(made["made"])}
    adapter = directory / "trained"
    shutil.copytree(directory / "adapter", adapter)
    save_file(made["after"], adapter / WEIGHTS_FILE)
    if of_experts(case):
        write_merged_model(directory / "merged", directory / "model", adapter, case.lora)
        return order | {"model": str(directory / "merged")}
    return order | {"adapter": str(adapter)}


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Oracle, list[torch.Tensor]]]:
    """Maps the seed of each case to the oracle that has trained the case, and to vLLM's log-probs
    of the case's `sequences`."""
    items = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    seeds = [item.callspec.params["seed"] for item in items]
    oracle = Oracle(tmp_path_factory.mktemp("served"))
    oracle.run([(seed, None) for seed in seeds])
    orders = oracle.directory / "orders.json"
    orders.write_text(
        json.dumps([trained(draw(s), oracle.directory / str(s), oracle.ours(s)) for s in seeds])
    )
    command = [sys.executable, serve.__file__, str(orders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {
        seed: (oracle, found)
        for seed, found in zip(seeds, torch.load(orders.with_suffix(".pt")), strict=True)
    }


@pytest.mark.sample(1, of="families that vLLM serves")
@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: str(draw(seed)))
def test_vllm_serves_what_was_trained(served: Any, seed: int) -> None:
    oracle, found = served[seed]
    case, directory = draw(seed), oracle.directory / str(seed)
    model, untrained = (reference.Model(case, directory, torch.float32) for _ in range(2))
    made = oracle.ours(seed)
    if case.lora is None:
        model.base = transformers.AutoModelForCausalLM.from_pretrained(
            made["made"], dtype=torch.float32
        )
    else:
        with torch.no_grad():
            for name, parameter in model.parameters.items():
                parameter.copy_(made["after"][name])
    moved = 0.0
    for tokens, theirs in zip(sequences(case), found, strict=True):
        ours, before = (logprobs(one, tokens) for one in (model, untrained))
        assert (theirs - ours).abs().max() <= NATS
        moved = max(moved, float((ours - before).abs().max()))
    assert moved > 10 * NATS, "the comparison says nothing"


def logprobs(model: reference.Model, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor(tokens)
    with torch.no_grad():
        return torch.log_softmax(model.logits(ids)[:-1], -1).gather(-1, ids[1:, None])[:, 0]
