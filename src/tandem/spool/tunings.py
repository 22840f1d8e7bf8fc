"""OpenAI's fine-tuning API on the volume: uploaded files (`uploads/<id>/`) and fine-tunings
(`tunings/<id>.json`). Each id contains a ULID, which begins with the creation time, so ids sort in
the order of creation."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tandem.errors import NotFound
from tandem.spool import fs
from tandem.spool.locks import file_lock
from tandem.spool.paths import Paths, listing, remembered
from tandem.spool.schema.tuning import ULID, Tuning, Upload
from tandem.system.plain_files import NotPlainError, open_plain

_is_upload = re.compile(f"file-{ULID}").fullmatch
_is_tuning = re.compile(f"ftjob-{ULID}").fullmatch
_RECORD = "file.json"


class Uploads:
    """Uploaded files. An upload is immutable, and is created by one rename."""

    def __init__(self, paths: Paths) -> None:
        self.directory = paths.root / "uploads"

    @contextmanager
    def receiving(self) -> Iterator[Path]:
        """A new directory for a file that a client uploads. The directory is removed at the end of
        the `with` block unless `commit` moved it."""
        with fs.volume_errors(self.directory):
            fs.make_dir(self.directory)
        with fs.staging(self.directory) as staged:
            yield staged

    def commit(self, staged: Path, upload: Upload) -> None:
        """Commits the directory `staged`, which has the file `<id>.jsonl` or `<id>.csv`, as the
        upload `upload.id`. An existing upload with this id is kept unchanged."""
        fs.write_json_atomic(staged / _RECORD, upload)
        fs.fsync_tree(staged)
        with suppress(FileExistsError):
            fs.rename_dir(staged, self.directory / upload.id)

    def get(self, upload_id: str) -> Upload:
        """The file's record. Raises NotFound (field `file_id`) if the file does not exist."""
        if (
            not _is_upload(upload_id)
            or (upload := _read_upload(self.directory / upload_id / _RECORD)) is None
        ):
            raise NotFound(f"No such File object: {upload_id[:100]}", field="file_id")
        return upload

    def path(self, upload: Upload) -> Path:
        """The path of the file's content."""
        suffix = "csv" if upload.purpose == "fine-tune-results" else "jsonl"
        return self.directory / upload.id / f"{upload.id}.{suffix}"

    def reader(self, upload: Upload) -> BinaryIO:
        """Opens the content of the uploaded file. Raises NotFound if the content was removed or is
        not a regular file."""
        try:
            return open_plain(self.path(upload))
        except (FileNotFoundError, NotPlainError) as error:
            raise NotFound(
                f"the content of {upload.id} is missing, or not a regular file", field="file_id"
            ) from error

    def ids(self) -> list[str]:
        """Newest first."""
        return [name for name in reversed(listing(self.directory)) if _is_upload(name)]

    def remove(self, upload: Upload) -> None:
        fs.remove_tree(self.directory / upload.id)
        with fs.volume_errors(self.directory):
            fs.fsync_dir(self.directory)


@remembered
def _read_upload(path: Path) -> Upload | None:
    return fs.read_undamaged(path, Upload)


class Tunings:
    def __init__(self, paths: Paths) -> None:
        self.directory = paths.root / "tunings"

    def lock(self) -> AbstractContextManager[int]:
        """The lock for changes of fine-tunings, and for the removal of the files that fine-tunings
        use."""
        with fs.volume_errors(self.directory):
            fs.make_dir(self.directory)
        return file_lock(self.directory / ".lock")

    def create(self, tuning: Tuning) -> None:
        with self.lock():
            fs.write_json_atomic(self._path(tuning.id), tuning)

    def get(self, tuning_id: str) -> Tuning:
        """The fine-tuning's record. Raises NotFound (field `fine_tuning_job_id`) if the record does
        not exist or is damaged."""
        tuning = None
        if _is_tuning(tuning_id):
            tuning = fs.read_undamaged(self._path(tuning_id), Tuning)
        if tuning is None:
            raise NotFound(
                f"Could not find fine tune: {tuning_id[:100]}", field="fine_tuning_job_id"
            )
        return tuning

    def change(self, tuning_id: str, update: Callable[[Tuning], Tuning]) -> Tuning:
        """Replaces the record by `update(record)`, unless the fine-tuning has ended. Returns the
        current record."""
        with self.lock():
            tuning = self.get(tuning_id)
            if tuning.end is None and (changed := update(tuning)) != tuning:
                fs.write_json_atomic(self._path(tuning_id), changed)
                return changed
            return tuning

    def ids(self) -> list[str]:
        """Newest first."""
        names = (name.removesuffix(".json") for name in reversed(listing(self.directory)))
        return [name for name in names if _is_tuning(name)]

    def prune(self, limit: float) -> None:
        """Removes the fine-tunings that ended before `limit` (Unix seconds)."""
        for tuning_id in reversed(self.ids()):
            with suppress(NotFound):
                tuning = self.get(tuning_id)
                if tuning.created >= limit:
                    return
                if tuning.end is not None and tuning.end.finished < limit:
                    fs.remove_file(self._path(tuning_id))

    def _path(self, tuning_id: str) -> Path:
        return self.directory / f"{tuning_id}.json"


def new_id(kind: str, at: float | None = None) -> str:
    """`file-…` or `ftjob-…`."""
    return f"{kind}-{fs.new_ulid(time.time() if at is None else at)}"
