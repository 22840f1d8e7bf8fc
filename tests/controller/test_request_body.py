"""A large body waits in a file without a name, not in memory."""

import asyncio
import json
import os

import pytest

from api_server import rl_request, tree, turn
from spool.volume_tools import full_disk
from tandem.controller.request_body import MEMORY_BYTES, received
from tandem.errors import VolumeFull


class Request:
    """Only what `received` uses of a request."""

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
            assert (body.size, body.read()) == (sum(map(len, parts)), b"".join(parts))
            assert (body._file is not None) is in_file
            assert sum(map(len, body._parts)) <= MEMORY_BYTES
            assert list(tmp_path.iterdir()) == []
            assert body._file is None or os.fstat(body._file.fileno()).st_size == body.size

    asyncio.run(scene())


def test_a_full_volume_refuses_it_and_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", full_disk)

    async def scene() -> None:
        async with received(Request(bytes(2 * MEMORY_BYTES)), tmp_path):
            pass

    with pytest.raises(VolumeFull):
        asyncio.run(scene())
    assert list(tmp_path.iterdir()) == []


def test_a_large_request_is_trained_like_a_small_one(client, server, run, monkeypatch):
    monkeypatch.setattr("tandem.controller.routes_runs.LARGE_BODY_BYTES", 1000)
    turns = [turn([10, 11], [20, 21] * 30000), turn([10, 11], [21, 20] * 30000)]
    groups = [{"trajectories": [{"turns": [one], "reward": float(i)} for i, one in enumerate(turns)]}]
    request = rl_request(groups=groups, packing={"sequence_length": 64, "too_long": "truncate"})
    assert len(json.dumps(request)) > MEMORY_BYTES
    before = tree(server.spool.root)
    status = client.train(run, request)
    assert status.spec.data.truncated_trajectories == 2
    client.cancel(status.id)
    assert not [name for name in tree(server.spool.root).keys() - before.keys() if ".tmp-" in name]
