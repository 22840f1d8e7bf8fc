"""What the real vLLM computes with a served adapter is what the trainer's policy computes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from policies import linear_row, make_policy, write_random_adapter
from published_runs import LORA, commit, make_run
from tandem.inference.publisher.publisher import Publisher
from tandem.inference.publisher.store import AdapterStore
from tandem.spool import Spool
from tandem.spool.schema import Probe
from tandem.vllm_client.admin import AdminClient
from vllm_server import ADMIN_TOKEN, API_KEY, VllmServer

pytestmark = pytest.mark.slow

names = (f"served-{i}" for i in itertools.count())


@pytest.fixture
def admin(vllm: VllmServer) -> Iterator[AdminClient]:
    with AdminClient(vllm.url, api_key=API_KEY, admin_token=ADMIN_TOKEN) as client:
        yield client


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.create(tmp_path / "spool")


@pytest.fixture
def publisher(spool: Spool, admin: AdminClient, tmp_path: Path) -> Publisher:
    return Publisher(spool, admin, AdapterStore(tmp_path / "store"), grace=0.5)


class Trainer:
    """The trainer's side: adapters of a model, and log-probs of fixed sequences under them."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model, self.directory = model, directory
        rng = np.random.default_rng(5)
        self.sequences = [rng.integers(0, 256, size).tolist() for size in (150, 33, 64)]

    def adapter(self, seed: int, scale: float = 1.0) -> Path:
        """A random adapter; `scale` multiplies B."""
        from safetensors.torch import load_file, save_file

        path = write_random_adapter(self.directory / f"adapter-{seed}-{scale}", self.model, LORA, seed=seed)
        file = path / "adapter_model.safetensors"
        save_file({k: v * scale if "lora_B" in k else v for k, v in load_file(file).items()}, file)
        return path

    def logprobs(self, adapter: Path | None) -> list[list[float]]:
        policy = make_policy(self.model, LORA, adapter)
        return [policy(linear_row(tokens)).logprobs.tolist() for tokens in self.sequences]

    def probe(self, adapter: Path, previous: Path | None) -> Probe:
        return Probe(
            tokens=self.sequences,
            logprobs=self.logprobs(adapter),
            previous=self.logprobs(previous),
            base=self.logprobs(None),
        )


@pytest.fixture
def trainer(vllm: VllmServer, alone: None, tmp_path: Path) -> Trainer:
    return Trainer(vllm.model, tmp_path)


def test_served_adapter_has_the_trainers_logprobs(
    vllm: VllmServer, spool: Spool, publisher: Publisher, trainer: Trainer, record_property
) -> None:
    run = make_run(spool, next(names), vllm.model).name
    publisher.once()
    served = spool.served.get(run)
    assert served is not None
    assert (served.step, served.refused_step) == (0, None)
    assert served.mean_abs_logprob_error < 1e-6

    adapter = trainer.adapter(1)
    probe = trainer.probe(adapter, None)
    moved = np.mean(np.abs(np.concatenate(probe.logprobs) - np.concatenate(probe.previous)))
    assert moved > 0.5, "an adapter that changes little says little"
    commit(spool, run, adapter, probe)
    publisher.once()
    served = spool.served.get(run)
    assert served is not None
    assert served.model == f"{run}@1"
    assert served.tokens_checked == 149 + 32 + 63
    print(f"mean |vLLM - trainer| = {served.mean_abs_logprob_error:.2e} nats; the adapter moved {moved:.2f}")
    record_property("mean_abs_logprob_error", served.mean_abs_logprob_error)
    # fp32 on both sides: far below the 0.02 that is allowed.
    assert served.mean_abs_logprob_error < 1e-4


def test_wrong_adapters_are_refused(
    vllm: VllmServer, spool: Spool, admin: AdminClient, publisher: Publisher, trainer: Trainer
) -> None:
    run = make_run(spool, next(names), vllm.model).name
    right, small, other = trainer.adapter(1), trainer.adapter(1, 1.001), trainer.adapter(2)

    def refused(step: int, word: str) -> None:
        publisher.once()
        served = spool.served.get(run)
        assert served is not None
        assert (served.step, served.refused_step) == (1, step)
        assert word in str(served.refused_reason)
        assert f"{run}@{step}" not in admin.models()
        assert f"{run}@1" in admin.models()
        spool.checkpoints.rollback(run, 1)

    commit(spool, run, right, trainer.probe(right, None))
    publisher.once()
    # Other weights than the probe was computed with, in a checkpoint whose hashes are all right.
    commit(spool, run, other, trainer.probe(small, right))
    refused(2, "differ from the trainer's")
    # The weights of the step before, of which this one is so small a step that the tolerance can't tell them apart.
    probe = trainer.probe(small, right)
    assert np.mean(np.abs(np.concatenate(probe.logprobs) - np.concatenate(probe.previous))) < 0.02
    commit(spool, run, right, probe)
    refused(2, "nearer to those of the checkpoint before")
    # The same small step with its own weights is served.
    commit(spool, run, small, probe)
    publisher.once()
    served = spool.served.get(run)
    assert served is not None
    assert (served.step, served.refused_step) == (2, None)


def test_rollback_serves_the_new_checkpoint_of_the_same_name(
    vllm: VllmServer, spool: Spool, admin: AdminClient, publisher: Publisher, trainer: Trainer
) -> None:
    """Neither the old adapter nor blocks that it left in the prefix cache."""
    run = make_run(spool, next(names), vllm.model).name
    prompt = trainer.sequences[0][:140]  # more than the block of 128 that the prefix cache keeps on the CPU

    def first_token() -> tuple[int, float]:
        """Sampled, from the prefix cache where it has the prompt: what a client gets."""
        answer = httpx.post(
            f"{vllm.url}/v1/completions",
            headers={"Authorization": f"Bearer {API_KEY}"},
            json={
                "model": f"{run}@1",
                "prompt": prompt,
                "max_tokens": 1,
                "temperature": 1,
                "logprobs": 0,
                "return_token_ids": True,
            },
            timeout=120,
        ).json()["choices"][0]
        return answer["token_ids"][0], answer["logprobs"]["token_logprobs"][0]

    def cache_hits() -> float:
        text = httpx.get(f"{vllm.url}/metrics", timeout=60).text
        return sum(float(n) for n in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)", text, re.MULTILINE))

    def expected(adapter: Path, token: int) -> float:
        row = linear_row([*prompt, token], trained=[len(prompt)])
        return float(make_policy(trainer.model, LORA, adapter)(row).logprobs[0])

    for seed in (1, 2):
        adapter = trainer.adapter(seed)
        commit(spool, run, adapter, trainer.probe(adapter, None))
        publisher.once()
        served = spool.served.get(run)
        assert served is not None
        assert served.model == f"{run}@1"
        before = cache_hits()
        for _ in range(2):
            token, logprob = first_token()
            assert logprob == pytest.approx(expected(adapter, token), abs=1e-3)
        assert cache_hits() > before, "the prefix cache was not used: this test says nothing about it"
        spool.checkpoints.rollback(run, 0)
        publisher.once()
        assert f"{run}@1" not in admin.models()
        served = spool.served.get(run)
        assert served is not None
        assert served.step == 0
