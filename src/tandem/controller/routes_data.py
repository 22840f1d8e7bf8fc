"""HTTP routes of data that is not trained yet."""

from anyio import to_thread
from fastapi import APIRouter

from tandem.controller.deployment import CurrentDeployment
from tandem.controller.schemas import RenderRequest
from tandem.data.chat_template import load_tokenizer
from tandem.data.examples import Rendering
from tandem.data.render import preview

router = APIRouter(prefix="/v1/data", tags=["data"])


@router.post("/render")
async def render_data(request: RenderRequest, deployment: CurrentDeployment) -> list[Rendering]:
    """Examples or pairs as they would be trained: their texts, and which parts of these are trained."""

    def render() -> list[Rendering]:
        return preview(load_tokenizer(deployment.model_path), request.examples, request.pairs)

    return await to_thread.run_sync(render, limiter=deployment.packing_threads)
