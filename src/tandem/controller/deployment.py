"""The state that the routes share: settings, spool, the base model's architecture, and threads for
heavy work."""

import threading
from functools import cached_property
from typing import Annotated

import anyio
from fastapi import Depends, Request

from tandem.config import Settings, resolve_model
from tandem.controller.event_streams import EventStreams
from tandem.families.arch import Arch
from tandem.families.registry import read_arch
from tandem.metrics.controller import HTTP_METRICS
from tandem.metrics.metric import Samples
from tandem.spool import Spool

# Parsing and packing a batch keeps one core busy. It also needs several times as much memory as the
# request itself. Large batches are therefore handled one at a time. Small requests mostly wait for
# the volume and need little memory, so more of them run at the same time.
PACKING_THREADS, SMALL_PACKING_THREADS = 2, 4


class Deployment:
    """The state of one controller process. A new process rebuilds the whole state from the settings
    and the spool.

    Raises InvalidInput if no base model is set, SpoolUnusable if the volume can't be used.
    """

    def __init__(self, settings: Settings) -> None:
        settings.model_path()
        self.settings = settings
        self.base_model = str(settings.base_model)
        self.spool = Spool.create(settings.root)
        self.packing_threads = anyio.CapacityLimiter(PACKING_THREADS)
        self.small_packing_threads = anyio.CapacityLimiter(SMALL_PACKING_THREADS)
        self.large_bodies = anyio.CapacityLimiter(1)
        # A request holds this lock while it checks and creates a run with merged weights, because
        # only one such run may exist.
        self.merged_runs = threading.Lock()
        self.event_streams = EventStreams(self.spool)
        self.counts = Samples(HTTP_METRICS)

    @property
    def model_path(self) -> str:
        """The base model's path or hub name in this container."""
        return self.settings.model_path()

    @cached_property
    def arch(self) -> Arch:
        """The base model's architecture, read once. Raises the errors of `read_arch`; the next
        access then reads the architecture again."""
        return read_arch(self.model_path)

    def is_base_model(self, name: str) -> bool:
        """Whether `name` is the name of the deployment's base model, or resolves to the base
        model's path."""
        return name == self.base_model or resolve_model(self.settings.root, name) == self.model_path


def _of(request: Request) -> Deployment:
    deployment: Deployment = request.app.state.deployment
    return deployment


# The type of a route's parameter that FastAPI fills with the deployment.
CurrentDeployment = Annotated[Deployment, Depends(_of)]
