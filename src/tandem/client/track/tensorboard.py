"""Writes TensorBoard's event files. Each record is a protocol buffer `tensorflow.Event` with masked
CRC-32C checksums.

The field numbers are those of event.proto, summary.proto and tensor.proto in
tensorboard/compat/proto.
"""

import os
import struct
from ctypes import c_float
from pathlib import Path

from tandem.client import RunSpec
from tandem.client.track.rows import Position, Row, markdown, open_alone

_MARK = b"tandem track "
_FRAME = 16  # number of bytes around a record's data: length and checksums
_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in _TABLE]


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _field(number: int, *content: bytes) -> bytes:
    """A protocol buffer's field of bytes, text or a message."""
    joined = b"".join(content)
    return _varint(number << 3 | 2) + _varint(len(joined)) + joined


def _record(time: float, step: int, content: bytes, position: Position | None = None) -> bytes:
    """An event in its frame (length, checksum, data, checksum). `position` is in the event's field
    `source_metadata.writer`."""
    writer = _field(10, _field(1, _MARK, str(position).encode())) if position else b""
    data = struct.pack("<Bd", 0x09, time) + b"\x10" + _varint(step) + content + writer
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _value(name: str, *content: bytes) -> bytes:
    return _field(1, _field(1, name.encode()), *content)


def _text(name: str, content: str) -> bytes:
    """A value for TensorBoard's tab Text: a tensor of shape [1] that contains one string."""
    tensor = _field(8, b"\x08\x07", _field(2, _field(2, b"\x08\x01")), _field(8, content.encode()))
    return _value(name, tensor, _field(9, _field(1, _field(1, b"text"))))


class TensorBoard:
    """TensorBoard's file DIR/<run>/events.out.tfevents.tandem. Each row is written as one event.
    The event's field `source_metadata.writer` has the row's position."""

    replaces = True

    def __init__(self, run: RunSpec, where: str) -> None:
        self._file = open_alone(Path(where) / run.name / "events.out.tfevents.tandem")
        self.position = self._read_back()

    def _read_back(self) -> Position | None:
        """The position of the last complete row. Removes an incomplete event from the end of the
        file."""
        descriptor = self._file.fileno()
        size, start, end = os.fstat(descriptor).st_size, 0, 0
        while end + _FRAME < size:
            (length,) = struct.unpack("<Q", os.pread(descriptor, 8, end))
            if not length or end + length + _FRAME > size:
                break
            start, end = end, end + length + _FRAME
        _, found, position = os.pread(descriptor, end - start, start)[:-4].rpartition(_MARK)
        os.ftruncate(descriptor, end if found else 0)
        return Position.parse(position.decode()) if found else None

    def write(self, row: Row) -> None:
        head = b""
        if self.position is None:
            text = _text("hyperparameters", markdown(("name", "value"), row.parameters.items()))
            head = _record(row.time, 0, _field(3, b"brain.Event:2"))
            head += _record(row.time, 0, _field(5, text))
        values = [
            _value(name, b"\x15" + bytes(c_float(value))) for name, value in row.values.items()
        ]
        values += [_text("samples", row.markdown())] if row.samples else []
        self._file.write(
            head + _record(row.time, row.position.step, _field(5, *values), row.position)
        )

    def rewind(self, step: int) -> None:
        """Starts a new session at `step`. The event SessionLog.START makes TensorBoard drop all
        steps from `step` on."""
        self._file.write(_record(0.0, step, _field(7, b"\x08\x01"), self.position))

    def close(self) -> None:
        self._file.close()
