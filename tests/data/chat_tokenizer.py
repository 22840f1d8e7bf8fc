"""A byte-level BPE tokenizer with the special tokens of a chat template. The tokenizer is trained
in this module. The module also has the directory of TRL's chat templates, and a function that makes
a message."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
_CORPUS = [
    (
        "The quick brown fox jumps over the lazy dog. What is the weather in Paris today? It is"
        " sunny, 21 degrees.\n\n"
    ),
    (
        '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}\nassistant user'
        " system tool\n"
    ),
    (
        "I should think about it first, then answer: yes, no or maybe. Ist das so? 是的。 café"
        " naïve 🙂\n"
    ),
] * 20
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s]{1,40}[|｜]>|<\|[a-z_]{1,20}>|<[a-z_]{1,20}\|>"
    r"|<(?:s|/s|bos|eos)>|<(?:start|end)_of_\w{1,20}>"
)


@cache
def _base() -> str:
    from tokenizers import Regex

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    parts = [split, byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[arg-type]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return str(tokenizer.to_str())


def chat_tokenizer(template: str, *, greedy: bool = False) -> Any:
    """A tokenizer with the chat template `template`. Texts in the template that look like special
    tokens become special tokens of the tokenizer. `greedy`: special tokens include the white space
    beside them, as in Phi-3's tokenizer."""
    tokenizer = Tokenizer.from_str(_base())
    special = sorted({"<|im_end|>", "<|begin_of_text|>", *_SPECIAL.findall(template)})
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=greedy, lstrip=greedy)
            for token in special
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>")]
    )
    bos = next(token for token in ("<bos>", "<s>", "<|begin_of_text|>") if token in special)
    ends = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")
    eos = next(token for token in ends if token in special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=eos
    )
    fast.chat_template = template
    return fast


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}
