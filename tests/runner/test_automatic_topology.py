"""TANDEM_TOPOLOGY=auto: the runner chooses the sizes from its GPUs' memory, and its ranks get them."""

import json

import pytest

import fake_nvml
from tandem.config import Settings
from tandem.errors import InvalidInput
from tandem.families.topology import Sizes
from tandem.trainer.launch.launcher import rank_environment
from tandem.trainer.runner.loop import with_topology

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960,
}  # fmt: skip


def gpu(number: int, gib: int) -> dict:
    memory = {"total": gib * 2**30, "free": gib * 2**30, "reserved": 0, "used": 0}
    return fake_nvml.gpu(f"GPU-{number}", nvmlDeviceGetMemoryInfo=memory)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    for name, value in {"BASE_MODEL": str(tmp_path), "TRAINER_RANKS": "2", "TOPOLOGY": "auto"}.items():
        monkeypatch.setenv(f"TANDEM_{name}", value)
    return Settings()


@pytest.mark.parametrize(
    ("gib", "expected"), [((100, 100), Sizes(data=2)), ((100, 16), Sizes(tensor=2, sequence=True))]
)
def test_ranks_have_the_sizes_that_fit_the_smallest_gpu(settings, nvml, monkeypatch, gib, expected):
    """8 B parameters are 15.3 GiB; 16 GiB are too few beside what training needs."""
    nvml.set(*(gpu(n, size) for n, size in enumerate(gib)))
    chosen = with_topology(settings)
    assert Sizes.of(chosen) == expected
    of_ranks = rank_environment(chosen)
    for name in ("TANDEM_TOPOLOGY", *Sizes().variables()):
        monkeypatch.setenv(name, of_ranks[name])
    assert Sizes.of(Settings()) == expected


def test_no_gpu_and_no_fitting_topology_are_refused_and_given_sizes_stay(settings, nvml):
    nvml.set()
    with pytest.raises(InvalidInput, match="plans the memory of GPUs"):
        with_topology(settings)
    nvml.set(*(gpu(n, 4) for n in range(2)))
    with pytest.raises(InvalidInput, match="no topology of 2 GPUs fits"):
        with_topology(settings)
    given = settings.model_copy(update={"topology": "given"})
    assert with_topology(given) is given
