"""The differences between vLLM 0.26 and 0.33 that Tandem handles. No other file decides by the version.

A failed `/wake_up` (too little free memory): 0.26 stays half mapped and never wakes again, so `tandem up` restarts it;
later versions can be asked again. `VllmClient.wake_up` raises InferenceRefused in both cases.
"""

import re

import httpx

PREFIX_CACHE_KEYED_BY_PATH = (0, 32)
"""From this version on vLLM keys prefix-cache blocks by an adapter's name and path. Older versions use the name alone,
so an adapter that is loaded under a name used before can hit the old adapter's blocks."""


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers of "0.32.0+cpu": (0, 32, 0). Without a number (), which counts as older than every release."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def prefix_cache_was_reset(response: httpx.Response) -> bool | None:
    """The answer of `/reset_prefix_cache`. Older versions send an empty body, also after a failure: None."""
    return bool(response.json()["success"]) if response.content else None
