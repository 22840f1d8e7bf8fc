"""Following files that other processes append to, by whole lines."""

from __future__ import annotations

import os
from pathlib import Path

_CHUNK = 1 << 16
# A line longer than this is handed on in pieces: no newline may ever come.
_LONGEST = 1 << 20


class Tail:
    """Reads what was appended to `path` since the last call, across rotation by rename and truncation."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._fd = -1
        self._partial = b""
        if from_end and self._open():
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self, *, final: bool = False) -> list[str]:
        """New complete lines, without their ends. `final`: the last line counts even if it was not finished."""
        found: list[str] = []
        while self._open():
            if os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
                os.lseek(self._fd, 0, os.SEEK_SET)
            while chunk := os.read(self._fd, _CHUNK):
                *complete, self._partial = (self._partial + chunk).split(b"\n")
                found.extend(line.decode(errors="replace").rstrip("\r") for line in complete)
                if len(self._partial) > _LONGEST:
                    found.append(self._take_partial())
            if not self._rotated():
                break
            self._close_file()
        if final and self._partial:
            found.append(self._take_partial())
        return found

    def close(self) -> None:
        self._close_file()

    def _take_partial(self) -> str:
        text, self._partial = self._partial.decode(errors="replace"), b""
        return text

    def _open(self) -> bool:
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
        return True

    def _rotated(self) -> bool:
        try:
            there = self.path.stat()
        except OSError:
            return False
        here = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def last_lines(path: Path, *, lines: int = 40, most_bytes: int = 8192) -> str:
    """The end of a text file, at most `lines` lines and `most_bytes` bytes; empty where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - most_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    kept = text.splitlines()
    if size > most_bytes and len(kept) > 1:
        kept = kept[1:]  # the first one was cut
    return "\n".join(kept[-lines:])
