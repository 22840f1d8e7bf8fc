"""The programs that run under one supervisord, by role: their order and how long they may take to stop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Program:
    name: str
    module: str
    stop_seconds: int  # between SIGTERM and SIGKILL
    essential: bool = True  # any other may fail again and again without ending `tandem up`
    costly: bool = False  # to start again: its state takes minutes to make
    port: Literal["controller", "inference", "metrics"] | None = None  # it listens on settings.<port>_port


_EXPORTER = Program("exporter", "tandem.metrics.exporter", 5, essential=False, port="metrics")
_CONTROLLER = Program("controller", "tandem.controller", 8, port="controller")
_VLLM = Program("vllm", "tandem.inference.server.serve", 20, costly=True, port="inference")
_PUBLISHER = Program("publisher", "tandem.inference.publisher", 8)
# It stops its ranks, puts the job back, and wakes a vLLM that shares its GPUs. Its own bound is
# tandem.trainer.runner.loop.STOP_SECONDS.
_RUNNER = Program("runner", "tandem.trainer.runner", 61, costly=True)
PROGRAMS: dict[str, tuple[Program, ...]] = {
    "all": (_EXPORTER, _CONTROLLER, _VLLM, _PUBLISHER, _RUNNER),
    "trainer": (_EXPORTER, _RUNNER),
    "inference": (_EXPORTER, _VLLM, _PUBLISHER),
}
"""By role, in the order in which they start."""
_LEFTOVER_SECONDS = 13


def supervisord_seconds(programs: Sequence[Program]) -> int:
    """How long supervisord may take to stop its programs, one after another."""
    return sum(program.stop_seconds for program in programs) + 8


def stop_seconds(programs: Sequence[Program]) -> int:
    """Bound between SIGTERM and the end of `tandem up`, which then ends the processes that supervisord left."""
    return supervisord_seconds(programs) + _LEFTOVER_SECONDS
