"""Estimates the memory of a parsed JSON body from its bytes.

Pydantic parses a whole body before any limit applies. An empty object is two bytes of text but
takes hundreds in memory; the error for an unknown key takes hundreds too. So the characters that
make objects are counted first.
"""

from typing import IO

# Bytes of memory that one object, one array and one other value take. The last number is for a key,
# including the error message that the key may cause. `tests/controller/test_body_memory.py`
# compares these numbers with a controller's memory.
_WEIGHTS = {b"{": 576, b"[": 192, b",": 64, b":": 640}
_CHUNK_BYTES = 2**20


def json_weight(body: IO[bytes]) -> int:
    """Estimated bytes of memory for the JSON text in a file, including the text itself. Reads from
    the file's beginning.

    Characters in strings count too, because a tool call's arguments are JSON in a string.
    """
    body.seek(0)
    weight = 0
    while chunk := body.read(_CHUNK_BYTES):
        weight += len(chunk) + sum(chunk.count(mark) * size for mark, size in _WEIGHTS.items())
    return weight
