"""The tool runner of Anthropic's SDK uses the Messages API through the rollout door. The model
calls a tool and then answers, once without streaming and once with streaming."""

import sys

from anthropic import Anthropic, beta_tool

url, *sessions = sys.argv[1:]
seen: list[bool] = []


@beta_tool
def look(deep: bool) -> str:
    """Look around.

    Args:
        deep: Whether to look well.
    """
    seen.append(deep)
    return "a door"


for session, streamed in zip(sessions, (False, True), strict=True):
    client = Anthropic(
        base_url=f"{url}/rollout", api_key="none", default_headers={"X-Session-ID": session}
    )
    runner = client.beta.messages.tool_runner(
        model="run@3",
        max_tokens=400,
        system="Look.",
        tools=[look],
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=[{"role": "user", "content": "What is there?"}],
        stream=streamed,
    )
    for answer in runner:
        message = answer.get_final_message() if streamed else answer
    print(message.content[-1].text.strip())
print(seen)
