"""Preparation of an SFT from JSON lines, as `tandem train sft` and the controller do it: seconds of each part.

The tokenizer is trained on the standard library's sources, so that nothing is downloaded; conversations are made of the
same text. Parts run one after another here; reading and sending are the client's, the others the controller's.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.report import report
from tandem.data import prepare
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import SFTExample
from tandem.data.formats import open_examples
from tandem.data.inputs import PackingSettings
from tandem.data.render import render

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def corpus(megabytes: int = 6) -> list[str]:
    """Paragraphs of the standard library's sources and of packages' READMEs."""
    texts, size = [], 0
    for path in sorted(Path(json.__file__).parents[1].rglob("*.py")) + sorted(Path("docs").glob("*.md")):
        text = path.read_text(errors="ignore")
        texts += [part for part in text.split("\n\n") if 80 < len(part) < 2000]
        size += len(text)
        if size > megabytes * 2**20:
            break
    return texts


def write_tokenizer(directory: Path, texts: list[str], template: str) -> None:
    """A byte-level BPE of 32,000 tokens, as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])  # type: ignore[list-item]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(directory)


def write_examples(path: Path, texts: list[str], count: int, characters: int) -> None:
    """Conversations of a question and an answer, in all about `characters` long."""
    rng = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            length, parts = int(characters * rng.uniform(0.4, 1.6)), [f"Question {number}:"]
            while sum(map(len, parts)) < length:
                parts.append(rng.choice(texts))
            text = " ".join(parts)[:length]
            cut = length // 4
            user, assistant = ({"role": r, "content": c} for r, c in (("user", text[:cut]), ("assistant", text[cut:])))
            file.write(json.dumps({"messages": [user, assistant], "source": "bench"}) + "\n")


def measure(file: Path, tokenizer_path: Path, size: int, out: Path) -> tuple[Counter[str], Counter[str]]:
    """Seconds of each part, and counts, of all slices of `size` examples."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    adapter = TypeAdapter(list[SFTExample])
    tokenizer = load_tokenizer(str(tokenizer_path))
    last = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[part] += now - last
        last = now

    examples = open_examples(file)
    lap("index")
    order = np.random.default_rng(0).permutation(len(examples))
    for start in range(0, len(order), size):
        records = [examples[int(i)][1] for i in order[start : start + size]]
        lap("read and convert")
        body = json.dumps({"examples": records}).encode()
        lap("write the request")
        parsed = adapter.validate_python(json.loads(body)["examples"])
        lap("validate")
        if counts["profiled"] == 0:
            rendered = render(tokenizer, parsed, [""] * len(parsed))
            counts["trained"] += sum(len(one.trained) for many in rendered for one in many)
            seconds["of the first slice: render and tokenise"] = time.perf_counter() - last
            counts["profiled"] = 1
            last = time.perf_counter()
        packing = PackingSettings(sequence_length=4096)
        arguments: dict[str, Any] = {"tokenizer_path": str(tokenizer_path), "vocab_size": 40000, "packing": packing}
        packed = prepare.prepare_sft(parsed, **arguments, out=out / str(start))
        lap("render, tokenise, pack, write")
        counts["tokens"] += packed.num_unshared_tokens
    return seconds, counts


def main() -> None:
    """Measure `--examples` conversations, with a template of TRL's package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--slice", type=int, default=2000)
    parser.add_argument("--characters", type=int, default=1250)
    parser.add_argument("--templates", nargs="+", default=["qwen3", "qwen3_training"])
    arguments = parser.parse_args()
    import trl

    rows, texts = [], corpus()
    for name in arguments.templates:
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary)
            template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
            write_tokenizer(directory / "tokenizer", texts, template.read_text())
            write_examples(directory / "data.jsonl", texts, arguments.examples, arguments.characters)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds, counts = measure(directory / "data.jsonl", directory / "tokenizer", arguments.slice, directory)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        whole = sum(value for part, value in seconds.items() if "first slice" not in part)
        rows.append(
            {"template": name, "examples": arguments.examples, "slice": arguments.slice, "tokens": counts["tokens"]}
            | {f"{part}, s": value for part, value in seconds.items()}
            | {"whole, s": whole, "tokens/s": counts["tokens"] / whole, "host memory grown, MiB": grown}
        )
    report("prepare", "Preparing an SFT from JSON lines", rows)


if __name__ == "__main__":
    main()
