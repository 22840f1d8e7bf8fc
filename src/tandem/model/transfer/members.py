"""Fixes the members of the group for one publication: the trainer's senders, and the workers of the
inference servers that joined in time.

A group is joined in two phases, because a group can't change after it is connected. In the first
phase, workers announce themselves in the publication's store. In the second phase, the first sender
fixes the list of members. A server that is not on the list gets its weights in another way.
"""

import json
import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from tandem.model.transfer.channel import STALL_SECONDS

JOIN_SECONDS = 5.0
"""Seconds for which the senders wait for further servers after all workers of the first server have
joined."""
_POLL_SECONDS = 0.01


def fix_members(store: Store, servers: Sequence[str], beat: Callable[[], None]) -> dict[str, int]:
    """Wait for the workers of all servers, and fix the list of members. Returns a mapping from each
    server to the number of its workers, in the order of the workers' ranks. Raises TimeoutError if
    no server joined.

    Args:
        store: the publication's store.
        servers: the names of the servers that may join.
        beat: called each time all workers of a server have joined.
    """
    found: dict[str, int] = {}
    deadline = time.monotonic() + STALL_SECONDS
    while len(found) < len(servers) and time.monotonic() < deadline:
        for server in servers:
            if server not in found and (count := _complete(store, server)):
                if not found:
                    deadline = min(deadline, time.monotonic() + JOIN_SECONDS)
                found[server] = count
                beat()
        time.sleep(_POLL_SECONDS)
    members = {server: found[server] for server in servers if server in found}
    store.set("members", json.dumps(members))
    return _checked(members)


def read_members(store: Store) -> dict[str, int]:
    """The list that `fix_members` has fixed. Raises TimeoutError if the list does not appear."""
    return _checked(json.loads(store.get("members")))


def _checked(members: dict[str, int]) -> dict[str, int]:
    if not members:
        raise TimeoutError("no inference server came for the weights, or none was ready")
    return members


def join_members(store: Store, server: str, worker: int, workers: int) -> tuple[int, int]:
    """Announce this worker, and wait for the list of members. Returns this worker's index among all
    workers of the group, and the number of all workers. Raises RuntimeError if the list does not
    include this worker's server, or if this worker was announced before.

    Args:
        server: the name of this worker's server.
        worker: this worker's number within its server, from 0.
        workers: the number of the server's workers.
    """
    store.set(f"workers/{server}", str(workers))
    if store.add(f"worker/{server}/{worker}", 1) != 1:
        raise RuntimeError("an earlier vLLM of this server has come for these weights")
    members = read_members(store)
    if server not in members:
        raise RuntimeError(f"the ranks send to {', '.join(members)}: it came too late")
    before = list(members)[: list(members).index(server)]
    return sum(members[name] for name in before) + worker, sum(members.values())


def _complete(store: Store, server: str) -> int:
    """The number of the server's workers if all these workers have joined; else 0."""
    if not store.check([f"workers/{server}"]):
        return 0
    count = int(store.get(f"workers/{server}"))
    return count if store.check([f"worker/{server}/{n}" for n in range(count)]) else 0
