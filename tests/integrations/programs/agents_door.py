"""An agent of OpenAI's Agents SDK uses the Responses API through `/rollout/v1`. The model calls a
tool and then answers, once without streaming and once with streaming."""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

url, *sessions = sys.argv[1:]
seen: list[bool] = []


@function_tool
def look(deep: bool) -> str:
    """Look around."""
    seen.append(deep)
    return "a door"


async def main() -> None:
    quiet = RunConfig(tracing_disabled=True)
    for session, streamed in zip(sessions, (False, True), strict=True):
        client = AsyncOpenAI(
            base_url=f"{url}/rollout/v1", api_key="none", default_headers={"X-Session-ID": session}
        )
        model = OpenAIResponsesModel(model="run@3", openai_client=client)
        agent = Agent(name="looker", instructions="Look.", model=model, tools=[look])
        if streamed:
            result = Runner.run_streamed(agent, "What is there?", run_config=quiet)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "What is there?", run_config=quiet)
        print(result.final_output.strip())
    print(seen)


asyncio.run(main())
