"""Estimates the memory of a parsed JSON body from its bytes.

Pydantic parses a whole body before any limit applies. An empty object is two bytes of text, but
takes hundreds of bytes in memory. The error for an unknown key takes hundreds of bytes too. This
module therefore counts the characters that create objects before the body is parsed.
"""

from typing import IO

# Character -> the bytes of memory of the value that the parser creates at this character. The
# parser creates an object at "{", an array at "[", another value of a list at ",", and a key at
# ":". The bytes of a key include the error message that the key may cause.
# `tests/controller/test_body_memory.py` compares these numbers with a controller's memory.
_WEIGHTS = {b"{": 576, b"[": 192, b",": 64, b":": 640}
_CHUNK_BYTES = 2**20


def json_weight(body: IO[bytes]) -> int:
    """Estimated bytes of memory for the JSON text in a file, including the text itself. Reads from
    the file's beginning.

    Characters within strings count too, because the arguments of a tool call are JSON within a
    string.
    """
    body.seek(0)
    weight = 0
    while chunk := body.read(_CHUNK_BYTES):
        weight += len(chunk) + sum(chunk.count(mark) * size for mark, size in _WEIGHTS.items())
    return weight
