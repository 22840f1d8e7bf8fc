"""The openai package, unmodified, against a controller, with checks of the answers."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import FileObject

from api_server import KEY


def client(url: str, key: str = KEY, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, **options})


def chats(count: int, words: int = 1) -> bytes:
    """Conversations, each with a different question."""
    lines = (
        [
            {"role": "user", "content": f"Is it {i}? " + "so " * words},
            {"role": "assistant", "content": "no"},
        ]
        for i in range(count)
    )
    return "".join(json.dumps({"messages": chat}) + "\n" for chat in lines).encode()


def pairs(count: int) -> bytes:
    def answer(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    lines = (
        {
            "input": {"messages": [{"role": "user", "content": f"Is it {i}?"}]},
            "preferred_output": answer("yes"),
            "non_preferred_output": answer("no"),
        }
        for i in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def upload(sdk: OpenAI, content: bytes, name: str = "chats.jsonl") -> FileObject:
    return sdk.files.create(file=(name, io.BytesIO(content)), purpose="fine-tune")


@contextmanager
def refused(
    status: int, param: str | None, message: str, code: str | None = None
) -> Iterator[pytest.ExceptionInfo[openai.APIStatusError]]:
    """Checks that the openai package reads the refusal as an error in OpenAI's form."""
    with pytest.raises(openai.APIStatusError) as caught:
        yield caught
    error = caught.value
    assert error.status_code == status, error.message
    assert set(error.body) == {"message", "type", "param", "code"}
    assert error.type == ("invalid_request_error" if status < 500 else "server_error")
    assert error.param == param, error.message
    assert message in error.body["message"]  # some versions quote the text of `error`
    assert error.code == code if code else error.code
