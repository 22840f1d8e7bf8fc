"""vLLM's own weights become those of an adapter merged into the base model, in place and between two engine steps.

`MergedWeights` belongs to one worker. Its second copy stays as the base model's files have it, so each merge starts
from there and no rounding accumulates.
"""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tandem.inference.server.worker.factors import FactorReader, Factors
from tandem.inference.server.worker.model_weights import BASE, ModelWeights
from tandem.inference.server.worker.weight_plan import Block
from tandem.model.transfer.merge import merge


@dataclass
class Staged:
    """The adapter of one version, being read or read."""

    factors: Factors = field(default_factory=dict)
    error: str = ""
    ready: bool = False


class MergedWeights(ModelWeights):
    def __init__(
        self, model: torch.nn.Module, base_model: str, targets: frozenset[str], copy: Literal["device", "host"]
    ) -> None:
        """`targets`: names of the linear layers that adapters may touch. See `ModelWeights`."""
        super().__init__(model, base_model, targets, copy)
        self._reader = FactorReader(self._adapted, self._base_files, self._device)
        self._versions = {BASE: Staged(ready=True)}
        self._changed: set[Block] = set()

    def stage(self, version: str, directory: str, scale: float, _source: dict[str, Any] | None = None) -> None:
        """Begin to read an adapter in PEFT's format onto the device, in a thread. `staged` says when it is there."""
        if version not in self._versions or self._versions[version].error:
            self._versions[version] = staged = Staged()
            threading.Thread(target=self._read, args=(staged, directory, scale), daemon=True).start()

    def staged(self, version: str) -> str:
        """How the weights of this version came, if `swap` to it is possible now, else nothing. Raises RuntimeError
        where its adapter can't be read."""
        staged = self._versions[version]
        if staged.error:
            raise RuntimeError(f"the adapter of {version} can't be read: {staged.error}")
        return "merge" if staged.ready else ""

    def _read(self, staged: Staged, directory: str, scale: float) -> None:
        try:
            staged.factors = self._reader.read(directory, scale)
            staged.ready = True
        except Exception as error:
            staged.error = f"{type(error).__name__}: {error}"

    @torch.inference_mode()
    def swap(self, version: str) -> dict[str, Any]:
        """Make the weights those of a staged version. Call it between two steps, on the thread that runs them.

        If it raises, `version` is empty and the weights are torn, until a swap to the version before or another one.
        """
        begin, staged = time.perf_counter(), self._versions[version]
        if not staged.ready:
            raise RuntimeError(f"the adapter of {version} is not staged")
        self.version = ""
        self._write(staged.factors)
        self.version = version
        return {"seconds": time.perf_counter() - begin}

    def _write(self, factors: Factors) -> None:
        of_parameter = defaultdict[str, list[Block]](list)
        for block in self._adapted:
            if block in factors or block in self._changed:
                of_parameter[block.parameter].append(block)
        for name, blocks in of_parameter.items():
            base = self._copy[name].to(self._device, non_blocking=True)
            for block in blocks:
                out, source = block.view(self._parameters[name].data), block.view(base)
                if block in factors:
                    self._changed.add(block)
                    merge(out, source, *factors[block])
                else:
                    out.copy_(source)
                    self._changed.discard(block)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def discard(self, *, keep: list[str]) -> None:
        """Forget the adapters of versions that are neither in use nor in `keep`."""
        names = {BASE, self.version, *keep}
        self._versions = {name: staged for name, staged in self._versions.items() if name in names}
