"""Texts become the tokens that transformers' tokenizer gives, whichever package computes them."""

import random
from typing import Any

import fastokens
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.data.encoder import Encoder

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|end|>")
CORPUS = [
    "It's a low sun; the sun sets slowly.",
    "def low(x):\n    return x * 12345  # π é 中文\n",
    "😀 NO — 'VE  \t\n",
] * 40
PIECES = [
    *"aB. \n\t\r'_{é中ßㅎ\u0301\u00a0\u200b\u2028\x00Ⅷ", "  ", "\r\n", "'re", "'VE", "low ", "123", "🙂", "👩\u200d👧",
    *SPECIAL, "<|im_", "|>", "<think>", "\ufb01", "\ufeff",
]  # fmt: skip


def split(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def made(kind: str) -> Any:
    """A tokenizer of a kind that models have."""
    tokenizer = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind in ("qwen", "llama"):
        tokenizer.pre_tokenizer = split(QWEN if kind == "qwen" else LLAMA)
        if kind == "qwen":
            tokenizer.normalizer = normalizers.NFC()
    elif kind == "gemma":
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(special_tokens=["<unk>", *byte_tokens]))
        vocabulary = tokenizer.get_vocab()
        assert set(byte_tokens) <= vocabulary.keys()
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(special_tokens=["<unk>"]))
    if kind in ("gpt2", "qwen", "llama"):
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[:2]])
    tokenizer.add_special_tokens([AddedToken(SPECIAL[2], special=True, normalized=False, rstrip=True, lstrip=True)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def random_texts(count: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices(PIECES, k=draw.randrange(40))) for _ in range(count)]


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama", "gemma", "wordpiece"])
def test_tokens_are_those_of_transformers(kind: str) -> None:
    tokenizer, texts = made(kind), random_texts(3000)
    encoder = Encoder(tokenizer)
    assert (encoder._fast is None) == (kind == "wordpiece")  # else nothing is compared
    for text, tokens in zip(texts, encoder.encode_all(texts), strict=True):
        assert tokens.dtype == np.int32
        assert tokens.tolist() == tokenizer.encode(text, add_special_tokens=False), text
    assert encoder.encode("").tolist() == []
    assert encoder.encode_all([]) == []


def test_one_that_gives_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = made("llama"), fastokens.Tokenizer.from_json_str
    other = made("qwen").backend_tokenizer.to_str()

    class Wrong:
        @staticmethod
        def from_json_str(text: str) -> Any:
            return read(other)

    monkeypatch.setattr(fastokens, "Tokenizer", Wrong)
    encoder = Encoder(tokenizer)
    assert encoder._fast is None
    assert encoder.encode("low 12345").tolist() == tokenizer.encode("low 12345", add_special_tokens=False)


def test_a_text_that_it_gives_up_is_tokenised_all_the_same() -> None:
    class GivesUp:
        def encode_batch_flat(self, texts: list[str]) -> Any:
            raise ValueError("match limit exceeded")

    tokenizer = made("qwen")
    encoder = Encoder(tokenizer)
    encoder._fast = GivesUp()
    assert encoder.encode("low sun").tolist() == tokenizer.encode("low sun", add_special_tokens=False)
