"""`tandem track`: a client of the controller that writes a run's metrics to experiment trackers, each step once."""

from collections.abc import Sequence
from contextlib import ExitStack, closing

from tandem.client import RunSpec, Tandem
from tandem.errors import InvalidInput, TandemError
from tandem.track.files import Jsonl
from tandem.track.mlflow import Mlflow
from tandem.track.rows import Follower, Row
from tandem.track.tensorboard import TensorBoard
from tandem.track.wandb import Wandb

# A target finds in what it has written where it stopped (`position`), so nothing has to be kept beside it. Before a row
# takes the place of rows that are there, `rewind` takes these back, or begins a new curve where they can't be replaced.
Target = TensorBoard | Wandb | Mlflow | Jsonl
TARGETS: dict[str, type[Target]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "jsonl": Jsonl}


class TrackerFailed(TandemError):
    code = "tracker_failed"


def track(tandem: Tandem, run: str, places: Sequence[str], *, follow: bool) -> dict[str, int]:
    """Write the run's rows to `places` ("tensorboard:DIR", ...); with `follow` without end.

    Returns how many rows each place got. Raises InvalidInput, Conflict where another process writes to a place, and
    TrackerFailed with what a tracker said; called again, it goes on where it stopped.
    """
    spec = tandem.get_run(run).spec
    with ExitStack() as stack:
        targets = {place: stack.enter_context(closing(_target(spec, place))) for place in places}
        positions = [target.position for target in targets.values()]
        written = dict.fromkeys(targets, 0)
        start = None if None in positions else min(position for position in positions if position)
        for row in Follower(tandem, spec, start, follow=follow).rows():
            for place, target in targets.items():
                try:
                    written[place] += _write(target, row)
                except Exception as error:
                    raise TrackerFailed(f"{type(error).__name__}: {error}; try again", field=f"--to {place}") from error
    return written


def _target(run: RunSpec, place: str) -> Target:
    name, _, where = place.partition(":")
    if name not in TARGETS or not (where or name == "wandb"):
        known = "tensorboard:DIR, wandb, wandb:PROJECT, mlflow:URI, jsonl:FILE"
        raise InvalidInput(f"{place!r} is no tracker; use one of {known}", field="--to")
    return TARGETS[name](run, where)


def _write(target: Target, row: Row) -> bool:
    """Write a row, unless it is there."""
    last = target.position
    if last and row.position[:3] <= last[:3]:
        return False
    if last and row.kind == "step" and row.position.step <= last.step:
        # After a rollback or a failed job other steps come in their place. A job's next attempt repeats its numbers.
        if last.job == row.position.job and not target.replaces:
            return False
        target.position = last._replace(step=row.position.step - 1)
        target.rewind(row.position.step)
    target.write(row)
    target.position = row.position
    return True
