"""Writes to Weights & Biases. W&B's own record of a run, the file `wandb/*run-*/run-*.wandb`, says
which rows exist, even offline.

W&B buffers a few rows in memory. A kill loses the buffered rows, and the next `tandem track` sends
them again. W&B's server drops a row that the server already has, because the row's W&B step is not
above the server's last step.
"""

import json
import os
import struct
from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from tandem.client import RunSpec
from tandem.client.track.rows import KINDS, SAMPLE_COLUMNS, Position, Row, open_alone, optional
from tandem.errors import InvalidInput

_POSITION = "tandem/position"
_BLOCK, _HEADER = 32768, 7  # bytes


class Wandb:
    """A run of W&B in the project of `wandb:PROJECT` (default: "tandem"), in a group with the name
    of Tandem's run. After a rollback, a new run of W&B begins in the group."""

    replaces = False

    def __init__(self, run: RunSpec, where: str) -> None:
        self._wandb = optional("wandb")
        self._project, self._name, self._id = (
            where or "tandem",
            run.name,
            f"{run.name}-{run.created:.0f}",
        )
        self._where = Path(os.environ.get("WANDB_DIR") or ".")
        self._lock = open_alone(self._where / "wandb" / f".tandem-{self._id}.lock")
        files = self._where.glob(f"wandb/*run-*-{escape(self._id)}-*/run-*.wandb")
        found = [
            (position, int(path.stem.rpartition("-")[2]))
            for path in files
            for position in positions(path)
        ]
        self.position: Position | None = max(found)[0] if found else None
        self._start(max(found)[1] if found else 0)

    def _start(self, number: int) -> None:
        self._number, self._parameters = number, dict[str, str]()
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=f"{self._id}-{number}",
                group=self._name,
                resume="allow",
                dir=self._where,
                name=f"{self._name} ({number})" if number else self._name,
                settings=self._wandb.Settings(
                    x_disable_stats=True, disable_git=True, console="off", silent=True
                ),
            )
        except self._wandb.errors.Error as error:
            problem = f"W&B: {error}; set WANDB_API_KEY, or WANDB_MODE=offline"
            raise InvalidInput(problem, field="--to wandb") from error
        self._run.define_metric("optimizer_step")
        self._run.define_metric("*", step_metric="optimizer_step")

    def write(self, row: Row) -> None:
        if row.parameters != self._parameters:
            self._run.config.update(row.parameters, allow_val_change=True)
            self._parameters = row.parameters
        step = row.position.step
        values: dict[str, Any] = {
            "optimizer_step": step,
            _POSITION: str(row.position),
            "_timestamp": row.time,
        } | row.values
        if row.samples:
            values["samples"] = self._wandb.Table(
                list(SAMPLE_COLUMNS), list(map(list, row.table()))
            )
        self._run.log(values, step=step * len(KINDS) + KINDS.index(row.kind), commit=True)

    def rewind(self, step: int) -> None:  # noqa: ARG002
        self._run.finish()
        self._start(self._number + 1)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # waits until all rows are in W&B's file
        self._lock.close()


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file in LevelDB's log format. The file has blocks, and a block has
    parts of records. Each part begins with a checksum, the part's length and its kind."""
    content, record = path.read_bytes(), b""
    for block in range(0, len(content), _BLOCK):
        at, end = block or _HEADER, min(block + _BLOCK, len(content))
        while at + _HEADER <= end:
            length, kind = struct.unpack_from("<HB", content, at + 4)
            at += _HEADER + length
            if not kind or at > end:
                return
            record += content[at - length : at]
            if kind in (1, 4):  # a complete record, or a record's last part
                yield record
                record = b""


def positions(path: Path) -> Iterator[Position]:
    """The positions of the rows in W&B's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record in records(path):
        for item in Record.FromString(record).history.item:
            if _POSITION in (item.key, *item.nested_key):
                yield Position.parse(json.loads(item.value_json))
