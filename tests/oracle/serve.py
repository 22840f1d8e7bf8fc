"""Computes vLLM's log-probs for the oracle: python serve.py ORDERS. ORDERS is a file of `Order`s.
The log-probs go to the file ORDERS with the suffix .pt.

vLLM runs in this process, one model after the other, in fp32.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tandem.inference.server.family_arguments import family_arguments

Order = dict[str, Any]
"""`model`: a directory. `adapter`: a directory or null. `sequences`: lists of token ids."""


def logprobs(order: Order) -> list[torch.Tensor]:
    """For each sequence, the log-probs of all tokens but the first, in nats at temperature 1."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.lora.request import LoRARequest

    lora: dict[str, Any] = {}
    if order["adapter"]:
        adapted = json.loads((Path(order["adapter"]) / "adapter_config.json").read_text())
        lora = {
            "enable_lora": True,
            "max_lora_rank": 8,
            "max_loras": 1,
            # The adapter's targets, by Tandem's names. Experts are not among the targets, because
            # vLLM's adapter layers for experts need a GPU.
            "lora_target_modules": adapted["target_modules"],
        }
    # `tandem serve-inference` too starts vLLM with the arguments of the model's family.
    given = family_arguments(order["model"], "float32", on_cpu=False)
    options = dict(pairwise(given))
    llm = LLM(
        order["model"],
        language_model_only="--language-model-only" in given,
        hf_overrides=json.loads(options.get("--hf-overrides", "{}")),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 2**20,
        enable_prefix_caching=False,
        **lora,
    )
    given: Any = [{"prompt_token_ids": tokens} for tokens in order["sequences"]]
    adapter = LoRARequest("adapter", 1, order["adapter"]) if order["adapter"] else None
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for answer in llm.generate(given, sampling, use_tqdm=False, lora_request=adapter):
        pairs = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        found.append(torch.tensor([of_token[token].logprob for token, of_token in pairs]))
    # The process groups of a dense model lack the group that a mixture of experts needs, so each
    # model gets new groups.
    destroy_model_parallel()
    destroy_distributed_environment()
    return found


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    orders = Path(sys.argv[1])
    torch.save(
        [logprobs(order) for order in json.loads(orders.read_text())], orders.with_suffix(".pt")
    )
    # At Python's regular end, threads of vLLM's modules for transformers crash now and then.
    os._exit(0)
