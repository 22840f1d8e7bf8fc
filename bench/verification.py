"""Tests the publisher's verification: counts right weights that are refused and wrong weights that
are accepted.

    python -m bench.verification --spool ROOT --run RUN --other OTHER --model DIRECTORY

Each case's errors are appended to `--rows FILE` as soon as they are known. If the program is killed
and started again, it continues with the missing cases.

`RUN` and `OTHER` are trained runs of the same base model on the spool `ROOT`. This program runs
vLLM in its own process, so it can give vLLM another adapter in place of the checkpoint's adapter
(`bench.verification_cases`). Each case goes through the publisher's two checks. The first check
compares the tensors in vLLM's worker, and the second check compares the log-probs of the
checkpoint's probe. With `--mode merged`, the adapter is merged into vLLM's weights, and rows of the
merged weights are compared.

A wrong case counts if its float32 log-probs differ enough from the right weights' log-probs: by
more than vLLM's error for the base model. The float32 log-probs are computed by transformers. The
other wrong cases are listed separately.
"""

import argparse
import collections
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM's engine and worker run in this process

import torch

from bench.report import report
from bench.verification_cases import ALTERATIONS, CONFIG, WEIGHTS, Case, write_cases
from tandem.families.adapter import peft_keys
from tandem.inference.publisher.verify import ROUNDING, Tolerance, WrongWeights, verify
from tandem.inference.server import patches
from tandem.inference.server.worker import extension, held_adapter
from tandem.inference.server.worker.model_weights import MergedWeights
from tandem.inference.spot_check import SpotCheck
from tandem.spool import Spool
from tandem.spool.schema import LORA_TARGETS, Probe

BASE = "base"
KINDS = ("right", "step before", "base model", "another run", *ALTERATIONS)
Key = tuple[int, str]  # step and kind of a case


class Engine:
    """A vLLM that runs in this process. The class has the methods of `VllmClient` that `verify`
    calls."""

    def __init__(self, model: str, dtype: str, lora: bool, memory: float) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        if current_platform.is_cpu() and not lora:
            patches.install_plain_cpu_kernels(extension.keep_plain, extension.apply_experts)
        options: dict[str, Any] = {"gpu_memory_utilization": memory}
        if lora:
            targets = [*LORA_TARGETS, "qkv_proj", "gate_up_proj"]
            options |= {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1}
            options |= {"lora_target_modules": targets}
        self.llm = LLM(
            model,
            dtype=dtype,
            max_model_len=2048,
            enforce_eager=True,
            enable_prefix_caching=False,
            **options,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.worker: Any = core.engine_core.model_executor.driver_worker.worker
        self.requests: dict[str, Any] = {BASE: None}

    def longest_prompt(self) -> int:
        return 2047

    def prompt_logprobs(self, model: str, *prompts: Sequence[int]) -> list[list[float]]:
        from vllm import SamplingParams

        answers = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0),
            lora_request=self.requests[model],
            use_tqdm=False,
        )
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
            found.append([logprobs[token].logprob for token, logprobs in tokens])
        return found


class Adapters(Engine):
    """vLLM with adapters. After a call of `hold`, vLLM reads the adapter from a directory that the
    request does not name."""

    beside = BASE

    def __init__(self, model: str, dtype: str, memory: float) -> None:
        super().__init__(model, dtype, lora=True, memory=memory)
        from vllm.lora.lora_model import LoRAModel

        load: Any = LoRAModel.from_local_checkpoint
        load, self._number = load.__func__, 0
        self._read: dict[str, str] = {}

        def redirected(cls: type, directory: str, *args: Any, **kwargs: Any) -> Any:
            return load(cls, self._read.get(directory, directory), *args, **kwargs)

        LoRAModel.from_local_checkpoint = classmethod(redirected)

    def hold(self, right: Path, held: Path) -> str:
        """Loads the adapter `held` in place of `right`. Returns the error of the worker's own
        check, or ""."""
        from vllm.lora.request import LoRARequest

        if "adapter" in self.requests:
            self.worker.remove_lora(self.requests["adapter"].lora_int_id)
        self._number += 1
        self._read = {str(right): str(held)}
        request = LoRARequest("adapter", self._number, str(right))
        self.requests["adapter"] = request
        self.worker.add_lora(request)
        try:
            held_adapter.check(self.worker, request)
        except ValueError as error:
            return str(error)
        return ""


class Merged(Engine):
    """A vLLM whose base weights are merged with an adapter."""

    beside = ""

    def __init__(self, model: str, dtype: str, memory: float) -> None:
        super().__init__(model, dtype, lora=False, memory=memory)
        own = self.worker.model_runner.get_model()
        self._weights = MergedWeights(own, model, "device", frozenset(LORA_TARGETS))
        self._check = SpotCheck(model, dtype)
        self.requests["adapter"] = None

    def hold(self, right: Path, held: Path) -> str:
        lora = lora_of(right)
        try:
            self._weights.stage(str(held), lora.alpha / lora.rank)
            while not self._weights.staged(str(held)):
                time.sleep(0.001)
        except RuntimeError as error:
            return str(error)
        self._weights.swap(str(held))
        rows = self._check.adapter_rows(right, lora)
        return rows.wrong(self._weights.rows(rows.rows))


def lora_of(directory: Path) -> Any:
    from tandem.spool.schema import LoraShape

    config = json.loads((directory / CONFIG).read_text())
    return LoraShape(
        rank=config["r"], alpha=config["lora_alpha"], targets=tuple(config["target_modules"])
    )


class Reference:
    """Computes a probe's log-probs under an adapter in float32, by transformers."""

    def __init__(self, model: str, device: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        self._device = device
        self._base = {name: value.clone() for name, value in self._model.state_dict().items()}

    @torch.inference_mode()
    def logprobs(self, probe: Probe, adapter: Path | None) -> list[float]:
        from safetensors.torch import load_file

        state = dict(self._base)
        if adapter is not None:
            lora = lora_of(adapter)
            tensors = {n: t.to(self._device) for n, t in load_file(adapter / WEIGHTS).items()}
            for name in self._base:
                a, b = peft_keys(name.removesuffix(".weight"))
                if a in tensors:
                    product = tensors[b] @ tensors[a]
                    state[name] = self._base[name] + lora.alpha / lora.rank * product
        self._model.load_state_dict(state)
        found: list[float] = []
        for tokens in probe.tokens:
            ids = torch.tensor([tokens], device=self._device)
            scores = self._model(ids).logits[0, :-1].log_softmax(-1)
            found += scores.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return found


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def closest_mean(one: Sequence[float], other: Sequence[float]) -> float:
    errors = sorted(abs(a - b) for a, b in zip(one, other, strict=True))
    closest = errors[: -(-9 * len(errors) // 10)]
    return sum(closest) / len(closest)


def judge(
    engine: Adapters | Merged, case: Case, right: Path, probe: Probe, tolerance: Tolerance
) -> dict[str, Any]:
    """Puts a case's weights into vLLM and runs both checks. Returns the case's row."""
    tensors = engine.hold(right, case.directory)
    row: dict[str, Any] = {"kind": case.kind, "step": case.step, "detail": case.detail}
    row["tensors"] = tensors[:160]
    try:
        result = verify(
            engine,  # type: ignore[arg-type]
            "adapter",
            probe,
            tolerance=tolerance,
            beside=engine.beside,
        )
        row |= {"error": result.error, "allowed": result.allowed, "logprobs": ""}
    except WrongWeights as error:
        row["logprobs"] = str(error)[:160]
    return row


def rows(options: argparse.Namespace, done: dict[Key, Any]) -> Iterator[dict[str, Any]]:
    """Yields a row for each case that is not in `done`. If a wrong case of a step is missing, the
    step's right case is computed again too."""
    spool = Spool(options.spool)
    steps, other = (
        {
            step: spool.checkpoints.path(run, step)
            for step in spool.checkpoints.steps(run)
            if step == 0 or step % options.every == 0
        }
        for run in (options.run, options.other)
    )
    kind = Merged if options.mode == "merged" else Adapters
    reference = Reference(options.model, device())
    engine = kind(options.model, options.dtype, options.memory)
    tolerance = Tolerance(ROUNDING[options.dtype])
    with tempfile.TemporaryDirectory() as work:
        for case in write_cases(steps, other, Path(work), options.seed):
            wanted = KINDS if case.step % options.wrong_every == 0 else KINDS[:1]
            missing = [kind for kind in wanted if (case.step, kind) not in done]
            if not missing or case.kind not in ("right", *missing):
                continue
            probe = spool.checkpoints.manifest(options.run, case.step).probe
            assert probe is not None
            row = judge(engine, case, steps[case.step], probe, tolerance)
            if case.kind == "right" and len(wanted) > 1:
                right = reference.logprobs(probe, steps[case.step])
                base = reference.logprobs(probe, None)
                flat = [value for row in probe.base for value in row]
                rounding = closest_mean(flat, base)
                row["moved"] = closest_mean(right, base)
            elif case.kind != "right":
                row["differs"] = closest_mean(reference.logprobs(probe, case.directory), right)
                row["counts"] = row["differs"] > rounding
            if (case.step, case.kind) not in done:
                yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--spool", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--other", required=True, help="another run of the same base model")
    parser.add_argument("--model", required=True, help="the base model's directory")
    parser.add_argument("--mode", choices=("adapter", "merged"), default="adapter")
    parser.add_argument("--dtype", choices=tuple(ROUNDING), default="bfloat16")
    parser.add_argument("--every", type=int, default=1, help="only steps that this divides")
    parser.add_argument("--wrong-every", type=int, default=1, help="the same for wrong cases")
    parser.add_argument("--memory", type=float, default=0.4, help="vLLM's share of the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a file for each case's errors, as JSON lines")
    options = parser.parse_args()
    text = options.rows.read_text() if options.rows and options.rows.exists() else ""
    found = [json.loads(line) for line in text.splitlines()]
    started = time.monotonic()
    for row in rows(options, {(row["step"], row["kind"]): row for row in found}):
        found.append(row)
        refused = [check for check in ("tensors", "logprobs") if row[check]]
        print(f"{time.monotonic() - started:.0f} s", row["step"], row["kind"], refused, flush=True)
        if options.rows:
            with options.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    table = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    for row in found:
        refused = bool(row["tensors"] or row["logprobs"])
        of_kind = table[row["kind"]]
        of_kind["cases"] += 1
        of_kind["refused"] += refused
        of_kind["refused by tensors"] += bool(row["tensors"])
        of_kind["refused by log-probs"] += bool(row["logprobs"])
        of_kind["counts"] += row.get("counts", True)
        of_kind["counts and accepted"] += row.get("counts", False) and not refused
    right = [row for row in found if row["kind"] == "right" and "error" in row]
    if right:
        print(
            "largest error of right weights over its allowance:",
            round(max(row["error"] / row["allowed"] for row in right), 3),
        )
    columns = sorted({column for counts in table.values() for column in counts})
    report(
        f"verification-{options.mode}-{device()}",
        f"Verification of {options.mode} weights, {options.dtype}",
        [{"kind": kind} | {c: counts[c] for c in columns} for kind, counts in table.items()],
    )


if __name__ == "__main__":
    main()
