"""The tokens at which vLLM stops, and the trained turns that do not end with one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.packing import LinearSequence
from tandem.errors import InvalidInput

# A turn ends with at most so many tokens: white space and special ones behind the stop token.
_TAIL = 8


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's EOS and `eos_token_id` of the model's generation_config.json, as vLLM does
    (where there is no such file, that of config.json)."""
    found = {tokenizer.eos_token_id}
    path = str(tokenizer.name_or_path)
    if path:
        named = _json(path, "generation_config.json")
        if named is None:
            named = _json(path, "config.json") or {}
            named = {**named.get("text_config", {}), **named}
        more = named.get("eos_token_id")
        found |= set(more) if isinstance(more, list) else {more}
    return frozenset(token for token in found if isinstance(token, int))


def _json(path: str, name: str) -> dict[str, Any] | None:
    """A file of a model's directory or of a hub's; None where there is none."""
    from transformers.utils import cached_file

    try:
        file = cached_file(
            path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        content = json.loads(Path(file).read_bytes()) if file else None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"can't read {name} of {path}: {error}", field="base_model") from error
    return content if isinstance(content, dict) else None


def endings(
    tokenizer: Any, stops: frozenset[int], sequences: Iterable[LinearSequence]
) -> list[int | None]:
    """For each trained turn None where it ends with a token at which vLLM stops, else its last
    token. Special tokens and white space may follow it."""
    found: list[int | None] = []
    special = set(tokenizer.all_special_ids)
    for one in sequences:
        for run in np.split(one.trained, np.flatnonzero(np.diff(one.trained) > 1) + 1):
            last = [int(token) for token in one.tokens[run[-_TAIL:]]]
            found.append(last[-1])
            for token in reversed(last):
                if token in stops:
                    found[-1] = None
                    break
                if token not in special and tokenizer.decode([token]).strip():
                    break
    return found


def endless_problem(tokenizer: Any, stops: frozenset[int], last: int) -> str:
    """Says that no turn ends with a stop token, but with `last`, and what to do."""
    names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(stops))))
    said = f"no trained turn ends with a token at which vLLM stops ({names})"
    if last in set(tokenizer.all_special_ids):
        return (
            f"{said}, but with {tokenizer.decode([last])!r}, so the model would never stop; add"
            f" {last} to eos_token_id in the model's generation_config.json"
        )
    return (
        f"{said}, so the model would never stop; use a chat template that ends each turn with one,"
        " and whose {% generation %} encloses it"
    )
