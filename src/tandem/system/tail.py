"""Follows text files, line by line, to which other processes append."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tandem.system.plain_files import open_plain

_CHUNK = 1 << 16
# A line of more than this many bytes is returned in pieces, because its end may never arrive.
_LONGEST_LINE = 1 << 20
# The approximate limit on the bytes that one call reads. A call without a limit might never end,
# because a writer may be faster than its reader.
_MOST = 1 << 24


class Tail:
    """Follows the file `path`: each call of `lines` returns the lines that were appended since the
    last call, even if the file was truncated, or rotated by a rename."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._partial = b""
        if from_end and (file := self._open()):
            file.seek(0, os.SEEK_END)

    def lines(self, *, final: bool = False) -> list[str]:
        """The complete lines that were appended since the last call, without newline characters. A
        call returns at most about 16 MiB, and the next call returns the remaining lines. `final`:
        whether the last line is returned even if it is not complete."""
        lines, read = list[str](), 0
        while file := self._open():
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the file was truncated
            while read < _MOST and (chunk := file.read(_CHUNK)):
                read += len(chunk)
                *complete, self._partial = (self._partial + chunk).split(b"\n")
                if len(self._partial) > _LONGEST_LINE:
                    complete, self._partial = [*complete, self._partial], b""
                lines += [line.decode(errors="replace").rstrip("\r") for line in complete]
            if read >= _MOST:
                return lines
            with suppress(OSError):
                if not os.path.samestat(self.path.stat(), os.fstat(file.fileno())):
                    self.close()  # the file was rotated
                    continue
            break
        if final and self._partial:
            lines.append(self._partial.decode(errors="replace"))
            self._partial = b""
        return lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        if self._file is None:
            with suppress(OSError):
                self._file = open_plain(self.path, links="above")
        return self._file


def last_lines(path: Path, *, lines: int = 40, most_bytes: int = 8192) -> str:
    """The end of a text file, at most `lines` lines and `most_bytes` bytes; empty if there is no
    file."""
    try:
        with open_plain(path, links="above") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most_bytes)
            file.seek(start)
            complete = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if start and len(complete) > 1:
        complete = complete[1:]  # the first line is cut off at its beginning
    return "\n".join(complete[-lines:])
