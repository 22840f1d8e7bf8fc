"""The tokens at which vLLM stops, and the trained turns that do not end with such a token."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tandem.data.packing import LinearSequence
from tandem.errors import InvalidInput

# White space and special tokens may follow a turn's stop token. So the stop token is looked for
# among the last `_TAIL` tokens of a turn.
_TAIL = 8


class Stops:
    """The stop tokens of a tokenizer: their `ids` and `texts`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.ids = tokenizer, stop_ids(tokenizer)
        self.texts = tokenizer.convert_ids_to_tokens(sorted(self.ids))
        self._special = {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def endings(self, sequences: Iterable[LinearSequence]) -> list[int | None]:
        """For each trained turn: None if the turn ends with a stop token, else the turn's last
        token. Special tokens and white space may follow the stop token."""
        return [
            self._ending([int(token) for token in one.tokens[run[-_TAIL:]]])
            for one in sequences
            for run in np.split(one.trained, np.flatnonzero(np.diff(one.trained) > 1) + 1)
        ]

    def _ending(self, last: list[int]) -> int | None:
        for token in reversed(last):
            if token in self.ids:
                return None
            if token not in self._special and self._tokenizer.decode([token]).strip():
                break
        return last[-1]

    def problem(self, last: int) -> str:
        """The error message for turns that end with the token `last` instead of a stop token. The
        message also says what to do."""
        names = ", ".join(map(repr, self.texts))
        said = f"no trained turn ends with a token at which vLLM stops ({names})"
        if last in self._special:
            return (
                f"{said}, but with {self._tokenizer.decode([last])!r}, so the model would never"
                f" stop; add {last} to eos_token_id in the model's generation_config.json"
            )
        return (
            f"{said}, so the model would never stop; use a chat template that ends each turn with"
            " one, and whose {% generation %} encloses it"
        )


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The token ids at which vLLM stops: the tokenizer's EOS, and `eos_token_id` of the model's
    generation_config.json (of config.json if that file is missing)."""
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
    """A JSON file in a model's directory or at a hub name; None if the file does not exist."""
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
