"""Checks of the names that become paths."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from tandem.errors import InvalidInput
from tandem.spool.schema import JobId, RunName

_RUN_NAME: TypeAdapter[str] = TypeAdapter(RunName)
_JOB_ID: TypeAdapter[str] = TypeAdapter(JobId)


def run_name(name: str) -> str:
    """`name` if it may name a run; else InvalidInput, field `run`."""
    return _checked(
        _RUN_NAME, name, "run", "a run's name is 1 to 64 of a-z 0-9 . _ - and begins and ends with a letter or digit"
    )


def job_id(job: str) -> str:
    """`job` if it may be a job's id; else InvalidInput, field `id`."""
    return _checked(_JOB_ID, job, "id", "a job's id is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit")


def is_run_name(name: str) -> bool:
    return _accepts(_RUN_NAME, name)


def is_job_id(job: str) -> bool:
    return _accepts(_JOB_ID, job)


def _accepts(adapter: TypeAdapter[str], value: str) -> bool:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _checked(adapter: TypeAdapter[str], value: Any, field: str, rule: str) -> str:
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise InvalidInput(f"{value!r:.100} is refused: {rule}", field=field) from error
