"""The base model's files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tandem.cli.checks import Check
from tandem.config import Settings
from tandem.errors import TandemError
from tandem.families.registry import read_arch


def model_checks(settings: Settings) -> Iterator[Check]:
    """Configuration, weights and tokenizer; of a hub name only the configuration."""
    if settings.base_model is None:
        yield Check("fail", "base model", "TANDEM_BASE_MODEL is not set", "name a Hugging Face directory or a hub name")
        return
    model = settings.model_path()
    try:
        arch = read_arch(model)
    except TandemError as error:
        yield Check("fail", "base model", error.message, "choose another TANDEM_BASE_MODEL")
        return
    found = (
        f"{model}: {arch.model_type}, {arch.num_layers} layers of {arch.hidden_size}, vocabulary {arch.vocab_size}, "
        f"{arch.max_positions} positions"
    )
    yield Check("ok", "base model", found)
    directory = Path(model)
    if not directory.is_dir():
        return
    if not any(directory.glob("*.safetensors")):
        yield Check("fail", "base model: weights", f"{directory} has no *.safetensors", "download the whole model")
    if unreadable := sorted(path.name for path in directory.glob("*") if not os.access(path, os.R_OK)):
        found = f"uid {os.getuid()} can't read {', '.join(unreadable[:3])}"
        yield Check("fail", "base model: weights", found, f"make the files readable: chmod -R a+rX {directory}")
    if not (directory / "tokenizer.json").is_file():
        remedy = "SFT on messages and vLLM's chat API need one"
        yield Check("warn", "base model: tokenizer", f"{directory} has no tokenizer.json", remedy)
