"""The state that all routes of Tinker's API share within one controller process."""

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import anyio
from anyio import to_thread
from fastapi import Depends, Request
from starlette.responses import JSONResponse, Response

from tandem.controller.deployment import Deployment
from tandem.controller.tinker.futures import Failure, Futures, Outcome, Unfinished
from tandem.controller.tinker.models import Numbers
from tandem.controller.tinker.names import RequestId, request_of
from tandem.controller.tinker.passes import PROTOBUF
from tandem.controller.tinker.results import encode_sample
from tandem.controller.tinker.samples import SampleFutures
from tandem.controller.tinker.schemas import SampleRequest
from tandem.controller.tinker.vllm import SampleFailed, VllmSampler
from tandem.errors import TandemError
from tandem.vllm_client.names import BASE_MODEL_NAME

# Seconds for which the server waits for a result before it answers that there is no result yet. The
# package waits 45 s for an answer.
HOLD_SECONDS = 30.0
# The server looks for a request's result on the volume every _LOOK_SECONDS. After _SOON_SECONDS
# without a result, the server looks every _LATER_LOOK_SECONDS.
_LOOK_SECONDS, _LATER_LOOK_SECONDS, _SOON_SECONDS = 0.02, 0.1, 5.0
_THREADS = 8


class SampledModel(NamedTuple):
    """The model that a sampler samples: a checkpoint or, without a run, the base model."""

    run: str | None = None
    step: int = 0

    @property
    def model(self) -> str:
        """The model's name in requests to vLLM."""
        return BASE_MODEL_NAME if self.run is None else f"{self.run}@{self.step}"


class TinkerApi:
    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.numbers = Numbers(deployment)
        self.futures = Futures(deployment, self.numbers)
        self.samples = SampleFutures()
        self._sampler = VllmSampler(deployment.settings)
        # Calls that wait for results have their own threads, so that they do not queue behind heavy
        # requests.
        self.threads = anyio.CapacityLimiter(_THREADS)

    async def close(self) -> None:
        await self._sampler.close()

    async def run[T](self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work`, which waits for the volume, in a thread."""
        return await to_thread.run_sync(work, *arguments, limiter=self.threads)

    async def sample(self, of: SampledModel, request: SampleRequest) -> bytes:
        """The result of a sample, as protobuf."""

        async def want() -> None:
            if of.run is not None:
                await self.run(self.deployment.spool.served.want, of.run, of.step)

        return encode_sample(await self._sampler.sample(of.model, request, want))

    async def result(self, request_id: str) -> Response:
        """The answer to a client that asks for a request's result. The method waits for a result
        for at most HOLD_SECONDS. The client waits longer than this for an answer."""
        asked = request_of(request_id)
        if asked.of.kind == "sample":
            return await self._sampled(request_id)
        outcome = await self._trained(asked)
        return self._response(request_id, outcome)

    async def _trained(self, asked: RequestId) -> Outcome:
        begin = time.monotonic()
        while True:
            outcome = await self.run(self.futures.look, asked.of, asked.number)
            waited = time.monotonic() - begin
            if not isinstance(outcome, Unfinished) or waited > HOLD_SECONDS:
                return outcome
            soon = waited < _SOON_SECONDS
            await asyncio.sleep(_LOOK_SECONDS if soon else _LATER_LOOK_SECONDS)

    async def _sampled(self, request_id: str) -> Response:
        try:
            ended = await self.samples.wait(request_id, HOLD_SECONDS)
        except KeyError:
            # The sample is unknown if the controller has restarted, or if the client fetched the
            # result long ago.
            return gone("the sample is gone; send the request again")
        if ended is None:
            return self._response(request_id, Unfinished())
        if ended.cancelled():
            return gone("the sample was cancelled")
        match ended.exception():
            case None:
                return self._response(request_id, ended.result())
            case SampleFailed() as error:
                category = "user" if error.user else "server"
                return self._response(request_id, Failure(str(error), category))
            case TandemError() as error:
                return self._response(request_id, Failure(str(error), "server"))
            case error:
                raise error

    def _response(self, request_id: str, outcome: Outcome) -> Response:
        match outcome:
            case bytes():
                return Response(outcome, media_type=PROTOBUF)
            case Failure():
                return JSONResponse({"error": outcome.message, "category": outcome.category})
            case Unfinished():
                again = {"type": "try_again", "request_id": request_id}
                if not outcome.reason:
                    return JSONResponse(again | {"queue_state": "active"})
                state = {"queue_state": "paused_capacity", "queue_state_reason": outcome.reason}
                return JSONResponse(again | state)
            case _:
                return JSONResponse(dict(outcome))


def gone(message: str) -> Response:
    """The answer (status 410) to a client whose session has ended or whose sample no longer
    exists."""
    return JSONResponse({"error": {"type": "gone", "message": message, "field": None}}, 410)


def _of(request: Request) -> TinkerApi:
    api: TinkerApi = request.app.state.tinker
    return api


CurrentApi = Annotated[TinkerApi, Depends(_of)]
