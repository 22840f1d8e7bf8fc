"""The differences between vLLM 0.26 and 0.33 that matter to Tandem. No other file decides by the version.

A failed `/wake_up` (not enough free memory): 0.26 stays half mapped and never wakes again, so `tandem up` restarts it;
later versions can be asked again. The caller sees `InferenceRefused` either way.
"""

from __future__ import annotations

import re

import httpx

Version = tuple[int, ...]

PREFIX_CACHE_KEYED_BY_PATH: Version = (0, 32)
"""From this version on vLLM keys prefix-cache blocks by an adapter's name and path. Older versions use the name alone,
so an adapter that is loaded under a name used before can hit the old adapter's blocks."""


def parse_version(text: str) -> Version:
    """ "0.32.0+cpu" -> (0, 32, 0). A text without a number gives (), which counts as older than every release."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def prefix_cache_was_reset(response: httpx.Response) -> bool | None:
    """What `/reset_prefix_cache` answered. Older versions answer with an empty body, also where they fail: None."""
    try:
        return bool(response.json()["success"])
    except (ValueError, KeyError, TypeError):
        return None
