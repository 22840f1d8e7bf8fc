"""What the loop knows across a kill: one JSON file, replaced before each submission and after each step."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.errors import InvalidInput
from tandem.spool.fs import read_record, write_json_atomic


class Submitted(BaseModel):
    """A job that is submitted, or about to be, and that the loop has not followed to its end."""

    id: str
    base: int
    tasks: list[str]
    numbers: dict[str, Any]  # of its groups, for the record


class State(BaseModel):
    """Tasks are named `<environment>:<number>`; those from `cursors` on have not been handed out."""

    run: str
    environments: list[str]
    first: int  # the step that the loop began with
    cursors: list[int]
    open: list[str] = []  # handed out, and in no job
    jobs: list[Submitted] = []
    # The request of the last of `jobs`, until the controller has it: sent again after a kill, it is the same job.
    pending: dict[str, Any] | None = None


def load(path: Path, new: State) -> State:
    """The state in the file, or `new`; raises InvalidInput where it is another loop's or damaged."""
    try:
        state = read_record(path, State) or new
    except ValidationError as error:
        raise InvalidInput(f"{path} is damaged; restore it, or remove it to begin anew", field="--state") from error
    if (state.run, state.environments) != (new.run, new.environments):
        problem = f"{path} is of run {state.run!r} with the environments {', '.join(state.environments)}"
        raise InvalidInput(f"{problem}; restore the config, or name another file", field="--state")
    return state


def save(path: Path, state: State) -> None:
    """Replace the file, durably."""
    write_json_atomic(path, state)
