"""How much memory a JSON body takes once it is parsed, from a look at its bytes.

Pydantic parses a whole body before it looks at it: an empty object of two bytes becomes hundreds,
and an unknown key an error of as many. So what makes them is counted first.
"""

from typing import IO

# Bytes of memory: of an object, an array, another value, and a key with what it may cost when it is
# wrong. `tests/controller/test_body_memory.py` compares them with what a controller takes.
_WEIGHTS = {b"{": 576, b"[": 192, b",": 64, b":": 640}
_CHUNK_BYTES = 2**20


def json_weight(body: IO[bytes]) -> int:
    """The estimate in bytes, with the text's own, for the JSON text in a file; read from its
    beginning.

    Strings count as what is outside of them, because a tool call's arguments are JSON in a string.
    """
    body.seek(0)
    weight = 0
    while chunk := body.read(_CHUNK_BYTES):
        weight += len(chunk) + sum(chunk.count(mark) * size for mark, size in _WEIGHTS.items())
    return weight
