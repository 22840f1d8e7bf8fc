"""Compares log-probs of the trainer and of vLLM, each with an output head in bf16 and in float32.

    python -m bench.fp32_head --model DIRECTORY --adapters ROOT [--every 10] [--device cpu]

Each adapter under `ROOT` is merged into the base model, and the weights are rounded to bf16. So the
trainer and vLLM have the same weights. The trainer and vLLM score the sums of `bench.rounding`.
Each vLLM runs in its own process. With the head in float32, vLLM gets
`hf_overrides = {"head_dtype": "float32"}`. An error is the difference from the log-probs that
transformers computes in float32.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.report import report
from bench.rounding import BF16, FP32, Sequences, by_trainer, in_float32, sums
from tandem.families.adapter import CONFIG_FILE
from tandem.families.registry import read_arch
from tandem.model import device, parallel
from tandem.model.build import build_policy
from tandem.model.weights.base_weights import load_weights

HEADS = ("bfloat16", "float32")


def by_vllm(model: str, head: str, sequences: Sequences) -> list[float]:
    """The sequences' log-probs, computed by vLLM in this process. The caller ends this process
    afterwards, which frees vLLM's memory."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        hf_overrides={"head_dtype": "float32"} if head == "float32" else {},
        max_model_len=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,
    )
    answers = llm.generate(
        [{"prompt_token_ids": tokens} for tokens in sequences],
        SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0),
    )
    return [
        logprobs[token].logprob
        for tokens, answer in zip(sequences, answers, strict=True)
        for token, logprobs in zip(tokens[1:], answer.prompt_logprobs[1:], strict=True)
    ]


def in_child(model: str, head: str, sequences: Sequences, work: Path) -> torch.Tensor:
    tokens, found = work / "tokens.json", work / "found.json"
    tokens.write_text(json.dumps(sequences))
    command = [sys.executable, "-m", "bench.fp32_head", "--model", model]
    command += ["--adapters", str(work), "--child", head]
    alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=alone)
    return torch.tensor(json.loads(found.read_text()))


@torch.inference_mode()
def exactly(model: str, sequences: Sequences) -> torch.Tensor:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=FP32).to(device.device())
    found = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=device.device())
        scores = network(ids).logits[0, :-1].log_softmax(-1)
        found.append(scores.gather(-1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(found)


def merged(model: str, adapter: Path, directory: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=FP32)
    whole = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    whole.to(BF16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(model).save_pretrained(directory)


def scores(model: str, adapter: Path, sequences: Sequences) -> dict[str, torch.Tensor]:
    """Log-probs under one merged adapter. The log-probs "exact" are computed by transformers in
    float32. The trainer and vLLM each compute log-probs with each dtype of the output head."""
    with tempfile.TemporaryDirectory() as work:
        directory = f"{work}/model"
        merged(model, adapter, directory)
        policy = build_policy(read_arch(directory), None, dtype=BF16)
        sizes, place = policy.topology.sizes, policy.topology.place
        load_weights(Path(directory), policy.arch, policy.base, sizes, place)
        found = {"exact": exactly(directory, sequences)}
        for head, part in zip(HEADS, ("nothing", "head"), strict=True):
            with in_float32(part):
                found[f"trainer {head}"] = by_trainer(policy, sequences)
            found[f"vLLM {head}"] = in_child(directory, head, sequences, Path(work))
            apart = (found[f"trainer {head}"] - found[f"vLLM {head}"]).abs().mean()
            print(adapter, head, f"{apart:.4f}", flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="the base model's directory")
    parser.add_argument("--adapters", type=Path, required=True, help="a directory that holds them")
    parser.add_argument("--every", type=int, default=10, help="take every so many-th adapter")
    parser.add_argument("--count", type=int, default=2000, help="tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--child", choices=HEADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sequences = json.loads((options.adapters / "tokens.json").read_text())
        values = by_vllm(options.model, options.child, sequences)
        (options.adapters / "found.json").write_text(json.dumps(values))
        os._exit(0)  # os._exit skips vLLM's shutdown, which takes long on a busy machine
    device.activate(options.device)
    parallel.init_parallel()
    sequences = sums(options.model, options.count, seed=1)
    adapters = sorted(path.parent for path in options.adapters.rglob(CONFIG_FILE))
    trained = [path for path in adapters if not re.fullmatch(r"\D*0+", path.name)]
    each = [
        scores(options.model, adapter, sequences)
        for adapter in trained[options.every - 1 :: options.every]
    ]

    def difference(one: str, other: str) -> float:
        apart = torch.cat([(found[one] - found[other]).abs() for found in each])
        return 1e3 * float(apart.mean())

    rows: list[dict[str, Any]] = [
        {
            "trainer's head": ours,
            "vLLM's head": theirs,
            "adapters": len(each),
            "tokens": len(each[0]["exact"]),
            "trainer - vLLM, 1e-3 nats": difference(f"trainer {ours}", f"vLLM {theirs}"),
            "trainer's error": difference(f"trainer {ours}", "exact"),
            "vLLM's error": difference(f"vLLM {theirs}", "exact"),
        }
        for ours in HEADS
        for theirs in HEADS
    ]
    name = Path(options.model).name
    report(f"fp32-head-{options.device}", f"Heads of {name} in bf16 and in float32", rows)


if __name__ == "__main__":
    main()
