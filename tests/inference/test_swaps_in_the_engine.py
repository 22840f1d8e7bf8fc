"""The effect of a swap on vLLM's requests with asynchronous scheduling. On a GPU the engine's next
step already runs while the engine takes an order. The tokens of the running step have not arrived
yet. vLLM on the CPU never schedules asynchronously.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.inference.server import patches
from tandem.inference.server.worker import extension


class Request:
    num_stale_output_tokens, drop_stale_output = 0, False

    def __init__(self, name: str, tokens: int, on_their_way: int, root: bytes) -> None:
        self.request_id, self.num_output_tokens, self.num_output_placeholders = (
            name,
            tokens,
            on_their_way,
        )
        self.block_hashes: list[bytes] = []
        self.tandem_root = root
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(patches.hash_root() or b"")


class Scheduler:
    def __init__(self, running: list[Request], waiting: list[Request]) -> None:
        self.running, self.waiting = running, waiting
        self.requests = {request.request_id: request for request in [*running, *waiting]}

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests
        for request in self.running:
            request.num_output_placeholders = 0
        self.waiting, self.running = [*self.running, *self.waiting], []


@pytest.fixture(autouse=True)
def hashes(monkeypatch: pytest.MonkeyPatch) -> Any:
    utils = SimpleNamespace(NONE_HASH=b"first", BlockHash=bytes)
    # An import of the real module takes 8 s.
    monkeypatch.setitem(sys.modules, "vllm.v1.core", SimpleNamespace(kv_cache_utils=utils))
    return utils


def test_a_token_on_its_way_is_of_the_weights_before() -> None:
    """A token whose step ran before the swap counts as sampled by the old weights. vLLM 0.26
    delivers such a token even to a request that was evicted before the swap."""
    scheduler = Scheduler(
        [Request("running", 7, 1, b"first")], [Request("evicted", 3, 1, b"first")]
    )
    told = extension._tend(SimpleNamespace(scheduler=scheduler), "run@1")
    assert told == {"running": 8, "evicted": 4}


def test_what_is_on_its_way_to_an_evicted_request_is_discarded() -> None:
    """When vLLM 0.32 evicts a request (`Scheduler._preempt_request`), it forgets how many tokens of
    the request have not arrived yet. Later it would deliver these tokens."""
    evicted, waits = Request("evicted", 3, 0, b"first"), Request("waits", 0, 0, b"first")
    evicted.num_stale_output_tokens = 1
    core = SimpleNamespace(scheduler=Scheduler([], [evicted, waits]))
    assert extension._tend(core, "run@1") == {"evicted": 3, "waits": 0}
    assert (evicted.drop_stale_output, waits.drop_stale_output) == (True, False)
    evicted.drop_stale_output = False
    # vLLM has this connector with --enable-return-routed-experts.
    core.scheduler.aux_output_connector = object()
    extension._tend(core, "run@2")
    assert not evicted.drop_stale_output


def test_drafts_on_their_way_are_discarded() -> None:
    """At a swap during speculative decoding, the engine does not know yet how many draft tokens are
    accepted."""
    scheduler = Scheduler([Request("running", 10, 4, b"first")], [])
    scheduler.num_spec_tokens = 3  # type: ignore[attr-defined]
    told = extension._tend(SimpleNamespace(scheduler=scheduler), "run@1")
    assert (told, scheduler.running) == ({"running": 10}, [])


def test_no_request_that_waits_finds_blocks_of_the_weights_before(hashes: Any) -> None:
    waits, comes = (Request(name, 0, 0, b"first") for name in ("waits", "comes"))
    extension._tend(SimpleNamespace(scheduler=Scheduler([], [waits])), "run@1")
    assert hashes.NONE_HASH != b"first"
    assert waits.block_hashes == [hashes.NONE_HASH]
    assert comes.block_hashes == [b"first"], "the engine had hashed it, and takes it after the swap"
    patches.renew_hashes(comes)
    assert comes.block_hashes == [hashes.NONE_HASH]
    later = Request("later", 0, 0, hashes.NONE_HASH)
    later.block_hashes = [b"what the thread made"]
    patches.renew_hashes(later)
    assert later.block_hashes == [b"what the thread made"], (
        "without a swap a request is not hashed again"
    )
