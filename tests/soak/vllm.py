"""`python -m soak.vllm`: the tests' fake vLLM as a program, for a spool with real checkpoints.

The trainer writes the log-probs of a probe's tokens into a checkpoint's manifest. The fake vLLM
answers with the log-probs in the manifest of the checkpoint that has the adapter's bytes. So the
fake vLLM's log-probs pass the publisher's verification. The program's start takes a third of a
second.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake_vllm import FakeVllm, logprobs

ADAPTER = "adapter_model.safetensors"


class ProbeVllm(FakeVllm):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.version = "0.32.0"
        self._root = root

    def _scores(self, model: str, tokens: list[int]) -> list[float]:
        if model == "base":
            return logprobs(tokens, 0.0)
        content = Path(self.adapters[model][0], ADAPTER).read_bytes()
        for probe in self._probes(hashlib.sha256(content).hexdigest()):
            if tokens in probe["tokens"]:
                return list(probe["logprobs"][probe["tokens"].index(tokens)])
            long = probe["long"]
            if long is not None and tokens == long["tokens"][: len(tokens)]:
                found = dict(zip(long["positions"], long["logprobs"], strict=True))
                return [found.get(position, -1.0) for position in range(1, len(tokens))]
        return logprobs(tokens, 0.0)  # log-probs of the identity adapter

    def _probes(self, sha256: str) -> Iterator[dict[str, Any]]:
        for path in self._root.glob("runs/*/*/*/manifest.json"):
            try:
                text = path.read_text()
            except OSError:  # a rollback has moved the manifest
                continue
            if sha256 in text and (probe := json.loads(text)["probe"]) is not None:
                yield probe


if __name__ == "__main__":
    ProbeVllm(Path(os.environ["TANDEM_ROOT"])).start(int(os.environ["TANDEM_INFERENCE_PORT"]))
    while True:
        time.sleep(60)
