"""Texts become the same tokens as with transformers' tokenizer, whether the encoder uses fastokens
or transformers."""

import random
from types import SimpleNamespace
from typing import Any

import fastokens
import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from data.chat_tokenizer import SPLIT
from tandem.data.encoder import Encoder

LLAMA = SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|end|>")
CORPUS = [
    "It's a low sun; the sun sets slowly.",
    "def low(x):\n    return x * 12345  # π é 中文\n",
    "😀 NO — 'VE  \t\n",
] * 40
PIECES = [
    *"aB. \n\t\r'_{é中ßㅎ\u0301\u00a0\u200b\u2028\x00Ⅷ",
    "  ",
    "\r\n",
    "'re",
    "'VE",
    "low ",
    "123",
    "🙂",
    "👩\u200d👧",
    *SPECIAL,
    "<|im_",
    "|>",
    "<think>",
    "\ufb01",
    "\ufeff",
]


def made(kind: str) -> Any:
    """A tokenizer with the structure that the published models of this kind have."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    if kind == "gemma":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        trainer = trainers.BpeTrainer(special_tokens=["<unk>", *byte_tokens])
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordPieceTrainer(special_tokens=["<unk>"])
    else:
        tokenizer = Tokenizer(models.BPE())
        if kind == "qwen":
            tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(SPLIT if kind == "qwen" else LLAMA), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        tokenizer.pre_tokenizer = (
            byte_level if kind == "gpt2" else pre_tokenizers.Sequence([split, byte_level])
        )
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL[:2]]
    )
    tokenizer.add_special_tokens(
        [AddedToken(SPECIAL[2], special=True, normalized=False, rstrip=True, lstrip=True)]
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama", "gemma", "wordpiece"])
def test_tokens_are_those_of_transformers(kind: str) -> None:
    tokenizer, draw = made(kind), random.Random(1)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(40))) for _ in range(3000)]
    encoder = Encoder(tokenizer)
    # The encoder uses fastokens for all kinds except `wordpiece`. Without fastokens the test would
    # compare transformers with itself.
    assert (encoder._fast is None) == (kind == "wordpiece")
    for text, tokens in zip(texts, encoder.encode_all(texts), strict=True):
        assert tokens.dtype == np.int32
        assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=False), text
    assert encoder.encode("").tolist() == []
    assert encoder.encode_all([]) == []


def test_one_that_gives_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    other = fastokens.Tokenizer.from_json_str(made("qwen").backend_tokenizer.to_str())
    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=lambda _: other))
    assert Encoder(made("llama"))._fast is None


def test_a_text_that_it_gives_up_is_tokenised_all_the_same() -> None:
    def gives_up(texts: list[str]) -> Any:
        raise ValueError("match limit exceeded")

    tokenizer = made("qwen")
    encoder = Encoder(tokenizer)
    encoder._fast = SimpleNamespace(encode_batch_flat=gives_up)
    assert encoder.encode("low sun").tolist() == tokenizer.encode(
        "low sun", add_special_tokens=False
    )
