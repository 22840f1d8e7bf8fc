"""Addresses on which a tree of processes listens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.system import processes

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 in /proc/net."""
POLL_SECONDS = 0.1


def listening(pid: int) -> set[str]:
    """The local addresses of a process's listening TCP sockets, in the notation of /proc/net."""
    links = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            links.add(str(link.readlink()))
    rows = [
        row.split()
        for family in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]
    ]
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links
    }


@contextmanager
def watched(pid: int) -> Iterator[dict[str, str]]:
    """A dictionary: address → command of the process that listened on this address. The processes
    are `pid` and all its descendants, for as long as the context lasts."""
    found: dict[str, str] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_SECONDS):
            for process in [pid, *(each.pid for each in processes.descendants(pid))]:
                with suppress(OSError):  # it has ended
                    for address in listening(process) - set(found):
                        command = Path(f"/proc/{process}/cmdline").read_bytes()
                        found[address] = command.replace(b"\0", b" ").decode(errors="replace")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
