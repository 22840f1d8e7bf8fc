"""python -m inference.held_adapters DIRECTORY: the worker's check of adapters that vLLM holds.

vLLM and its worker run in this process, with the plugin's change. Prints one line per case as JSON:
the case's name and the text of the refusal. The text is empty if the adapter is served.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import tiny_model
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest

from policies import write_random_adapter
from tandem.families.adapter import WEIGHTS_FILE
from tandem.inference.server import patches
from tandem.inference.server.worker import held_adapter
from tandem.spool.schema import LORA_TARGETS, LoraShape
from tiny import write_random_model

Tensors = dict[str, torch.Tensor]
LORA = LoraShape(rank=4, alpha=10.0)
RIGHT = {
    "everywhere": LORA,
    "as large as vLLM allows": LoraShape(rank=8, alpha=8.0),
    "attention": LoraShape(
        rank=4,
        alpha=10.0,
        targets=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
        ),
    ),
    "one of a fused layer": LoraShape(rank=4, alpha=10.0, targets=("k_proj",)),
    "gate_proj": LoraShape(rank=4, alpha=10.0, targets=("gate_proj",)),
    "down_proj": LoraShape(rank=4, alpha=10.0, targets=("down_proj",)),
}
"""Shapes of adapters that vLLM loads with unchanged tensors and then serves, by the case's name."""


def of_b(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: change(t) if "lora_B" in n else t for n, t in tensors.items()}


def without(word: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if word not in name}


def one_value(tensors: Tensors) -> Tensors:
    name = next(name for name in tensors if "layers.1.self_attn.v_proj.lora_B" in name)
    changed = tensors[name].clone()
    changed[3, 2] += 0.1
    return tensors | {name: changed}


def one_more_rank(tensors: Tensors) -> Tensors:
    """The matrices A and B contain the file's values and one rank more, so their product is
    wrong."""
    return {
        name: torch.cat([t, t[:, :1]], 1) if "lora_B" in name else torch.cat([t, t[:1]])
        for name, t in tensors.items()
    }


HELD: dict[str, Callable[[Tensors], Tensors]] = {
    "scale halved": of_b(lambda b: b * 0.5),
    "scale doubled": of_b(lambda b: b * 2.0),
    "layer missing": without(".layers.1."),
    "module missing": without(".up_proj."),
    "one value": one_value,
    "one more rank": one_more_rank,
}
"""Functions that change a file's tensors to the tensors that vLLM holds, by the case's name."""


class Worker:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        tiny_model.write_tokenizer(directory / "model")
        write_random_model(directory / "model", vocab_size=320)
        patches.tell_failed_adapters()
        self.llm = LLM(
            str(directory / "model"),
            dtype="bfloat16",
            max_model_len=64,
            enforce_eager=True,
            enable_lora=True,
            max_lora_rank=8,
            max_loras=2,
            lora_target_modules=[*LORA_TARGETS, "qkv_proj", "gate_up_proj"],
            gpu_memory_utilization=0.1,
        )
        core: Any = self.llm.llm_engine.engine_core
        self.executor = core.engine_core.model_executor
        self.worker = self.executor.driver_worker.worker
        self.number = 0

    def write(self, name: str, lora: LoraShape) -> Path:
        self.number += 1
        return write_random_adapter(
            self.directory / name, self.directory / "model", lora, seed=self.number
        )

    def load(self, adapter: Path) -> str:
        """The reason for which vLLM refuses the adapter. The result is empty if vLLM loads the
        adapter."""
        request = LoRARequest(f"run@{self.number}", self.number, str(adapter))
        try:
            assert self.executor.add_lora(request)
        except RuntimeError as error:
            assert self.number not in self.worker.list_loras(), "it keeps what it refused"
            return str(error)
        return ""

    def load_changed(self, adapter: Path, change: Callable[[Tensors], Tensors]) -> str:
        """Loads the adapter as `load` does, in a vLLM that applies `change` to the file's
        tensors."""
        load = LoRAModel.from_lora_tensors.__func__  # type: ignore[attr-defined]

        def changed(cls: type, *args: Any, tensors: Tensors, **options: Any) -> Any:
            return load(cls, *args, tensors=change(tensors), **options)

        LoRAModel.from_lora_tensors = classmethod(changed)
        try:
            return self.load(adapter)
        finally:
            LoRAModel.from_lora_tensors = classmethod(load)

    def overwrite(self, layer: str, matrix: str) -> str:
        """The reason for which the check refuses an adapter whose values changed in vLLM. The
        result is empty if the check passes. One value of `matrix` in `layer` changes after the
        load."""
        adapter = self.write("overwritten", LORA)
        assert not (problem := self.load(adapter)), problem
        request = LoRARequest(f"run@{self.number}", self.number, str(adapter))
        manager = self.worker.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(self.number)
        getattr(manager.modules[layer], f"lora_{matrix}_stacked")[0][slot, 0, 7, 7] += 0.5
        try:
            held_adapter.check(self.worker, request)
        except ValueError as error:
            return str(error)
        return ""


def main() -> None:
    worker = Worker(Path(sys.argv[1]))
    found: dict[str, str] = {}
    for name, lora in RIGHT.items():
        found[name] = worker.load(worker.write(name, lora))
    for name, change in HELD.items():
        found[name] = worker.load_changed(worker.write(name, LORA), change)
    ignored = worker.write("ignored", LORA)
    tensors = load_file(ignored / WEIGHTS_FILE)
    save_file(
        {n.replace("model.model", "model.vision.model"): t for n, t in tensors.items()},
        ignored / WEIGHTS_FILE,
    )
    found["ignored prefix"] = worker.load(ignored)
    layer = "model.layers.0.self_attn.qkv_proj"
    found["overwritten"] = worker.overwrite(layer, "b")
    found["overwritten beyond the rank"] = worker.overwrite(layer, "a")
    found["after all"] = worker.load(worker.write("after", LORA))
    for name, words in found.items():
        print(json.dumps([name, words]))


if __name__ == "__main__":
    main()
