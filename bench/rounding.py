"""Measures rounding errors in bfloat16. Log-probs of the trainer, and log-probs of transformers
with PEFT, are compared with log-probs in float32.

    python -m bench.rounding --model DIRECTORY --adapters ROOT [--train 20] [--parts]

The log-probs of the same sequences are computed under every adapter below `ROOT`, for example a
spool. Adapters of step 0 are left out. With `--train N` the trainer first trains N adapters. The
sequences are sums with their answers, or those in `--tokens FILE`, a JSON list of lists of token
ids.

An error is the absolute difference between a token's log-prob and the log-prob by transformers with
PEFT in float32. `ratio` is the mean error divided by the mean error of transformers in bf16. `±` is
the ratio's standard error, from a bootstrap over adapters. With `--parts`, each measurement
computes one part of the trainer's layers in float32. Measurements with `--parts` use torch's
functions instead of the trainer's kernels. `--parts` works for dense models without an FP8 base.
"""

import argparse
import collections
import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.report import report
from tandem.families.adapter import CONFIG_FILE, WEIGHTS_FILE, write_adapter_config
from tandem.families.identity_adapter import write_identity_adapter
from tandem.families.registry import read_arch
from tandem.model import attention, device, parallel
from tandem.model import policy as policies
from tandem.model.build import build_policy
from tandem.model.layer import kernels
from tandem.model.logprobs import item_logprobs
from tandem.model.lora import LoraLinear
from tandem.model.policy import Policy
from tandem.model.weights.base_weights import load_weights
from tandem.spool.schema import LoraShape, OptimizerSettings
from tandem.trainer.rank.probe import logprobs, probe_row
from tandem.training.optimizer import AdapterOptimizer

BF16, FP32 = torch.bfloat16, torch.float32
PEFT, TRAINER = "transformers + PEFT", "trainer"
EARLY = "residual added before LoRA"
PARTS = ("nothing", EARLY, "LoRA", "residual", "norms", "rotation", "head")
ROW = 1024  # tokens whose log-probs the trainer computes in one row

Sequences = list[list[int]]


def sums(model: str, count: int, seed: int) -> Sequences:
    """The tokens of sums with their answers, in the model's chat template. At least `count` tokens
    have a log-prob."""
    tokenizer, chance = AutoTokenizer.from_pretrained(model), random.Random(seed)
    found: Sequences = []
    while sum(len(tokens) - 1 for tokens in found) < count:
        a, b = chance.randint(1, 99), chance.randint(1, 99)
        question = {"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}
        answer = {"role": "assistant", "content": str(a + b)}
        text = tokenizer.apply_chat_template([question, answer], tokenize=False)
        found.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return found


@torch.inference_mode()
def by_transformers(
    model: str, adapter: Path, dtype: torch.dtype, sequences: Sequences
) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device.device())
    policy, found = peft.PeftModel.from_pretrained(base, str(adapter)).eval(), []
    for begin in range(0, len(sequences), 8):
        batch = sequences[begin : begin + 8]
        longest = max(map(len, batch))
        # The padding is at the end, so that no token attends to padding.
        padded = [tokens + [0] * (longest - len(tokens)) for tokens in batch]
        ids = torch.tensor(padded, device=device.device())
        logits = policy(input_ids=ids, use_cache=False).logits[:, :-1]
        scores = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu()
        found += [row[: len(tokens) - 1] for row, tokens in zip(scores, batch, strict=True)]
    return torch.cat(found)


@torch.no_grad()
def by_trainer(policy: Policy, sequences: Sequences) -> torch.Tensor:
    rows = logprobs(policy, sequences, ROW, device.device())
    return torch.tensor([value for row in rows for value in row])


@contextlib.contextmanager
def in_float32(part: str) -> Iterator[None]:
    """Within the block the trainer computes `part` (one of `PARTS`) in float32."""
    norm, rotate = kernels.rms_norm, attention.rotation

    def product(
        layer: LoraLinear, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def rounded(tensor: torch.Tensor, unless: str = "") -> torch.Tensor:
            return tensor if part == unless else tensor.to(BF16).float()

        plus = 0.0 if residual is None else residual.float()
        bias = None if layer.bias is None else layer.bias.float()
        output = linear(x.float(), layer.weight.float(), bias)
        output, inner = rounded(output + plus if part == EARLY else output), None
        if layer.adapted:
            a, b = (tensor.float() for tensor in layer.cast(FP32 if part == "LoRA" else BF16))
            inner = rounded(linear(x.float(), a), unless="LoRA")
            output = rounded(output + inner @ b.t())
        if part != EARLY and residual is not None:
            output = rounded(output + plus, unless="residual")
        return (output if part == "residual" and residual is not None else output.to(BF16)), inner

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normalised = norm(x.float(), weight, eps)
        return normalised if part == "norms" else normalised.to(BF16)

    def rotation(
        positions: torch.Tensor, inv_freq: torch.Tensor, _dtype: torch.dtype, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(positions, inv_freq, FP32 if part == "rotation" else BF16, factor)

    def head(
        hidden: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = FP32 if part == "head" else BF16
        return item_logprobs(hidden.to(dtype), targets, weight.to(dtype), **options)

    with (
        mock.patch.object(LoraLinear, "forward", product),
        mock.patch.object(kernels, "rms_norm", rms_norm),
        mock.patch.object(policies, "rotation", rotation),
        mock.patch.object(policies, "item_logprobs", head),
    ):
        yield


def make_policy(model: str, lora: LoraShape) -> Policy:
    policy = build_policy(read_arch(model), lora, dtype=BF16)
    sizes, place = policy.topology.sizes, policy.topology.place
    load_weights(Path(model), policy.arch, policy.base, sizes, place)
    return policy


def train(model: str, root: Path, sequences: Sequences, steps: int, rate: float) -> None:
    """Trains on the sequences with `steps` optimizer steps, which raise their log-probs. Writes an
    adapter after each optimizer step."""
    lora = LoraShape(rank=16, alpha=32.0)
    first = root / "step-0"
    first.mkdir(parents=True)
    policy = make_policy(model, lora)
    write_identity_adapter(first, policy.arch, lora, base_model=model, seed=0)
    policy.load_adapter(first)
    settings = OptimizerSettings(learning_rate=rate)
    optimizer = AdapterOptimizer(policy, settings)
    for step in range(1, steps + 1):
        batch = random.Random(step).choices(sequences, k=8)
        optimizer.zero_grad()
        (-policy(probe_row(batch, ROW, device.device())).logprobs.mean()).backward()
        optimizer.reduce_gradients()
        optimizer.step(optimizer.gradient_norm(), rate)
        directory = root / f"step-{step}"
        directory.mkdir()
        save_file(policy.adapter_tensors(), directory / WEIGHTS_FILE)
        write_adapter_config(directory, lora, model)


def scores(
    model: str, adapter: Path, policy: Policy, sequences: Sequences, parts: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each implementation's name and its log-probs under one adapter."""
    policy.load_adapter(adapter)
    yield PEFT, by_transformers(model, adapter, BF16, sequences)
    yield TRAINER, by_trainer(policy, sequences)
    for part in parts:
        with in_float32(part):
            yield part, by_trainer(policy, sequences)


def errors(options: argparse.Namespace, sequences: Sequences) -> dict[str, list[torch.Tensor]]:
    """Implementation -> a tensor per adapter with each token's error."""
    found = collections.defaultdict[str, list[torch.Tensor]](list)
    adapters = sorted(path.parent for path in options.adapters.rglob(CONFIG_FILE))
    trained = [path for path in adapters if not re.fullmatch(r"\D*0+", path.name)]
    policy: Policy | None = None
    for adapter in trained[:: options.every]:
        config = json.loads((adapter / CONFIG_FILE).read_text())
        lora = LoraShape(
            rank=config["r"], alpha=config["lora_alpha"], targets=tuple(config["target_modules"])
        )
        if policy is None or policy.lora != lora:
            policy = make_policy(options.model, lora)
        exact = by_transformers(options.model, adapter, FP32, sequences)
        parts = PARTS if options.parts == [] else tuple(options.parts or ())
        for way, values in scores(options.model, adapter, policy, sequences, parts):
            found[way].append((values - exact).abs())
            print(adapter, way, f"{found[way][-1].mean():.4f}", flush=True)
    return found


def ratio(one: list[float], other: list[float]) -> tuple[float, float]:
    """The ratio of the means of `one` and `other`, and the ratio's standard error over adapters."""
    chance, drawn = random.Random(0), []
    for _ in range(1000):
        chosen = chance.choices(range(len(one)), k=len(one))
        drawn.append(sum(one[i] for i in chosen) / sum(other[i] for i in chosen))
    return sum(one) / sum(other), float(torch.tensor(drawn).std())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the base model's directory")
    parser.add_argument("--adapters", type=Path, required=True, help="a directory that holds them")
    parser.add_argument("--train", type=int, default=0, help="make so many adapters first")
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate of --train")
    parser.add_argument("--tokens", type=Path, help="a JSON list of sequences")
    parser.add_argument("--count", type=int, default=2000, help="tokens of the sums")
    parser.add_argument("--every", type=int, default=1, help="take every so many-th adapter")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="without a name: all of them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--name", default="rounding", help="of the file under bench/results")
    options = parser.parse_args()
    device.activate(options.device)
    parallel.init_parallel()
    sequences = (
        json.loads(options.tokens.read_text())
        if options.tokens
        else sums(options.model, options.count, seed=1)
    )
    if options.train:
        train(options.model, options.adapters, sequences, options.train, options.rate)
    found = errors(options, sequences)
    means = {way: [float(error.mean()) for error in each] for way, each in found.items()}
    rows = []
    for way, each in found.items():
        of_way, spread = ratio(means[way], means[PEFT])
        rows.append(
            {
                "way": way if way in (PEFT, TRAINER, EARLY) else f"{way} in float32",
                "adapters": len(each),
                "tokens": len(each[0]),
                "mean, 1e-3 nats": 1e3 * sum(means[way]) / len(each),
                "median, 1e-3 nats": 1e3 * float(torch.cat(each).median()),
                "ratio": of_way,
                "±": spread,
                "worse for": sum(a > b for a, b in zip(means[way], means[PEFT], strict=True)),
            }
        )
    title = f"Errors of log-probs in bfloat16 against float32, {Path(options.model).name}"
    report(f"{options.name}-{options.device}", title, rows)


if __name__ == "__main__":
    main()
