"""Whole weights on their way from the ranks to vLLM, after the checkpoint is committed.

Nothing here fails the job: where the weights don't arrive, vLLM gets them another way.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore, TCPStore

from tandem.config import Settings
from tandem.families.arch import Arch
from tandem.families.parts import buffers, layout, senders
from tandem.model import device, parallel
from tandem.model.parallel import Topology
from tandem.model.policy import Policy
from tandem.model.transfer.channel import BUFFER_BYTES, STALL_SECONDS, join_store, own_address, serve_store
from tandem.spool import Spool
from tandem.spool.schema import Manifest
from tandem.trainer.rank.model_files import ModelFiles
from tandem.trainer.rank.publish.sender import send
from tandem.trainer.rank.publish.weights import TrainedWeights


@dataclass
class Publication:
    """One job's. Each method is a collective of all ranks."""

    settings: Settings
    spool: Spool
    model: Path  # the base model's directory
    arch: Arch
    policy: Policy
    topology: Topology
    work: Path
    name: str  # of the job and its attempt
    beat: Callable[[], None]
    event: Callable[..., None]
    _store: TCPStore | None = None  # on rank 0: brings the ranks and vLLM's workers together
    _offer: dict[str, Any] = field(default_factory=dict)

    def offer(self) -> None:
        """Say that the weights will be sent, before the checkpoint exists, so that the publisher waits for them."""
        way, offer = self.settings.way, dict[str, Any]()
        try:
            if way != "volume" and self.topology.rank == 0:
                url = urlsplit(self.settings.resolved_inference_url)
                address = own_address(str(url.hostname), url.port or 80)
                self._store = serve_store(address)
                offer = {"address": address, "port": self._store.port, "prefix": self.name}
                offer |= {"sizes": asdict(self.topology.sizes), "targets": self._targets}
        except Exception as error:
            traceback.print_exc()
            offer = {"error": f"{type(error).__name__}: {error}"}
        self._offer = parallel.gather_objects(offer)[0]
        if "error" not in self._offer:
            self.event("offered", transport=way, **self._offer)

    def send(self, checkpoint: Manifest | None) -> None:
        """`checkpoint`: on rank 0, the one that has the weights."""
        begin, way = time.perf_counter(), self.settings.way
        try:
            outcome = self._write_files(checkpoint) if way == "volume" else self._send_to_vllm()
        except Exception as error:
            traceback.print_exc()
            self.event("sent", transport=way, error={"type": type(error).__name__, "message": str(error)})
        else:
            self.event("sent", transport=way, seconds=time.perf_counter() - begin, **outcome)

    def _send_to_vllm(self) -> dict[str, float]:
        if "error" in self._offer:
            raise RuntimeError(self._offer["error"])
        mine = (0, 0.0)

        def send_own() -> None:
            nonlocal mine
            mine = self._watched(self._send_own)

        self._together(send_own if self._sends else lambda: None)
        sizes, seconds = zip(*parallel.gather_objects(mine), strict=True)
        return {"bytes": sum(sizes), "sending_seconds": max(seconds)}

    @property
    def _targets(self) -> list[str] | None:
        """Which linear layers are trained; None: everything."""
        return list(self.policy.lora.targets) if self.policy.lora else None

    @property
    def _sends(self) -> bool:
        return self.topology.rank in senders(self.topology.sizes)

    def _send_own(self, beat: Callable[[], None]) -> tuple[int, float]:
        """Send this rank's parts; returns their bytes, and the seconds that they were on their way."""
        weights, rank, offer = TrainedWeights(self.policy), self.topology.rank, self._offer
        store = PrefixStore(self.name, self._store or join_store(offer["address"], offer["port"])[0])
        most = BUFFER_BYTES // weights.dtype.itemsize
        lists = list(buffers(self.arch, self._targets, sizes=self.topology.sizes, rank=rank, most=most))
        store.set(f"layout/{rank}", json.dumps(layout(lists, str(weights.dtype))))
        return send(self.settings.way, store, rank, offer["address"], weights, lists, beat)

    def _watched[T](self, action: Callable[[Callable[[], None]], T]) -> T:
        """`action` in a thread. TimeoutError where it does not call the function that it is given for a while:
        connecting NCCL has no limit of its own."""
        last, results, errors = time.monotonic(), list[T](), list[Exception]()

        def beat() -> None:
            nonlocal last
            last = time.monotonic()

        def run() -> None:
            try:
                results.append(action(beat))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=device.on_device(run), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            self.beat()
            if time.monotonic() > last + STALL_SECONDS + 1:
                raise TimeoutError(f"vLLM's workers gave no sign of life for {STALL_SECONDS:.0f} s")
        if errors:
            raise errors[0]
        return results[0]

    def _write_files(self, checkpoint: Manifest | None) -> dict[str, float]:
        weights = TrainedWeights(self.policy)
        files, top = ModelFiles(self.work / "merged", self.arch, weights.dtype), self.topology

        def write() -> None:
            files.write(weights, self.arch, top.sizes, top.rank, beat=self.beat)

        self._together((lambda: files.create(self.model)) if top.rank == 0 else lambda: None)
        self._together(write)
        return {} if checkpoint is None else {"bytes": self.spool.merged.commit(self.work / "merged", checkpoint)}

    def _together(self, action: Callable[[], Any]) -> None:
        """`action` on every rank. If it fails on one, all raise."""
        problem = ""
        try:
            action()
        except Exception as error:
            traceback.print_exc()
            problem = f"rank {self.topology.rank}: {type(error).__name__}: {error}"
        if problems := [problem for problem in parallel.gather_objects(problem) if problem]:
            raise RuntimeError(problems[0])
