"""Receives whole weights into a second copy while the live weights are in use. A swap exchanges the
copy and the live weights, between two engine steps. After a swap, the copy has the old weights.
Until the next version arrives, a second swap restores the old weights.
"""

import contextlib
import json
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.families.adapter import stacked_name
from tandem.families.arch import Arch
from tandem.families.registry import read_arch
from tandem.inference.server.command import CopyPlace
from tandem.inference.server.worker.model_weights import BASE, ModelWeights, stored_tensors
from tandem.inference.server.worker.weight_layout import CannotWrite, Rectangle
from tandem.model.transfer.channel import (
    BUFFER_BYTES,
    BUFFERS,
    STALL_SECONDS,
    Channel,
    Pending,
    finish,
    join_meeting,
)
from tandem.model.transfer.members import join_members
from tandem.model.transfer.merge import merge
from tandem.model.transfer.parts import Part, SendBuffer, agreement, send_order, senders
from tandem.system.network import own_address
from tandem.topology.sizes import Sizes

log = logging.getLogger("vllm.tandem")

SPARE_BYTES = 64 * 2**20
"""Bytes that are exchanged at a time; an exchange needs this much memory on the GPU."""

Source = dict[str, Any]
"""The source of a version: `way`, and the data that this way needs: a `meeting` if ranks send the
weights, a `directory` if they are read from a model's files."""


@dataclass(frozen=True)
class Content:
    """The content of a parameter, or of its second copy."""

    version: str = BASE  # an empty string means that no version is complete
    # rectangles that may differ from the base model's weights
    changed: frozenset[Rectangle] = frozenset()


@dataclass
class Arrival:
    """A version that is being written into the second copy. `way`: how the version came to this
    worker; empty until the whole version has arrived."""

    version: str
    source: Source | None = None
    way: str = ""
    error: str = ""
    stopped: bool = False  # Whether the thread that writes this version must stop.
    # The monotonic time of the last sign of life from the processes that send the weights; infinite
    # if no other process sends weights.
    last: float = math.inf

    def beat(self) -> None:
        self.last = time.monotonic()


class LandingWeights(ModelWeights):
    """Receives and swaps whole weights, with the same methods as `MergedWeights`. Every tensor may
    change."""

    def __init__(
        self,
        model: torch.nn.Module,
        base_model: str,
        place: CopyPlace | float,
        worker: tuple[int, int],
    ) -> None:
        """
        Args:
            worker: this worker's index, and the number of workers.
        """
        super().__init__(model, base_model, place)
        self._base_model, self._worker = base_model, worker
        self._live = dict.fromkeys(self._copy, Content())
        self._landed = dict.fromkeys(self._copy, Content())
        self._arrival = Arrival(BASE, way="merge")
        self._writing = threading.Lock()
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._rectangles_of = defaultdict[str, list[Rectangle]](list)
        for rectangle in self._adapted:
            self._rectangles_of[
                stacked_name(rectangle.names[0]) if rectangle.stacked else rectangle.names[0]
            ].append(rectangle)

    @property
    def spare_bytes(self) -> int:
        """Bytes of GPU memory needed besides the copy, for an exchange and for arriving parts."""
        return SPARE_BYTES + BUFFERS * BUFFER_BYTES

    def stage(self, version: str, scale: float, source: Source | None = None) -> None:
        """Start a thread that brings a version into the second copy. Does nothing if the version
        has arrived, or is already on its way from this source. The version that was in the second
        copy is lost.

        Args:
            source: the source of whole weights; if `source` is None, the weights are merged from
                the base model's files and the adapter in the directory `version` (for BASE: without
                an adapter).
        """
        before = self._arrival
        coming = (
            (before.version, before.source) == (version, source)
            and not before.error
            and not before.way
        )
        if coming or self._has(version):
            return
        with self._writing:
            before.stopped = True
        self._arrival = now = Arrival(version, source)
        changed = frozenset(
            rectangle for content in self._landed.values() for rectangle in content.changed
        )
        self._record(now, "", frozenset(self._adapted))
        threading.Thread(target=self._land, args=(now, scale, changed), daemon=True).start()

    def staged(self, version: str) -> str:
        """The way by which the weights of this version came; empty while they are still arriving.
        Raises RuntimeError if the weights did not arrive, or if nothing has arrived for
        STALL_SECONDS + 1."""
        arrival = self._arrival
        if self._has(version):
            return arrival.way if arrival.version == version else "merge"
        # Connecting with NCCL has no time limit of its own.
        if time.monotonic() > arrival.last + STALL_SECONDS + 1:
            arrival.error = f"nothing has come for {STALL_SECONDS:.0f} s"
        if arrival.version != version or arrival.error:
            raise RuntimeError(
                f"the weights of {version} did not arrive: {arrival.error or 'nobody sent them'}"
            )
        return ""

    def _has(self, version: str) -> bool:
        return all(
            version in (self._live[name].version, self._landed[name].version) for name in self._copy
        )

    def _land(self, arrival: Arrival, scale: float, changed: frozenset[Rectangle]) -> None:
        """Fill the second copy. `changed`: the rectangles in which the copy may differ from the
        base model."""
        try:
            with torch.inference_mode(), self._in_stream(self._stream):
                if self._stream is not None:
                    # Wait until the previous version has been written.
                    self._stream.synchronize()
                arrived = self._bring(arrival, scale)
                for rectangle in changed - arrived:
                    self._put(arrival, rectangle, self._read(self._base, rectangle))
            arrival.way = arrival.source["way"] if arrival.source else "merge"
            self._record(arrival, arrival.version, arrived)
        except Exception as error:
            arrival.error = f"{type(error).__name__}: {error}"
            if not arrival.stopped:
                log.warning("The weights of %s did not arrive", arrival.version, exc_info=True)

    def _bring(self, arrival: Arrival, scale: float) -> frozenset[Rectangle]:
        """Write into the second copy all tensors that differ from the base model. Returns the
        rectangles of the written tensors."""
        source = arrival.source
        if source is None:
            factors = {} if arrival.version == BASE else self._factors(arrival.version, scale)
            for rectangle, ab_and_scale in factors.items():
                base = self._read(self._base, rectangle).to(self._device)
                merge(out := torch.empty_like(base), base, *ab_and_scale)
                self._put(arrival, rectangle, out)
            return frozenset(factors)
        if "meeting" in source:
            return self._receive(arrival, source)
        files = stored_tensors(source["directory"])
        for rectangle in self._adapted:
            self._put(arrival, rectangle, self._read(files, rectangle))
        return frozenset(self._adapted)

    def _receive(self, arrival: Arrival, source: Source) -> frozenset[Rectangle]:
        """Write the parts that the trainer's ranks send. Returns the rectangles that have arrived
        completely."""
        arch, dtype = read_arch(self._base_model), next(iter(self._copy.values())).dtype
        came = dict.fromkeys(self._adapted, 0)
        arrival.beat()
        for part, values in receive(source, arch, dtype, self._device, *self._worker, arrival.beat):
            if part.name not in self._rectangles_of:
                raise CannotWrite(f"vLLM's model has no place for {part.name}")
            for rectangle in self._rectangles_of[part.name]:
                came[rectangle] += self._scatter(arrival, rectangle, part, values)
        arrival.last = math.inf
        for rectangle, count in came.items():
            if 0 < count < rectangle.view(self._copy[rectangle.parameter]).numel():
                raise CannotWrite(f"only a part of {rectangle.names[0]} has come")
        return frozenset(rectangle for rectangle, count in came.items() if count)

    def _scatter(
        self, arrival: Arrival, rectangle: Rectangle, part: Part, values: torch.Tensor
    ) -> int:
        """Write into the second copy the elements of `part` that lie in `rectangle`. Returns the
        number of written elements."""
        box = (slice(None), *rectangle.in_tensor) if rectangle.stacked else rectangle.in_tensor
        source, target = [], []
        for has, wants in zip(part.in_tensor, box, strict=True):
            first, end, _ = wants.indices(2**40)
            begin, end = max(has.start, first), min(has.stop, end)
            if begin >= end:
                return 0
            source.append(slice(begin - has.start, end - has.start))
            target.append(slice(begin - first, end - first))
        place = rectangle.view(self._copy[rectangle.parameter])
        place = (place if rectangle.stacked else place[0])[tuple(target)]
        self._write(arrival, place, values[tuple(source)])
        return place.numel()

    def _record(self, arrival: Arrival, version: str, changed: frozenset[Rectangle]) -> None:
        """Record which version the second copy contains from now on."""
        by_parameter = {
            name: frozenset(rectangle for rectangle in changed if rectangle.parameter == name)
            for name in self._copy
        }
        with self._writing:
            if not arrival.stopped:
                self._landed = {name: Content(version, by_parameter[name]) for name in self._copy}

    def _read(self, tensors: Mapping[str, Any], rectangle: Rectangle) -> torch.Tensor:
        """A rectangle's values [names, ...], in the parameter's dtype. `tensors`: the result of
        `stored_tensors` for a model."""
        dtype = self._copy[rectangle.parameter].dtype
        return torch.stack([tensors[name][rectangle.in_tensor] for name in rectangle.names]).to(
            dtype
        )

    def _put(self, arrival: Arrival, rectangle: Rectangle, values: torch.Tensor) -> None:
        place = rectangle.view(self._copy[rectangle.parameter])
        if place.shape != values.shape:
            raise ValueError(
                f"{rectangle.names[0]} has the shape {list(values.shape[1:])}, not"
                f" {list(place.shape[1:])}"
            )
        self._write(arrival, place, values)

    def _write(self, arrival: Arrival, place: torch.Tensor, values: torch.Tensor) -> None:
        with self._writing:
            if arrival.stopped:
                raise RuntimeError("another version is wanted")
            place.copy_(values, non_blocking=True)

    @torch.inference_mode()
    def swap(self, version: str) -> None:
        """Make the staged version `version` the current weights, like `MergedWeights.swap`. The
        second copy then has the old weights. Raises RuntimeError if the version has not arrived."""
        if not self._has(version):
            raise RuntimeError(f"{version} is not staged")
        for name in self._copy:
            if self._live[name].version != version:
                self._exchange(name)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _exchange(self, name: str) -> None:
        live, landed = self._live[name], self._landed[name]
        if live.changed or landed.changed:
            parameter, copy = self._parameters[name].data, self._copy[name]
            rows = max(1, SPARE_BYTES // (parameter.nbytes // len(parameter)))
            unknown = Content("", frozenset(self._adapted))
            for live_rows, copy_rows in zip(parameter.split(rows), copy.split(rows), strict=True):
                arrived = copy_rows.to(self._device, copy=True, non_blocking=True)
                self._live[name] = self._landed[name] = unknown
                copy_rows.copy_(live_rows, non_blocking=True)
                live_rows.copy_(arrived)
        self._live[name], self._landed[name] = landed, live


def receive(
    source: Source,
    arch: Arch,
    dtype: torch.dtype,
    where: torch.device,
    rank: int,
    workers: int,
    beat: Callable[[], None],
) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yields each part that the ranks send, with its values. The values are valid only until the
    next part is taken.

    Raises torch's error if a rank or another worker has died or stopped. Raises RuntimeError if the
    ranks have started to send, and this server is not among the receivers.

    Args:
        source: an offer (`trainer/rank/publication.py`), with the name of this worker's server.
        where: the device of the yielded values.
        rank: this worker's number among the `workers` of the server.
        beat: called whenever a buffer or another sign of life from the ranks has arrived.
    """
    store = join_meeting(Path(source["meeting"]))
    address = own_address(source["address"])
    sizes = Sizes(**source["sizes"])
    count = len(senders(sizes))
    order = send_order(arch, source["targets"], sizes=sizes, most=BUFFER_BYTES // dtype.itemsize)
    if (theirs := json.loads(store.get("layout"))) != agreement(order, str(dtype)):
        raise ValueError(
            f"the ranks would send {theirs}, this vLLM expects {agreement(order, str(dtype))}"
        )
    beat()
    place, receivers = join_members(store, source["server"], rank, workers)
    beat()
    with contextlib.closing(
        Channel(store, count + place, count + receivers, where, address)
    ) as channel:
        beat()
        most = max(entry.size for entry in order)
        memory = [torch.empty(most, dtype=dtype, device=where) for _ in range(BUFFERS)]
        coming = deque[tuple[Pending, SendBuffer, torch.Tensor]]()
        for number, entry in enumerate(order):
            if len(coming) == BUFFERS:
                yield from _arrived(*coming.popleft())
                beat()
            buffer = memory[number % BUFFERS][: entry.size]
            coming.append((channel.broadcast(buffer, entry.sender), entry, buffer))
        while coming:
            yield from _arrived(*coming.popleft())
            beat()
        if where.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for sender in range(count):
            # NCCL may treat a sender's death as the end of a buffer. Each sender therefore confirms
            # in the store that it has sent all buffers, and this worker waits for all
            # confirmations.
            store.get(f"complete/{sender}")
        store.add("done", 1)


def _arrived(
    pending: Pending, entry: SendBuffer, buffer: torch.Tensor
) -> Iterator[tuple[Part, torch.Tensor]]:
    finish(pending)
    for part, values in zip(
        entry.parts, buffer.split([part.size for part in entry.parts]), strict=True
    ):
        yield part, values.view(part.shape)
