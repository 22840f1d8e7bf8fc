"""`tandem export`: a step of a run as a Hugging Face model."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.common import Json, RunArgument, connect, show, size
from tandem.cli.runs import StepArgument
from tandem.client.download import staging
from tandem.errors import InvalidInput
from tandem.families.model_config import model_directory

FILES = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors")


def export(
    run: RunArgument,
    step: StepArgument,
    dest: Annotated[Path, typer.Argument(metavar="DIR", help="The new directory.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="The run's base model as this machine has it: a directory or hub name.  \\[default: as the "
                     "run names it]"),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Write a step as a Hugging Face model: the base model's files, with the adapter merged into the weights; or the
    step's own files, where the run trains all weights.

    transformers and vLLM load the directory as they load the base model. It appears only when it is complete.
    """
    from tandem.inference.merged_model import write_merged_model  # late: NumPy is for this command only

    with staging(dest) as directory:
        tandem, staged = connect(), Path(directory)
        spec = tandem.get_run(run).spec
        base = model_directory(base_model or spec.base_model, FILES)
        manifest = tandem.download(run, step, staged / "step", weights_only=True)
        if spec.lora is not None:
            total = write_merged_model(staged / "model", base, staged / "step", spec.lora)
        elif not manifest.files:
            raise InvalidInput(f"step 0 of {run} is the base model, {spec.base_model}", field="step")
        else:
            (staged / "step" / "manifest.json").unlink()
            (staged / "step").rename(staged / "model")
            total = sum(entry.size for entry in manifest.files.values())
        (staged / "model").replace(dest)
    done = {"run": run, "step": step, "dest": str(dest), "base_model": str(base), "bytes": total}
    made = f"{run}@{step}" if spec.lora is None else f"{run}@{step}, merged into {base},"
    show(done, json, lambda _: f"{made} is in {dest} ({size(total)})")
