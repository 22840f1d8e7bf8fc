"""`tandem track`: a client of the controller that writes a run's metrics to experiment trackers. A
step's metrics are written once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from tandem.client import RunSpec, Tandem
from tandem.client.track.mlflow import Mlflow
from tandem.client.track.rows import Follower, Row
from tandem.client.track.tensorboard import TensorBoard
from tandem.client.track.wandb import Wandb
from tandem.errors import InvalidInput, TandemError

# A target writes to one tracker. A target finds its last row (`position`) in its own output, so no
# other state is kept. Before a row replaces existing rows, `rewind` removes the existing rows. If
# the tracker can't replace rows, `rewind` begins a new curve.
Target = TensorBoard | Wandb | Mlflow
TARGETS: dict[str, type[Target]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


class TrackerFailed(TandemError, code="tracker_failed"): ...


def track(
    tandem: Tandem,
    run: str,
    places: Sequence[str],
    samples: Callable[[], Path | None] = lambda: None,
    *,
    follow: bool,
) -> dict[str, int]:
    """Write the run's rows to `places`. Returns the number of rows written to each place; with
    `follow`, the function does not return. A later call continues after the last row written.

    Raises InvalidInput if a place can't be used, Conflict if another process writes to a place, and
    TrackerFailed with a tracker's own message.

    Args:
        run: the run's name.
        places: places in the form of `tandem track --to`, such as "tensorboard:DIR".
        samples: finds the file in which `tandem rl` keeps its samples, or returns None.
        follow: also wait for later jobs.
    """
    spec = tandem.get_run(run).spec
    with ExitStack() as stack:
        targets = {place: stack.enter_context(closing(_target(spec, place))) for place in places}
        positions = [target.position for target in targets.values() if target.position]
        start = min(positions) if len(positions) == len(targets) else None
        written = dict.fromkeys(targets, 0)
        for row in Follower(tandem, spec, start, samples, follow=follow).rows():
            for place, target in targets.items():
                with _telling(place):
                    written[place] += _write(target, row)
    return written


@contextmanager
def _telling(place: str) -> Iterator[None]:
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        raise TrackerFailed(
            f"{type(error).__name__}: {error}; try again", field=f"--to {place}"
        ) from error


def _target(run: RunSpec, place: str) -> Target:
    name, _, where = place.partition(":")
    if name not in TARGETS or not (where or name == "wandb"):
        known = "tensorboard:DIR, wandb, wandb:PROJECT, mlflow:URI"
        raise InvalidInput(f"{place!r} is not a tracker; use one of {known}", field="--to")
    with _telling(place):
        return TARGETS[name](run, where)


def _write(target: Target, row: Row) -> bool:
    """Write a row, unless the target has the row already. Returns whether the row was written."""
    last, new = target.position, row.position
    if last and new[:3] <= last[:3]:
        return False
    if last and row.kind == "step" and new.step <= last.step:
        # After a rollback or a failed job, rows with the same step numbers replace the rows that
        # were written. The next attempt of a job repeats the step numbers of the attempt before.
        if last.job == new.job and not target.replaces:
            return False
        target.position = last._replace(step=new.step - 1)
        target.rewind(new.step)
    target.write(row)
    target.position = new
    return True
