"""Comparisons with transformers, for checkpoints that have a vision tower."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from model.family_cases import SEQUENCES
from policies import all_logits, make_policy, write_random_adapter
from tandem.families.adapter import lora_modules
from tandem.families.registry import read_arch
from tandem.inference.merged_model import write_merged_model
from tandem.model.policy import Policy
from tandem.spool.schema import LoraShape


def theirs(directory: Path) -> torch.nn.Module:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )


def assert_same_logits(policy: Policy, reference: torch.nn.Module) -> None:
    for sequence in SEQUENCES:
        with torch.no_grad():
            expected, found = reference(sequence[None]).logits[0], all_logits(policy, sequence)
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def assert_merged_beside_the_tower(directory: Path, model: Path, lora: LoraShape) -> None:
    """Checks that a merged model has the names of `model`'s tensors and the logits of `model` with
    the adapter. The tensors without an adapter, such as the vision tower's, must be unchanged."""
    adapter = write_random_adapter(directory / "adapter", model, lora)
    write_merged_model(directory / "merged", model, adapter, lora)
    assert_same_logits(make_policy(model, lora, adapter), theirs(directory / "merged"))
    before, after = (load_file(d / "model.safetensors") for d in (model, directory / "merged"))
    assert before.keys() == after.keys()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {f"{name}.weight" for name in lora_modules(read_arch(str(model)), lora)}
