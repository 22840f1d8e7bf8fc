"""Parses the body of an upload (`multipart/form-data`). The file in the body is written to the
volume as it arrives."""

from pathlib import Path
from typing import BinaryIO

from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from tandem.controller.openai.errors import BadRequest
from tandem.spool import fs

MOST_PARTS = 20
FIELD_BYTES = 4096
NAME_CHARACTERS = 255


class Form:
    """The parts of a form. The part `file` is written to `path`. `fields` has the other parts, and
    `filename` has the file's name without directories."""

    def __init__(self, path: Path, boundary: bytes) -> None:
        self.fields = dict[str, str]()
        self.filename: str | None = None
        self.complete = False
        self._path = path
        self._file: BinaryIO | None = None
        self._parts = 0
        self._header = self._value = b""
        self._name, self._text = "", b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header_end,
                "on_part_data": self._on_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadRequest(f"the body is not multipart/form-data: {error}", param=None) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise BadRequest(f"a form has at most {MOST_PARTS} parts", param=None)
        self._name, self._text = "", b""

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            if self._name == "file":
                if self._file is not None:
                    raise BadRequest("send one file at a time", param="file")
                self.filename = _plain_name(options.get(b"filename", b"").decode(errors="replace"))
                self._file = self._path.open("xb")
        self._header = self._value = b""

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file" and self._file is not None:
            self._file.write(memoryview(data)[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > FIELD_BYTES:
            raise BadRequest(
                f"a field of the form has at most {FIELD_BYTES} bytes",
                param=self._name[:64] or None,
            )

    def _on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name] = self._text.decode(errors="replace")

    def _on_end(self) -> None:
        self.complete = True
        self.close()


async def receive_form(request: Request, path: Path) -> Form:
    """The form in the request's body. Raises SpoolUnusable if the volume can't store the form's
    file. Raises BadRequest if the body is not complete multipart/form-data."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(
            "send the file as multipart/form-data, with the fields file and purpose", param=None
        )
    try:
        form = Form(path, options[b"boundary"])
    except FormParserError as error:
        raise BadRequest(f"the body is not multipart/form-data: {error}", param=None) from error
    try:
        with fs.volume_errors(path):
            async for part in request.stream():
                await to_thread.run_sync(form.write, part)
    finally:
        form.close()
    if not form.complete:
        raise BadRequest("the body ends before the form's last boundary", param=None)
    if form.filename is None:
        raise BadRequest(
            "is missing; send the file", param="file", code="missing_required_parameter"
        )
    return form


def _plain_name(name: str) -> str:
    """The last part of a path, reduced to printable characters."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(c for c in last if c.isprintable())[:NAME_CHARACTERS] or "file"
