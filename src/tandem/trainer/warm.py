"""`python -m tandem.trainer.warm`: keeps the base model's files in this node's page cache, and
keeps their volume mounted. The ranks of a job's new pods then read the files from memory. Runs
until SIGTERM."""

import signal
import time
from threading import Event

from tandem.config import load_settings, resolve_model
from tandem.errors import InvalidInput, TandemError
from tandem.families.model_config import base_model_files, model_directory
from tandem.system import logs
from tandem.system.logs import Log
from tandem.system.plain_files import open_plain

log = Log("warm")

EVERY_SECONDS = 600.0
"""Seconds between two reads of all files. Other programs' files push the model's files out of the
page cache. Each read copies the pages that are still in the cache, so it costs time."""
ABSENT_SECONDS = 30.0
BLOCK_BYTES = 8 * 2**20


def read_model(model: str, done: Event) -> int:
    """Reads all files of the model's directory, or of the hub model's local snapshot. Returns the
    number of bytes read. Ends early once `done` is set. Downloads nothing. Raises InvalidInput if
    the files are not on this node, and OSError if a file can't be read."""
    block, size = bytearray(BLOCK_BYTES), 0
    for path in base_model_files(model_directory(model, cached=True)):
        with open_plain(path, links="any") as file:
            while not done.is_set() and (count := file.readinto(block)):
                size += count
    return size


def main() -> int:
    """Returns the exit status: 0 after SIGTERM. Raises InvalidInput if TANDEM_BASE_MODEL is not
    set."""
    logs.configure()
    done = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    settings = load_settings()
    if settings.base_model is None:
        raise InvalidInput("there is no model to read", field="TANDEM_BASE_MODEL")
    said = ""
    while not done.is_set():
        begin, problem = time.monotonic(), ""
        try:
            size = read_model(resolve_model(settings.root, settings.base_model), done)
        except (TandemError, OSError) as error:
            problem = str(error)
            if problem != said:
                log.warning("can't read the base model yet; trying again", error=error)
        else:
            log.info("read the base model", bytes=size, seconds=time.monotonic() - begin)
        said = problem
        done.wait(ABSENT_SECONDS if problem else EVERY_SECONDS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
