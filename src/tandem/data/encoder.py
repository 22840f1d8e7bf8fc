"""Turns texts into token ids. The package `fastokens` is many times faster than the model's own
tokenizer. `fastokens` is used only if it gives the same tokens as the model's tokenizer for a
sample of text. The model's tokenizer encodes the texts that fastokens can't encode."""

from itertools import pairwise
from typing import Any

import numpy as np

from tandem.data.packed_format import Int32

_SAMPLE = (
    "It's 1,234.5 km; we'll see -- \"they've\" 3x DON'T\n\n\n  def f(x):\n\t\treturn x**2  # π ≈"
    " 3.14159\r\n \u00a0 Über straße, ça va? Привет, мир! 你好,世界。 日本語のテキスト 안녕하세요"
    " مرحبا שלום हिन्दी ไทย e\u0301 \ufb01 Ⅷ ½ 🙂👩\u200d👧 \u200b\ufeff\x00"
    " https://example.org/a_b?c=%20&d[]=1 <think>a</think> <| x |> {{ y }} $\\alpha$"
    " aaaaaaaaaaaaaaaaaaaaaaaa 0000000 ......  ____ \t \n"
)


class Encoder:
    """Encodes texts. `tokenizer`: the tokenizer of transformers. No special tokens are added;
    special tokens in a text are recognised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:  # a tokenizer.json may ask for padding and truncation
            self._backend.no_truncation()
            self._backend.no_padding()
        self._fast = self._checked()

    def encode(self, text: str) -> Int32:
        """The token ids of a text, int32 [tokens]."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: list[str]) -> list[Int32]:
        """The token ids of each text, int32 [tokens]."""
        if self._fast is not None:
            try:
                return _flat(self._fast, texts)
            except ValueError:  # fastokens refuses a regular expression of this tokenizer
                pass
        return self._exact(texts)

    def _exact(self, texts: list[str]) -> list[Int32]:
        if self._backend is None:
            found = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            found = [
                encoding.ids
                for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)
            ]
        return [np.array(ids, np.int32) for ids in found]

    def _checked(self) -> Any:
        """The tokenizer of fastokens. Returns None if fastokens is not installed, can't read the
        model's tokenizer, or gives different tokens."""
        if self._backend is None:
            return None
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        parts = _SAMPLE.split(" ")
        texts = [
            _SAMPLE,
            *parts,
            *(f"{part} {token}{part}\n{token} " for token in added for part in parts[:3]),
            "",
        ]
        try:
            from fastokens import Tokenizer

            fast = Tokenizer.from_json_str(self._backend.to_str())
            same = all(map(np.array_equal, _flat(fast, texts), self._exact(texts)))
        except (ImportError, ValueError, NotImplementedError):
            return None
        return fast if same else None


def _flat(fast: Any, texts: list[str]) -> list[Int32]:
    ids, ends = fast.encode_batch_flat(texts)
    tokens = np.frombuffer(ids, np.uint32).astype(np.int32)
    return [tokens[begin:end] for begin, end in pairwise(np.frombuffer(ends, np.uint64).tolist())]
