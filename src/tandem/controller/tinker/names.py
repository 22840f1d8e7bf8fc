"""Names in Tinker's API. The package `tinker` makes some names itself, so the form of the names is
fixed.

A session's model `<session>:train:<n>` is the run `<session>-train-<n>`. A session's sampler is
`<session>:sample:<n>`. The id of a request is the name of a model or sampler, a colon, and the
number of the request.
"""

import re
from typing import Literal, NamedTuple

from tandem.errors import InvalidInput, NotFound

Group = Literal["weights", "sampler"]
CREATED = "new"
"""The word in place of a request's number, in the id of a request that creates a model."""
_NAME = r"([0-9a-z]{26}):(train|sample):([0-9]{1,9})"
_is_name = re.compile(_NAME).fullmatch
_is_request = re.compile(rf"{_NAME}:(new|[0-9]{{1,19}})").fullmatch
_is_path = re.compile(r"tinker://([^/]{1,200})/(weights|sampler_weights)/([^/]{1,256})").fullmatch
_SEGMENTS: dict[str, Group] = {"weights": "weights", "sampler_weights": "sampler"}
# A checkpoint's name becomes part of a URL, and part of a path in the client's file system.
_is_saved = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}").fullmatch


class Name(NamedTuple):
    """The name of a model or a sampler."""

    session: str
    kind: Literal["train", "sample"]
    number: int

    def __str__(self) -> str:
        return f"{self.session}:{self.kind}:{self.number}"

    @property
    def run(self) -> str:
        """The name of the model's run, in the form that `spool.sessions` defines."""
        return f"{self.session}-train-{self.number}"


def model_of(text: str, field: str = "model_id") -> Name:
    """The model with this name. Raises NotFound if `text` is not a model's name."""
    found = _is_name(text)
    if found is None or found[2] != "train":
        raise NotFound(f"there is no model {text[:100]!r}", field=field)
    return Name(found[1], "train", int(found[3]))


def sampler_of(text: str, field: str = "sampling_session_id") -> Name:
    """The sampler with this name. Raises NotFound if `text` is not a sampler's name."""
    found = _is_name(text)
    if found is None or found[2] != "sample":
        raise NotFound(f"there is no sampler {text[:100]!r}", field=field)
    return Name(found[1], "sample", int(found[3]))


def model_of_run(run: str) -> str | None:
    """The name of the model that belongs to a run; None if the run belongs to no session."""
    name = run.replace("-train-", ":train:")
    return name if _is_name(name) else None


class RequestId(NamedTuple):
    of: Name
    number: int | None  # None: the request that creates the model


def request_of(text: str) -> RequestId:
    """The request with this id. Raises NotFound if `text` is not a request's id."""
    if (found := _is_request(text)) is None:
        raise NotFound(f"there is no request {text[:100]!r}", field="request_id")
    kind: Literal["train", "sample"] = "train" if found[2] == "train" else "sample"
    number = None if found[4] == CREATED else int(found[4])
    return RequestId(Name(found[1], kind, int(found[3])), number)


class SavedPath(NamedTuple):
    """A checkpoint's path, `tinker://<model>/weights/<name>` or `.../sampler_weights/<name>`."""

    model: Name
    group: Group
    name: str

    def __str__(self) -> str:
        segment = "weights" if self.group == "weights" else "sampler_weights"
        return f"tinker://{self.model}/{segment}/{self.name}"


def path_of(text: str, field: str = "path") -> SavedPath:
    """The parsed path. Raises InvalidInput if `text` is not a path. Raises NotFound if the path
    names no model."""
    if (found := _is_path(text)) is None:
        form = "tinker://<model>/weights/<name>, or .../sampler_weights/<name>"
        raise InvalidInput(f"{text[:200]!r} is not a path of a checkpoint: {form}", field=field)
    return SavedPath(model_of(found[1], field), _SEGMENTS[found[2]], found[3])


def check_saved_name(name: str, field: str = "path") -> str:
    """Raises InvalidInput if a checkpoint can't have this name."""
    if not _is_saved(name):
        rule = "use letters, digits, '.', '_' and '-', at most 200; a letter or digit first"
        raise InvalidInput(f"{name[:100]!r} is not a name of a checkpoint: {rule}", field=field)
    return name
