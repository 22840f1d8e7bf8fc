"""vLLM's own weights become those of an adapter merged into the base model, in place and between two engine steps.

`MergedWeights` belongs to one worker. Its second copy stays as the base model's files have it, so each merge starts
from there and no rounding accumulates.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tandem.inference.server.command import CopyPlace
from tandem.inference.server.worker.model_weights import BASE, Factors, ModelWeights
from tandem.inference.server.worker.weight_plan import Block
from tandem.model.transfer.merge import merge


class MergedWeights(ModelWeights):
    def __init__(
        self, model: torch.nn.Module, base_model: str, place_of: Callable[[int], CopyPlace], targets: frozenset[str]
    ) -> None:
        """`targets`: names of the linear layers that adapters may touch. See `ModelWeights`."""
        super().__init__(model, base_model, place_of, targets)
        self._threads = ThreadPoolExecutor(1)
        self._staged = {BASE: Future[Factors]()}
        self._staged[BASE].set_result({})
        self._used = deque([BASE], maxlen=2)  # the versions that the weights had last
        self._changed: set[Block] = set()

    def stage(self, version: str, scale: float, _source: dict[str, Any] | None = None) -> None:
        """Begin to read the adapter in the directory `version` onto the device, in a thread. `staged` says when it is
        there. Others are forgotten, but those of the two versions that were in use last."""
        before = self._staged.get(version)
        if before is None or (before.done() and before.exception()):
            self._staged = {name: self._staged[name] for name in {BASE, *self._used}}
            self._staged[version] = self._threads.submit(self._factors, version, scale)

    def staged(self, version: str) -> str:
        """How the weights of this version came, if `swap` to it is possible now, else nothing. Raises RuntimeError
        where its adapter can't be read."""
        staged = self._staged[version]
        if not staged.done():
            return ""
        if error := staged.exception():
            raise RuntimeError(f"the adapter of {version} can't be read: {type(error).__name__}: {error}") from error
        return "merge"

    @torch.inference_mode()
    def swap(self, version: str) -> None:
        """Make the weights those of a staged version. Call it between two steps, on the thread that runs them.

        If it raises, the weights are torn, until a swap to the version before or another one.
        """
        if not self.staged(version):
            raise RuntimeError(f"the adapter of {version} is not staged")
        self._write(self._staged[version].result())
        if version != self._used[-1]:
            self._used.append(version)

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
