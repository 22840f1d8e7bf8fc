"""Transfers whole weights from the ranks to vLLM after the checkpoint is committed. The ranks send
the weights to vLLM's workers, or write them as a model's files. An error in this module never fails
the job: if the weights don't arrive, vLLM gets them in another way.
"""

import json
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.families.adapter import peft_keys
from tandem.model import device, parallel
from tandem.model.policy import Policy
from tandem.model.transfer.channel import (
    BUFFER_BYTES,
    BUFFERS,
    STALL_SECONDS,
    Channel,
    Pending,
    finish,
    join_meeting,
    make_meeting,
)
from tandem.model.transfer.members import fix_members, read_members
from tandem.model.transfer.merge import merge
from tandem.model.transfer.parts import Part, agreement, send_order, senders
from tandem.spool.attempt import Attempt
from tandem.spool.schema import ONLY, Manifest
from tandem.system import liveness
from tandem.trainer.launch import RankSettings
from tandem.trainer.rank.model_files import ModelFiles, Weights
from tandem.trainer.rank.way_to_vllm import address_for_vllm


class TrainedWeights(Weights):
    """The policy's base weights, merged with the adapter if there is one. Each merged weight is
    computed in float64, then rounded to float32, and then to `dtype`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.base())
        self._adapter = policy.lora_parameters()
        scale = policy.lora.alpha / policy.lora.rank if policy.lora else 0.0
        self._scale = torch.full((1,), scale, dtype=torch.float64, device=self.device)

    def _fill(self, part: Part, source: torch.Tensor, out: torch.Tensor) -> None:
        key_a, key_b = peft_keys(part.name.removesuffix(".weight"))
        if key_a not in self._adapter:
            super()._fill(part, source, out)
            return
        a, b = self._adapter[key_a].data, self._adapter[key_b].data
        blocks, rows = part.in_parameter
        a = a[blocks] if a.ndim == 3 else a.expand(len(source), *a.shape)
        b = b.view(part.blocks, -1, b.shape[-1])[
            blocks, rows.start - part.begin : rows.stop - part.begin
        ]
        merge(out, source, a, b, self._scale)


@dataclass
class Publication:
    """The publication of one job's weights. `offer` and `send` are collective operations of all
    ranks."""

    settings: RankSettings
    model: Path  # the base model's directory
    policy: Policy
    attempt: Attempt
    beat: Callable[[], None]
    event: Callable[..., None]
    _offer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rank, self._sizes = self.policy.topology.rank, self.policy.topology.sizes
        # True: ranks send the weights to vLLM's workers over NCCL; False: ranks write the weights
        # to files.
        self._meets = self.settings.way == "nccl"
        # The linear layers that are trained; None: all weights are trained.
        self._targets = list(self.policy.lora.targets) if self.policy.lora else None

    def offer(self) -> None:
        """Announce the weights before the checkpoint exists, so that the publisher waits for
        them."""
        way, offer = self.settings.way, dict[str, Any]()
        try:
            if self._meets and self._rank == 0:
                make_meeting(self.attempt.meeting)
                meeting = self.attempt.meeting.relative_to(self.attempt.spool.root)
                offer = {"address": address_for_vllm(self.attempt.spool)}
                offer |= {"meeting": meeting.as_posix()}
                offer |= {"sizes": asdict(self._sizes), "targets": self._targets}
                offer |= {"servers": self._servers()}
        except Exception as error:
            traceback.print_exc()
            offer = {"error": f"{type(error).__name__}: {error}"}
        self._offer = parallel.gather_objects(offer)[0]
        if "error" not in self._offer:
            self.event("offered", transport=way, **self._offer)

    def _servers(self) -> list[str]:
        """The names of the ready inference servers, which are expected to receive the weights. The
        list is [ONLY] if the only server has no name."""
        living = self.attempt.spool.replicas.fresh()
        return sorted(name for name, r in living.items() if r.ready) if living else [ONLY]

    def send(self, checkpoint: Manifest | None) -> None:
        """Sends the weights. `checkpoint`: the checkpoint that contains the weights, on rank 0;
        None on other ranks."""
        begin, way = time.perf_counter(), self.settings.way
        try:
            outcome = self._send_to_vllm() if self._meets else self._write_files(checkpoint)
        except Exception as error:
            traceback.print_exc()
            self.event(
                "sent", transport=way, error={"type": type(error).__name__, "message": str(error)}
            )
        else:
            self.event("sent", transport=way, seconds=time.perf_counter() - begin, **outcome)

    def _write_files(self, checkpoint: Manifest | None) -> dict[str, Any]:
        weights, arch = TrainedWeights(self.policy), self.policy.arch
        files = ModelFiles(self.attempt.staged_model, arch, weights.dtype)

        def create() -> None:
            if self._rank == 0:
                files.create(self.model)

        self._together(create)
        self._together(lambda: files.write(weights, arch, self._sizes, self._rank, beat=self.beat))
        if checkpoint is None:
            return {}
        return {"bytes": self.attempt.spool.merged.commit(self.attempt.staged_model, checkpoint)}

    def _send_to_vllm(self) -> dict[str, Any]:
        if "error" in self._offer:
            raise RuntimeError(self._offer["error"])
        sends = self._rank in senders(self._sizes)
        outcomes = self._together(lambda: self._watched(self._send_own) if sends else (0, 0.0, []))
        sizes, seconds, servers = zip(*outcomes, strict=True)
        return {"bytes": sum(sizes), "sending_seconds": max(seconds), "servers": max(servers)}

    def _together[T](self, action: Callable[[], T]) -> list[T]:
        """The results of `action` on all ranks. If `action` fails on one rank, all ranks raise an
        error."""
        own: Any
        try:
            own = action(), ""
        except Exception as error:
            traceback.print_exc()
            own = None, f"rank {self._rank}: {type(error).__name__}: {error}"
        outcomes = parallel.gather_objects(own)
        if problems := [problem for _, problem in outcomes if problem]:
            raise RuntimeError(problems[0])
        return [result for result, _ in outcomes]

    def _watched[T](self, action: Callable[[Callable[[], None]], T]) -> T:
        """The result of `action`, which runs in a thread. `action` gets a function that it has to
        call to show that it makes progress. Raises TimeoutError if `action` has not called that
        function for STALL_SECONDS + 1. The limit is needed because NCCL connects without a time
        limit of its own."""
        last = time.monotonic()

        def sign_of_life() -> None:
            nonlocal last
            last = time.monotonic()

        def look() -> None:
            self.beat()
            if time.monotonic() > last + STALL_SECONDS + 1:
                raise TimeoutError(f"vLLM's workers gave no sign of life for {STALL_SECONDS:.0f} s")

        return liveness.in_thread(lambda: device.on_device(action)(sign_of_life), look, seconds=0.1)

    def _send_own(self, beat: Callable[[], None]) -> tuple[int, float, list[str]]:
        """Send this rank's parts to vLLM's workers, buffer by buffer. Returns the number of bytes,
        the seconds of the transfer (without connecting), and the inference servers that received
        the parts. Raises torch's error if a worker has died or stopped, and TimeoutError if no
        worker joins.

        `beat` is called each time that the workers show progress.
        """
        weights, offer, ranks = TrainedWeights(self.policy), self._offer, senders(self._sizes)
        own, dtype, where = ranks.index(self._rank), weights.dtype, weights.device
        store = join_meeting(self.attempt.meeting)
        most = BUFFER_BYTES // dtype.itemsize
        order = send_order(self.policy.arch, self._targets, sizes=self._sizes, most=most)
        if own == 0:
            store.set("layout", json.dumps(agreement(order, str(dtype))))
            members = fix_members(store, offer["servers"], beat)
        else:
            members = read_members(store)
        workers = sum(members.values())
        beat()
        channel = Channel(store, own, len(ranks) + workers, where, offer["address"])
        try:
            beat()
            most = max(entry.size for entry in order)
            memory = [torch.empty(most, dtype=dtype, device=where) for _ in range(BUFFERS)]
            going, begin = deque[Pending](), time.perf_counter()
            for number, entry in enumerate(order):
                if len(going) == BUFFERS:
                    finish(going.popleft())
                    beat()
                buffer = memory[number % BUFFERS][: entry.size]
                if entry.sender == own:
                    weights.fill(entry.parts, buffer)
                going.append(channel.broadcast(buffer, entry.sender))
            for pending in going:
                finish(pending)
                beat()
            seconds = time.perf_counter() - begin
            store.set(f"complete/{own}", "")
            deadline = time.monotonic() + STALL_SECONDS
            while int(store.add("done", 0)) < workers:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"vLLM's workers did not say within {STALL_SECONDS:.0f} s that they"
                        " have all"
                    )
                time.sleep(0.001)
        finally:
            channel.close()
        size = sum(entry.size for entry in order if entry.sender == own) * dtype.itemsize
        return size, seconds, list(members)
