"""Requests the announced step from the soak's inference servers without a break. A server that
reports that it is ready must have the announced step."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tandem.spool import Spool
from tandem.spool.schema import Served


class Stranger(threading.Thread):
    """The thread that sends the requests. The thread records violations, and counts the answers.
    `urls`: the URL of each server. `headers`: headers with the API key."""

    def __init__(self, root: Path, urls: list[str], headers: dict[str, str]) -> None:
        super().__init__(name="stranger", daemon=True)
        self._root, self._urls = root, urls
        self._client = httpx.Client(headers=headers, timeout=5)
        self.problems, self.answers = list[str](), 0
        self._ended = threading.Event()

    def stop(self) -> None:
        self._ended.set()
        self.join(30)

    def run(self) -> None:
        while not self._ended.wait(0.02):
            # The volume is full, or gone, or the stack has not made the spool yet.
            with suppress(Exception):
                for run in Spool(self._root).runs.names():
                    for url in self._urls:
                        self._ask(run, url)

    def _ask(self, run: str, url: str) -> None:
        with suppress(httpx.HTTPError):
            before, instance = self._announced(run), self._ready(url)
            if before is None or instance is None:
                return
            body = {"model": before.model, "prompt": [[1, 2]], "max_tokens": 1}
            status = self._client.post(f"{url}/v1/completions", json=body).status_code
            if status == 200:
                self.answers += 1
            elif status == 404 and self._ready(url) == instance and self._announced(run) == before:
                asked = time.strftime("%H:%M:%S")
                self.problems.append(f"{asked} {url} is ready and has no {before.model}")

    def _announced(self, run: str) -> Served | None:
        spool = Spool(self._root)
        record = spool.served.get(run)
        return record if record is not None and spool.checkpoints.has(run, record) else None

    def _ready(self, url: str) -> str | None:
        """The server's process, if it answers requests."""
        answer: dict[str, Any] = self._client.get(f"{url}/tandem/ready").json()
        return str(answer["instance"]) if answer["ready"] else None
