"""Ways to damage one file, for `fuzz.files`."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MARK = "@@@ here @@@"
DEEP = 100_000
_VALUES = (
    "null",
    "true",
    "false",
    "-1",
    "0",
    "1",
    "1.5",
    "1e308",
    "-1e308",
    "1e400",
    "NaN",
    "Infinity",
    "1" + 400 * "0",
    "9" * 5000,
    str(2**63),
    str(-(2**63) - 1),
    '""',
    '"' + 20_000 * "x" + '"',
    '"\\u0000"',
    '"\\ud800"',
    '"../../.."',
    '"/etc/hostname"',
    '"' + 300 * "y" + '"',
    "[]",
    "{}",
    "[[]]",
    '{"a": 1}',
    '[null, "", 1]',
    "[" * DEEP,
    "[" * 150 + "]" * 150,
    '{"a":' * 150 + "1" + "}" * 150,
    "[" * DEEP + "]" * DEEP,
)


def damage(path: Path, root: Path, chosen: random.Random, *, node: bool) -> str:
    """Damages the file; returns the kind of damage. `node`: only damage to the file as a whole,
    such as a link in its place."""
    ways = list(_NODES) if node else [*_BYTES, *_NODES]
    if not node and _parsed(path) is not None:
        ways += 3 * [_splice, _splice_line, _key]
    way = chosen.choice(ways)
    told = way(path, root, chosen)
    return f"{way.__name__.strip('_')}{f' {told}' if told else ''}"


def _parsed(path: Path) -> Any:
    """The JSON in a file, or a list of the JSON in its lines. The result is None for a file without
    JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in path.read_bytes().splitlines()] or None
    except ValueError:
        return None


def _places(value: Any, of: Any = None, key: Any = None) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside `value`."""
    found = [] if of is None else [(of, key)]
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for inner, child in items:
        found += _places(child, value, inner)
    return found


def _splice(path: Path, _: Path, chosen: random.Random) -> str:
    """Replaces one value of the JSON."""
    lines = path.read_bytes().splitlines(keepends=True)
    whole = [b"".join(lines)]
    try:
        json.loads(whole[0])
    except ValueError:
        whole = lines
    number = chosen.randrange(len(whole))
    data = json.loads(whole[number])
    raw = chosen.choice(_VALUES)
    place = ""
    if places := _places(data):
        of, key = chosen.choice(places)
        of[key], place = _MARK, str(key)
    else:
        data = _MARK
    whole[number] = json.dumps(data).replace(json.dumps(_MARK), raw).encode() + b"\n"
    path.write_bytes(b"".join(whole))
    return f"{place} = {raw[:40]}"


def _splice_line(path: Path, _: Path, chosen: random.Random) -> str:
    """Replaces the whole content by another value, or adds another value as a line."""
    raw = chosen.choice(_VALUES)
    content = path.read_bytes() if chosen.random() < 0.5 else b""
    path.write_bytes(content + raw.encode() + b"\n")
    return raw[:40]


def _key(path: Path, _: Path, chosen: random.Random) -> str:
    """Removes, renames or adds a key."""
    content = path.read_text()
    keys = sorted({key for of, key in _places(_parsed(path)) if isinstance(of, dict)})
    if not keys:
        path.write_text('{"unknown": 1}')
        return "unknown"
    key = chosen.choice(keys)
    changed = chosen.choice(['"other":', f'"{key}":1,"{key}":', f'"unknown":{{}},"{key}":'])
    path.write_text(content.replace(f'"{key}":', changed, 1))
    return f"{key} -> {changed}"


Way = Callable[[Path, Path, random.Random], str]
"""A function that damages a file (first argument) of the spool below a directory (second argument),
and returns details."""


def _bytes_way(name: str, change: Callable[[bytes, random.Random], bytes]) -> Way:
    def way(path: Path, _: Path, chosen: random.Random) -> str:
        path.write_bytes(change(path.read_bytes(), chosen))
        return ""

    way.__name__ = name
    return way


def _flip(content: bytes, chosen: random.Random) -> bytes:
    data = bytearray(content or b"\0")
    for _ in range(chosen.choice([1, 1, 1, 4, 64])):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    return bytes(data)


def _insert(content: bytes, chosen: random.Random, piece: bytes) -> bytes:
    at = chosen.randrange(len(content) + 1)
    return content[:at] + piece + content[at:]


_BYTES = [
    _bytes_way("empty", lambda *_: b""),
    _bytes_way("truncate", lambda content, chosen: content[: chosen.randrange(len(content) + 1)]),
    _bytes_way("half", lambda content, _: content[: len(content) // 2]),
    _bytes_way("flip", _flip),
    _bytes_way("flip_again", _flip),
    _bytes_way(
        "append",
        lambda content, chosen: content + chosen.randbytes(chosen.choice([1, 100, 70_000])),
    ),
    _bytes_way("random", lambda content, chosen: chosen.randbytes(max(1, len(content)))),
    _bytes_way("zeros", lambda content, _: bytes(len(content))),
    _bytes_way("not_utf8", lambda content, chosen: _insert(content, chosen, b"\xff\xfe\xc0")),
    _bytes_way("bom", lambda content, _: b"\xef\xbb\xbf" + content),
    _bytes_way("nul", lambda content, chosen: _insert(content, chosen, b"\0")),
    _bytes_way("newlines", lambda content, chosen: _insert(content, chosen, b"\n\n\r\n")),
    _bytes_way("twice", lambda content, _: content + content),
]


def _missing(path: Path, _: Path, __: random.Random) -> str:
    path.unlink()
    return ""


def _directory(path: Path, _: Path, chosen: random.Random) -> str:
    path.unlink()
    path.mkdir()
    if chosen.random() < 0.5:
        (path / "inside").write_text("x")
    return ""


def _symlink(path: Path, root: Path, chosen: random.Random) -> str:
    path.unlink()
    others = [other for other in root.rglob("*") if other.is_file()]
    target = chosen.choice([path, root / "nowhere", root, Path("/dev/null"), chosen.choice(others)])
    path.symlink_to(target)
    return str(target).replace(str(root), "")


def _fifo(path: Path, _: Path, __: random.Random) -> str:
    """A FIFO without a writer: a plain open waits for ever."""
    path.unlink()
    os.mkfifo(path)
    return ""


def _sparse(path: Path, _: Path, __: random.Random) -> str:
    """A sparse file of 2 GiB."""
    os.truncate(path, 2**31)
    return ""


def _swapped(path: Path, root: Path, chosen: random.Random) -> str:
    """Copies the content of another file with the same ending."""
    others = [other for other in root.rglob(f"*{path.suffix}") if other.is_file() and other != path]
    other = chosen.choice(others or [root / "spool.json"])
    path.write_bytes(other.read_bytes())
    return str(other.relative_to(root))


def _unreadable(path: Path, _: Path, __: random.Random) -> str:
    """Takes all permissions from the file. The missing permissions have an effect only if this
    process is not root."""
    path.chmod(0)
    return ""


_NODES: list[Way] = [_missing, _directory, _symlink, _fifo, _sparse, _swapped, _unreadable]
