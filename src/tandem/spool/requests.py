"""The requests of a session's run: `runs/<run>/requests/<seq>/`. A request is a directory that is
committed by one rename before the client gets an answer. A request that a client sends again is
therefore recognised. The processes that compute requests can die and start again.

Two requests with the same number and the same content are one request. A second request with the
same number and other content is a conflict. Requests are computed in the order of their numbers,
without gaps. `Manifest.seq` is the number of the last request whose effect is in the checkpoint.
Ranks that start after an idle time or a `kill -9` compute the requests after `Manifest.seq` again.
A repeated computation gives the same bits. Gradients that no optimizer step has applied are not
stored. The ranks write a checkpoint every ten minutes, which limits the number of requests that are
computed again. A request's arrays are removed once a checkpoint contains the request's effect.

A request that can't be computed has an error as its result. A request with an error has not changed
the weights or the gradients, except that a failed optimizer step discards the gradients. A request
whose computation has started five times without a result gets an error as its result. If the job
fails or is cancelled, its waiting requests get the job's error as their result.
"""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.errors import Conflict, InvalidInput, NotFound
from tandem.spool import fs
from tandem.spool.paths import Paths, listing
from tandem.spool.runs import Runs
from tandem.spool.schema import AnyRequest, LoggedRequest, PassRequest, RequestResult
from tandem.spool.schema.session import MOST_SEQUENCE_NUMBER
from tandem.spool.sessions import TrainingSessions

_REQUEST, _RESULT, _LOGPROBS = "request.json", "result.json", "logprobs.f32"
_ARRAYS = "arrays.npy"  # the file name that `data.packed_format` uses
_MOST_BYTES = 2**31
_is_seq = re.compile("[0-9]{8}").fullmatch


class RequestLog:
    """The log of requests. `seq` counts a run's requests from 1. The requests are computed in the
    order of `seq`, without gaps."""

    def __init__(self, paths: Paths, runs: Runs, sessions: TrainingSessions) -> None:
        self._paths, self._runs, self._sessions = paths, runs, sessions
        # Two caches. `_answered`: run -> the number up to which all requests are answered.
        # `_trimmed`: run -> the number up to which the arrays of all requests are removed.
        self._answered: dict[str, int] = {}
        self._trimmed: dict[str, int] = {}

    def append(
        self,
        run: str,
        seq: int,
        request: AnyRequest,
        write: Callable[[Path], str] | None = None,
    ) -> bool:
        """Logs a request durably; returns False if the request is already logged.

        Raises Conflict (field `seq`) if another request has this number. Raises Conflict (field
        `session`) if the session has ended. Raises NotFound (field `run`) if the run does not
        exist.

        Args:
            write: `write(directory)` writes the packed arrays of a `PassRequest` and returns the
                file's SHA-256. `write` is None for a request without arrays.
        """
        if (session := self._runs.get(run).session) is None:
            raise Conflict(f"run {run!r} is of no session; submit jobs to it", field="run")
        if not 1 <= seq < MOST_SEQUENCE_NUMBER:
            raise InvalidInput(f"{seq} is not 1 to {MOST_SEQUENCE_NUMBER - 1}", field="seq")
        if (write is None) == isinstance(request, PassRequest):
            raise ValueError("a pass has packed arrays, and only a pass")
        self._sessions.check_open(session)
        target = self._directory(run, seq)
        with fs.volume_errors(target):
            fs.make_dir(target.parent)
        with fs.staging(target.parent) as staged:
            sha256 = None if write is None else write(staged)
            logged = LoggedRequest(seq=seq, request=request, sha256=sha256, created=time.time())
            if not fs.exists(target):
                fs.write_json_atomic(staged / _REQUEST, logged)
                fs.fsync_tree(staged)
                with suppress(FileExistsError):
                    fs.rename_dir(staged, target)
                    return True
        if (known := self.get(run, seq)).model_copy(update={"created": logged.created}) != logged:
            problem = f"request {seq} of run {run!r} is another one, a {known.request.kind}"
            raise Conflict(f"{problem}; give each request a number of its own", field="seq")
        return False

    def get(self, run: str, seq: int) -> LoggedRequest:
        """The request. Raises NotFound (field `seq`) if the request does not exist, or if its
        record is damaged."""
        logged = fs.read_undamaged(self._directory(run, seq) / _REQUEST, LoggedRequest)
        if logged is None:
            raise NotFound(f"run {run!r} has no request {seq}", field="seq")
        return logged

    def data_dir(self, run: str, seq: int) -> Path:
        """The directory with the packed arrays; `trim` removes the arrays."""
        return self._directory(run, seq)

    def has(self, run: str, seq: int) -> bool:
        return fs.exists(self._directory(run, seq))

    def begin(self, run: str, seq: int) -> int:
        """Increments the number of times that the computation of a request has started. Returns the
        new number."""
        path = self._directory(run, seq) / "begun"
        count = int(fs.read_bytes(path) or b"0") + 1
        fs.write_atomic(path, str(count).encode(), durable=False)
        return count

    def result(self, run: str, seq: int) -> RequestResult | None:
        """The request's result; None until the request is computed."""
        return fs.read_undamaged(self._directory(run, seq) / _RESULT, RequestResult)

    def logprobs(self, run: str, seq: int) -> list[bytes]:
        """The log-probs of an answered pass, in nats. The list has one entry for each sequence, in
        the client's order. An entry has the log-probs of the sequence's items as the bytes of a
        little-endian float32 array. Raises NotFound (field `seq`) if the request has no
        log-probs."""
        request = self.get(run, seq).request
        path = self._directory(run, seq) / _LOGPROBS
        content = fs.read_bytes(path, most=_MOST_BYTES)
        if content is None or not isinstance(request, PassRequest):
            raise NotFound(f"request {seq} of run {run!r} has no log-probs", field="seq")
        found, at = [], 0
        for length in request.lengths:
            found.append(content[at : at + 4 * length])
            at += 4 * length
        if at != len(content):
            raise NotFound(f"{path} is damaged; send the request again", field="seq")
        return found

    def answer(
        self, run: str, seq: int, result: RequestResult, logprobs: bytes | None = None
    ) -> None:
        """Writes the result, unless the request already has one. The write is not durable, because
        a lost result is computed again with the same bits.

        Args:
            logprobs: the log-probs of a pass's items in the client's order, in nats, as the bytes
                of a little-endian float32 array; None for other requests.
        """
        directory = self._directory(run, seq)
        if self.result(run, seq) is None:
            if logprobs is not None:
                fs.write_atomic(directory / _LOGPROBS, logprobs, durable=False)
            fs.write_json_atomic(directory / _RESULT, result, durable=False)

    def last(self, run: str) -> int:
        """The highest request number; 0 if there is no request."""
        names = listing(self._paths.requests_dir(run))
        return next((int(name) for name in reversed(names) if _is_seq(name)), 0)

    def pending(self, run: str) -> list[int]:
        """The requests without a result, ascending."""
        names = listing(self._paths.requests_dir(run))
        answered = self._answered_to(run)
        return [
            seq
            for name in names
            if _is_seq(name) and (seq := int(name)) > answered and self.result(run, seq) is None
        ]

    def next(self, run: str) -> int | None:
        """The number of the first request without a result. None if all requests have results, or
        if the request with the next number has not arrived."""
        seq = self._answered_to(run) + 1
        return seq if self.has(run, seq) else None

    def first_pass(self, run: str, after: int) -> int | None:
        """The number of the first `PassRequest` with a number above `after`. The search stops at
        the first missing number. None if the search finds no `PassRequest`."""
        seq = after + 1
        while self.has(run, seq):
            if isinstance(self.get(run, seq).request, PassRequest):
                return seq
            seq += 1
        return None

    def _answered_to(self, run: str) -> int:
        seq = self._answered.get(run, 0)
        while self.result(run, seq + 1) is not None:
            seq += 1
        self._answered[run] = seq
        return seq

    def trim(self, run: str, seq: int) -> None:
        """Removes the packed arrays of the answered requests up to number `seq`. A checkpoint must
        already contain the effect of these requests."""
        for old in range(self._trimmed.get(run, 0) + 1, min(seq, self._answered_to(run)) + 1):
            fs.remove_file(self._directory(run, old) / _ARRAYS, durable=False)
            self._trimmed[run] = old

    def _directory(self, run: str, seq: int) -> Path:
        return self._paths.requests_dir(run) / f"{seq:08d}"
