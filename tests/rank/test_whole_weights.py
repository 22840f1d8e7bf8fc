"""Ranks send whole weights or write them as files. Bit by bit, these weights equal an independent
merge of base weights and adapter."""

from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inference.worker_models import merged
from policies import LORA, write_random_adapter
from rank import whole_weights_rank
from ranks import run_ranks
from tandem.families.adapter import stacked_name
from tandem.families.registry import arch_from_config, read_arch, weight_rules
from tandem.model.transfer.parts import buffers, rule_parts, shares
from tandem.planning.plan import describe
from tandem.system.safetensors_header import read_header
from tandem.topology.sizes import Sizes
from tandem.trainer.rank import model_files
from tiny import write_random_model

CASES: list[tuple[str, dict[str, Any], int]] = [
    ("qwen3", {}, 1),
    ("qwen3", {}, 2),
    ("qwen2", {"tie_word_embeddings": True, "head_dim": 8}, 2),
    ("qwen3_moe", {}, 1),
]

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[2]}")
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    family, sizes, tp = request.param
    directory = tmp_path_factory.mktemp(family)
    model = write_random_model(directory / "model", family=family, num_hidden_layers=3, **sizes)
    write_random_adapter(directory / "adapter", model, LORA, seed=3)
    run_ranks(tp, whole_weights_rank.__file__, str(directory), str(tp))
    return directory, tp


def expected(directory: Path) -> dict[str, torch.Tensor]:
    return merged(load_file(directory / "model/model.safetensors"), directory / "adapter")


def test_ranks_send_each_element_once(written: tuple[Path, int]) -> None:
    directory, tp = written
    whole = expected(directory)
    stacks = defaultdict(list)
    for name in sorted(
        whole, key=lambda name: [int(w) if w.isdigit() else w for w in name.split(".")]
    ):
        stacks[stacked_name(name)].append(whole[name])
    tensors = {name: torch.stack(of) if "*" in name else of[0] for name, of in stacks.items()}
    for targets in (None, LORA.targets):
        times = {name: torch.zeros_like(value) for name, value in tensors.items()}
        for rank in range(tp):
            for wanted, name, of, values in torch.load(
                directory / f"sent{rank}.pt", weights_only=False
            ):
                if wanted == targets:
                    assert torch.equal(values, tensors[name][of]), name
                    times[name][of] += 1
        for name, count in times.items():
            sent = targets is None or name.split(".")[-2] in targets
            assert (count == (sent and "bias" not in name if targets else 1)).all(), name


def test_the_files_are_a_model_that_transformers_loads(written: tuple[Path, int]) -> None:
    directory, _ = written
    model = AutoModelForCausalLM.from_pretrained(directory / "merged", dtype=torch.float32)
    files = sorted((directory / "merged").glob("*.safetensors"))
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    whole = expected(directory)
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], whole[name]) for name in whole)
    model.save_pretrained(directory / "again")
    again = load_file(directory / "again/model.safetensors")
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_large_model_is_written_in_several_files(
    written: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = written
    monkeypatch.setattr(model_files, "SHARD_BYTES", 20_000)
    arch = read_arch(str(directory / "model"))
    files = model_files.ModelFiles(tmp_path / "merged", arch, torch.float32)
    files.create(directory / "model")
    written_files = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(written_files) > 3
    for file in written_files:
        # `read_header` refuses a file that is shorter than its tensors. The files must have their
        # full size before a rank writes tensors. If a file is too short, an NFS client overwrites
        # tensors that other hosts have written.
        entries = read_header(file)
        assert len(entries) == 1 or sum(entry.nbytes for entry in entries.values()) <= 20_000


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(tensor=2, data=2, expert=2),
        Sizes(tensor=2, data=3, expert_tensor=3),
        Sizes(tensor=2, data=6, expert=3),
        Sizes(tensor=4, data=3, expert=3, expert_tensor=2),
        Sizes(tensor=2, data=3, expert_tensor=3, pipeline=2),
    ],
    ids=describe,
)
def test_ranks_write_what_they_hold_and_each_element_once(sizes: Sizes) -> None:
    """Experts and other weights are cut into different numbers of parts. In some cases neither
    number divides the other number."""
    arch = arch_from_config(MIXTURE)
    written: dict[str, list[tuple[slice, ...]]] = defaultdict(list)
    for rank in range(sizes.world):
        place = sizes.place(rank)
        held = {
            part.name: part.in_tensor
            for rule in weight_rules(arch)
            for part in rule_parts(rule, sizes, place)
        }
        for part in chain(*shares(arch, sizes=sizes, rank=rank, most=100)):
            inside = zip(part.in_tensor, held[part.name], strict=True)
            assert all(own.start <= at.start and at.stop <= own.stop for at, own in inside), (
                rank,
                part,
            )
            written[part.name].append(part.in_tensor)
    for rule in weight_rules(arch):
        for name, shape in rule.sources.items():
            stacked = stacked_name(name)
            count = np.zeros(shape if stacked == name else (rule.num_experts, *shape), int)
            for of in written[stacked]:
                count[of] += 1
            assert (count == 1).all(), (name, np.unique(count))


@pytest.mark.parametrize("tp", [1, 2])
def test_no_buffer_is_longer_than_allowed(written: tuple[Path, int], tp: int) -> None:
    """A single part may be longer than `most` elements in three cases: the part is one row, the
    rows of one head group, or the rows of one expert. This model has no such part."""
    arch = read_arch(str(written[0] / "model"))
    most = 3000
    for rank in range(tp if arch.moe is None else 1):
        lists = list(
            buffers(
                arch, None, sizes=Sizes(tensor=tp if arch.moe is None else 1), rank=rank, most=most
            )
        )
        assert all(sum(part.size for part in parts) <= most for parts in lists)
        assert sum(len(parts) > 1 for parts in lists) > 1
