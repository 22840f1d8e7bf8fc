"""Preparation of an SFT from JSON lines, as `tandem train sft` and the controller do it: seconds of
each part.

The tokenizer is trained on the standard library's sources, so that nothing is downloaded;
conversations are made of the same text. Reading and writing JSON are the client's part, the others
the controller's.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.report import report
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import SFTExample
from tandem.data.formats import Examples
from tandem.data.inputs import PackingSettings
from tandem.data.prepare import prepare_sft

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def corpus(megabytes: int = 6) -> list[str]:
    """Paragraphs of the standard library's sources and of packages' READMEs."""
    texts, size = [], 0
    for path in sorted(Path(json.__file__).parents[1].rglob("*.py")) + sorted(
        Path("docs").glob("*.md")
    ):
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
    parts = [split, byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)  # type: ignore[arg-type]
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=32000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
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
            user, assistant = (
                {"role": r, "content": c}
                for r, c in (("user", text[:cut]), ("assistant", text[cut:]))
            )
            file.write(json.dumps({"messages": [user, assistant], "source": "bench"}) + "\n")


def prepare_slice(body: bytes, tokenizer_path: Path, out: Path) -> tuple[float, Counter[str]]:
    """The controller's part: (seconds until the request is parsed, counts)."""
    begin = time.perf_counter()
    parsed = _examples.validate_json(body)
    seconds = time.perf_counter() - begin
    packing = PackingSettings(sequence_length=4096)
    packed = prepare_sft(
        parsed, tokenizer_path=str(tokenizer_path), vocab_size=40000, packing=packing, out=out
    )
    return seconds, Counter(
        tokens=packed.num_unshared_tokens, trained=packed.num_items, rows=packed.num_rows
    )


_examples = TypeAdapter(list[SFTExample])


def measure(file: Path, tokenizer_path: Path, size: int, out: Path) -> dict[str, Any]:
    """Seconds and counts of all slices of `size` examples, one after the other, as `tandem train
    sft` submits them."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    load_tokenizer(str(tokenizer_path))
    prepare_sft(
        [SFTExample(text="a b")],
        tokenizer_path=str(tokenizer_path),
        vocab_size=40000,
        packing=PackingSettings(),
        out=out / "first",
    )
    begin, cpu = time.perf_counter(), time.process_time()
    examples = Examples(file)
    seconds["find the lines"] = time.perf_counter() - begin
    order = np.random.default_rng(0).permutation(len(examples))

    for start in range(0, len(order), size):
        laps = [time.perf_counter()]
        records = [examples[int(i)][1] for i in order[start : start + size]]
        laps.append(time.perf_counter())
        body = to_json(records)
        laps.append(time.perf_counter())
        parsing, found = prepare_slice(body, tokenizer_path, out / str(start))
        parts = dict(
            zip(
                ("read, convert", "write JSON", "prepare"),
                np.diff([*laps, time.perf_counter()]),
                strict=True,
            )
        )
        counts.update(found)
        seconds.update(parts | {"parse, validate": parsing, "prepare": parts["prepare"] - parsing})
    whole, cpu = time.perf_counter() - begin, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    parts = {f"{part}, s": float(value) for part, value in seconds.items()}
    rates = {
        "whole, s": whole,
        "CPU, s": cpu,
        "tokens/s": counts["tokens"] / whole,
        "peak MiB": memory,
    }
    return {**counts, **parts, **rates}


def main() -> None:
    """Measure `--examples` conversations, with templates of TRL's package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--slice", type=int, default=3200)
    parser.add_argument("--characters", type=int, default=1250)
    # A template, and where its files are.
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        template, directory = arguments.one[0], Path(arguments.one[1])
        with tempfile.TemporaryDirectory() as out:
            row = measure(
                directory / "data.jsonl", directory / template, arguments.slice, Path(out)
            )
        print(json.dumps({"template": template, "slice": arguments.slice} | row))
        return
    import trl

    rows, texts = [], corpus()
    with tempfile.TemporaryDirectory() as temporary:
        write_examples(
            Path(temporary) / "data.jsonl", texts, arguments.examples, arguments.characters
        )
        for name in ("qwen3", "qwen3_training"):
            template = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
            write_tokenizer(Path(temporary) / name, texts, template.read_text())
            # In a process of its own, for its memory.
            command = [
                sys.executable,
                "-m",
                "bench.prepare",
                "--slice",
                str(arguments.slice),
                "--one",
                name,
                temporary,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append({"examples": arguments.examples} | json.loads(done.stdout.splitlines()[-1]))
    report("prepare", "Preparing an SFT from JSON lines", rows)


if __name__ == "__main__":
    main()
