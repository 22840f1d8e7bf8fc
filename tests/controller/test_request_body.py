"""A large body waits in a file without a name, not in memory."""

import asyncio
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest

from api_server import rl_request, tree, turn
from tandem.controller.routes_train import MEMORY_BYTES, received
from tandem.errors import VolumeFull


class Request:
    """A request with only the parts that `received` uses."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    async def stream(self):
        for part in self._parts:
            yield part


@pytest.mark.parametrize(("count", "in_file"), [(1, False), (4, False), (5, True), (40, True)])
def test_a_body_comes_back_whole_and_holds_little_memory(tmp_path, count, in_file):
    parts = [os.urandom(MEMORY_BYTES // 4) for _ in range(count)]

    async def scene() -> None:
        async with received(Request(*parts), tmp_path) as body:
            assert body._rolled is in_file  # type: ignore[attr-defined]
            assert body.tell() == sum(map(len, parts))
            assert not in_file or os.fstat(body.fileno()).st_size == body.tell()
            assert list(tmp_path.iterdir()) == []
            body.seek(0)
            assert body.read() == b"".join(parts)

    asyncio.run(scene())


def test_a_full_volume_refuses_it(tmp_path, monkeypatch):
    full = partial(Path("/dev/full").open, "w+b")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full())

    async def scene() -> None:
        async with received(Request(bytes(2 * MEMORY_BYTES)), tmp_path):
            pass

    with pytest.raises(VolumeFull):
        asyncio.run(scene())


def test_a_large_request_is_trained_like_a_small_one(client, server, run, monkeypatch):
    monkeypatch.setattr("tandem.controller.routes_train.LARGE_WEIGHT", 1000)
    turns = [turn([10, 11], [20, 21] * 30000), turn([10, 11], [21, 20] * 30000)]
    groups = [
        {"trajectories": [{"turns": [one], "reward": float(i)} for i, one in enumerate(turns)]}
    ]
    request = rl_request(groups=groups, packing={"sequence_length": 64, "too_long": "truncate"})
    assert len(json.dumps(request)) > MEMORY_BYTES
    before = tree(server.spool.root)
    status = client.train(run, request)
    assert status.spec.data.truncated_trajectories == 2
    client.cancel(status.id)
    assert not [name for name in tree(server.spool.root).keys() - before.keys() if ".tmp-" in name]
