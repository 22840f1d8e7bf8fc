"""Random access to the records of a file (JSON lines, a JSON array, Parquet) or of a directory
saved by the package datasets."""

import json
import tempfile
from array import array
from pathlib import Path
from typing import Any, NoReturn

from tandem.errors import InvalidInput

LARGEST_ARRAY = 2**30
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}
_MEANT = {"arguments", "parameters", "input", "input_schema"}
_WRAPPERS = {"data", "examples", "pairs", "train"}


# Records, each with its place, such as `data.jsonl line 3`. Elements of arrays and rows of tables
# are counted from 0.
type Records = _Lines | _TableRows | list[tuple[str, Any]]


def open_records(path: Path) -> Records:
    """The records of a file or directory. Raises InvalidInput if the file can't be read, or has
    another format."""
    try:
        if path.is_dir():
            return _of_directory(path)
        with path.open("rb") as file:
            head = file.read(4096)
        if packed := next(
            (name for magic, name in _PACKED.items() if head.startswith(magic)), None
        ):
            raise InvalidInput(
                f"{path.name} is compressed ({packed}); unpack it first", field="FILE"
            )
        if head.startswith(b"PAR1"):
            return _TableRows(path.name, [path], parquet=True)
        if path.suffix.lower() in (".csv", ".tsv"):
            raise InvalidInput(
                f"{path.name} is a table; save it as JSON lines or Parquet", field="FILE"
            )
        if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            return _elements(path)
        return _of_lines(path)
    except OSError as error:
        raise InvalidInput(f"can't read {path}: {error.strerror or error}", field="FILE") from error


def _of_lines(path: Path) -> Records:
    """The records of a file that has JSON lines, one JSON object over several lines, or an object
    that contains an array of records."""
    lines = _Lines(path)
    try:
        first = lines[0][1] if len(lines) else None
    except InvalidInput:
        try:
            return _elements(path)
        except InvalidInput:
            return lines  # the caller refuses the file at its first line
    wrapped = (
        len(lines) == 1
        and isinstance(first, dict)
        and any(isinstance(first.get(n), list) for n in _WRAPPERS)
    )
    return _elements(path) if wrapped else lines


def _loads(text: bytes, place: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        value = json.loads(text.decode("utf-8-sig"), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"not UTF-8: {error.reason}; save the file as UTF-8", field=place
        ) from error
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, json.JSONDecodeError):
            problem = (
                f"{error.msg} at {f'line {error.lineno}, ' if error.lineno > 1 else ''}column"
                f" {error.colno}"
            )
        raise InvalidInput(
            f"not JSON: {problem}; correct it or leave it out", field=place
        ) from error
    if b"\\ud" in text or b"\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            _check_letters(value, place, ": ")
    return value


def _check_letters(value: Any, field: str, dot: str = ".") -> None:
    """Refuses a text with a character that a UTF-8 file can't hold. The error names the text's
    field."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            problem = f"{half} at character {error.start} is half of a pair, of a letter cut in two"
            raise InvalidInput(f"{problem}; correct it or leave it out", field=field) from error
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        if isinstance(key, str):
            _check_letters(key, field)
        if isinstance(item, dict | list | str):
            _check_letters(item, f"{field}{dot}{key}")


class _Lines:
    """JSON lines; blank lines are skipped. The offset and the number of each line are kept in
    memory, 16 bytes per line."""

    def __init__(self, path: Path) -> None:
        self._file, self._name = path.open("rb"), path.name
        self._offsets, self._numbers = array("Q"), array("Q")
        offset = 0
        for number, line in enumerate(self._file, 1):
            if not line.isspace():
                self._offsets.append(offset)
                self._numbers.append(number)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        place = f"{self._name} line {self._numbers[index]}"
        self._file.seek(self._offsets[index])
        return place, _loads(self._file.readline().strip(), place)


def _elements(path: Path) -> list[tuple[str, Any]]:
    """The elements of a JSON array, or of the only array in a JSON object. The whole file is read
    into memory."""
    if path.stat().st_size > LARGEST_ARRAY:
        raise InvalidInput("too large for a JSON array; save it as JSON lines", field="FILE")
    content = _loads(path.read_bytes(), path.name)
    wrapped = (
        [value for name, value in content.items() if name in _WRAPPERS]
        if isinstance(content, dict)
        else []
    )
    items = wrapped[0] if len(wrapped) == 1 else content
    if not isinstance(items, list):
        items = [content]
    return [(f"{path.name} [{index}]", item) for index, item in enumerate(items)]


class _TableRows:
    """The rows of Parquet or Arrow files. Parquet files are first unpacked to a temporary Arrow
    file. Arrow files are memory-mapped."""

    def __init__(self, name: str, files: list[Path], *, parquet: bool) -> None:
        # Places of the rows with a null in a call's arguments or in a tool's parameters.
        self.nulls = dict[str, None]()
        try:
            import pyarrow as pa
            from pyarrow import ipc
            from pyarrow import parquet as pq
        except ImportError as error:
            raise InvalidInput(
                f"reading {name} needs pyarrow: pip install 'tandem-rl[data]'", field="FILE"
            ) from error
        try:
            with tempfile.NamedTemporaryFile(suffix=".arrow") as unpacked:
                if parquet:
                    with ipc.new_stream(unpacked, pq.ParquetFile(files[0]).schema_arrow) as writer:
                        for file in files:
                            for batch in pq.ParquetFile(file).iter_batches(1024):
                                writer.write_batch(batch)
                    unpacked.flush()
                    files = [Path(unpacked.name)]
                tables = [ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
                self._name, self._table = name, pa.concat_tables(tables)
        except pa.ArrowException as error:
            raise InvalidInput(f"can't read {name}: {error}", field="FILE") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        place, row = f"{self._name} row {index}", self._table.slice(index, 1).to_pylist()[0]
        if _has_null(row):
            self.nulls[place] = None
        return place, _without_none(row)


def _without_none(value: Any) -> Any:
    """The row without keys whose value is None. Arrow gives all rows the same keys, and None for
    each key that a row lacks."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _has_null(value: Any, inside: bool = False) -> bool:
    """Whether a call's arguments or a tool's parameters contain a null. A null in arguments or
    parameters may have a meaning."""
    if isinstance(value, dict):
        return any(_has_null(item, inside or key in _MEANT) for key, item in value.items())
    if isinstance(value, list):
        return any(_has_null(item, inside) for item in value)
    return inside and value is None


def _of_directory(path: Path) -> Records:
    """The records of a directory: a saved Dataset, a saved DatasetDict, or Parquet files. A
    DatasetDict is read from its split `train`, or from its only split."""
    if (path / "dataset_dict.json").exists():
        splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
        if "train" not in splits and len(splits) != 1:
            named = ", ".join(str(path / name) for name in splits)
            raise InvalidInput(f"name one of its splits: {named}", field="FILE")
        return _of_directory(path / ("train" if "train" in splits else splits[0]))
    if (path / "state.json").exists():
        files = [
            path / file["filename"]
            for file in json.loads((path / "state.json").read_bytes())["_data_files"]
        ]
        return _TableRows(path.name, files, parquet=False)
    found = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if not found:
        raise InvalidInput(
            f"{path} has neither a saved dataset nor Parquet files; name a file", field="FILE"
        )
    return _TableRows(
        path.name, [file for file in found if file.name.startswith("train")] or found, parquet=True
    )
