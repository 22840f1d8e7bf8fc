"""Bodies of OpenAI's fine-tuning API: the client's requests, and the objects of the answers."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.spool.schema import Record
from tandem.spool.schema.tuning import Hyperparameters, Tuning, TuningEnd, Upload

MOST_EPOCHS, MOST_BATCH, MOST_RATE, MOST_BETA = 50, 256, 10.0, 2.0
ORGANIZATION = "tandem"


def _number(least: float, most: float, *, whole: bool) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        kinds = (int,) if whole else (int, float)
        within = type(value) in kinds and least <= value <= most
        if value is None or value == "auto" or within:
            return "auto" if value is None else value
        kind = "a whole number" if whole else "a number"
        raise ValueError(f'{value!r:.60} is refused; use "auto", or {kind} from {least} to {most}')

    return check


class SupervisedSettings(Record):
    n_epochs: Annotated[
        int | Literal["auto"], BeforeValidator(_number(1, MOST_EPOCHS, whole=True))
    ] = "auto"
    batch_size: Annotated[
        int | Literal["auto"], BeforeValidator(_number(1, MOST_BATCH, whole=True))
    ] = "auto"
    learning_rate_multiplier: Annotated[
        float | Literal["auto"], BeforeValidator(_number(0.001, MOST_RATE, whole=False))
    ] = "auto"

    def record(self) -> Hyperparameters:
        return Hyperparameters(**self.model_dump())


class DPOSettings(SupervisedSettings):
    beta: Annotated[
        float | Literal["auto"], BeforeValidator(_number(0.001, MOST_BETA, whole=False))
    ] = "auto"


class Supervised(Record):
    hyperparameters: SupervisedSettings | None = None


class DPO(Record):
    hyperparameters: DPOSettings | None = None


class Method(Record):
    """A fine-tuning method and its settings. A request may contain only the settings of the method
    `type`."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: DPO | None = None
    reinforcement: dict[str, Any] | None = None


class CreateTuning(Record):
    model: str = Field(min_length=1, max_length=4096)
    training_file: str = Field(max_length=256)
    validation_file: str | None = Field(default=None, max_length=256)
    hyperparameters: SupervisedSettings | None = None
    method: Method | None = None
    suffix: str | None = Field(default=None, max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=2**31, strict=True)
    integrations: list[dict[str, Any]] | None = Field(default=None, max_length=16)
    metadata: (
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None
    ) = Field(default=None, max_length=16)


def file_object(upload: Upload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "file",
        "bytes": upload.size,
        "created_at": int(upload.created),
        "expires_at": None,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": "processed",
        "status_details": None,
    }


def job_object(tuning: Tuning, status: str, model: str | None) -> dict[str, Any]:
    """OpenAI's object of a job.

    Args:
        model: the fine-tuned model's name, if the job has succeeded.
    """
    end, plan = tuning.end, tuning.plan
    given = plan.hyperparameters if plan else tuning.hyperparameters
    values = given.model_dump(exclude=None if tuning.method == "dpo" else {"beta"})
    finished = end.finished if end else tuning.cancelled
    done = end is not None and end.status == "succeeded" and plan is not None
    return {
        "id": tuning.id,
        "object": "fine_tuning.job",
        "created_at": int(tuning.created),
        "finished_at": None if finished is None else int(finished),
        "model": tuning.model,
        "fine_tuned_model": model,
        "organization_id": ORGANIZATION,
        "status": status,
        "error": _error(end),
        "hyperparameters": values,
        "method": {"type": tuning.method, tuning.method: {"hyperparameters": values}},
        "result_files": [end.result_file] if end and end.result_file else [],
        "seed": tuning.seed,
        "trained_tokens": plan.tokens if done and plan else None,
        "training_file": tuning.training_file,
        "validation_file": tuning.validation_file,
        "estimated_finish": None,
        "integrations": [],
        "metadata": tuning.metadata,
        "user_provided_suffix": tuning.suffix,
    }


def _error(end: TuningEnd | None) -> dict[str, Any] | None:
    if end is None or end.status != "failed":
        return None
    return {"code": end.code, "message": end.message, "param": end.param}


def page(found: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": has_more,
    }
