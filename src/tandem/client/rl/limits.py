"""Limits that end the loop early: too many consecutive groups that fail or have equal rewards, or
too many consecutive batches that the controller refuses."""

import time
from collections.abc import Sequence
from math import inf

from tandem.client.http import Backoff
from tandem.client.rl.config import RLSection
from tandem.client.rl.environment import RolloutGroup
from tandem.client.rl.samples import Alike
from tandem.errors import NothingToLearn, TandemError

# The loop ends after _UNINFORMATIVE * `groups_per_step` consecutive groups with equal rewards: such
# groups show that there is nothing left to learn.
_UNINFORMATIVE = 16
# The loop ends after _REFUSED refused batches in a row, if the last of these batches has differing
# rewards. The controller refuses a batch with differing rewards if, for example, its trajectories
# are too long.
_REFUSED = 3


class Limits:
    """Counts failed groups, refused batches, and groups with equal rewards. `teaches`: whether a
    group with equal rewards also changes the weights.

    Failures are tolerated for `patience` seconds after a success. Before the first success no
    failure is tolerated: most likely the environment is wrong.

    Args:
        rl: the settings under [rl].
        patience: seconds for which groups may keep failing after the last success.
        pauses: the shortest and the longest pause after failed groups, in seconds.
    """

    def __init__(self, rl: RLSection, patience: float, pauses: tuple[float, float]) -> None:
        self._size = rl.groups_per_step
        self.teaches = (
            rl.advantage.baseline == "none"
            or rl.advantage.keep_zero_variance
            or rl.distill is not None
        )
        self._failing = self._equal = self._refused = 0
        self._alike = Alike()
        self._patience, self._backoff = patience, Backoff(inf, *pauses)
        self._succeeded, self._paused_until = -inf, 0.0

    def failed(self, use: str, last_error: str) -> None:
        """Count a failed group of the environment `use`. Raises TandemError if too many groups in a
        row have failed, and none succeeded for `patience` seconds."""
        self._failing += 1
        if self._failing < max(3, self._size):
            return
        now = time.monotonic()
        problem = (
            f"{self._failing} groups in a row failed; repair the environment or the stack. The last"
            " error"
        )
        error = TandemError(f"{problem}: {last_error}", field=use)
        if now - self._succeeded >= self._patience:
            raise error
        if not self.paused:  # a pause, because each failing group uses up a task
            self._paused_until = now + self._backoff.next(error)

    @property
    def grace(self) -> float:
        """Every group may fail for this many seconds from now; 0 before the first success."""
        return 0.0 if self._succeeded == -inf else self._patience

    @property
    def paused(self) -> bool:
        """Whether new groups must wait because the last groups failed."""
        return time.monotonic() < self._paused_until

    def sampled(self, group: RolloutGroup, base: int) -> None:
        """Count a group that was rolled out; raises NothingToLearn after too many groups with equal
        rewards."""
        self._failing, self._succeeded, self._paused_until = 0, time.monotonic(), 0.0
        self._backoff.reset()
        self._equal = 0 if group.informative else self._equal + 1
        if group.informative:
            self._alike = Alike()
        else:
            self._alike.add(group.trajectories)
        if self._equal >= _UNINFORMATIVE * self._size and not self.teaches:
            last = group.trajectories[0].reward
            problem = (
                f"in the last {self._equal} groups all rewards were equal (the last: {last:g})"
            )
            raise NothingToLearn(
                f"{problem}; the run stays at step {base}: use other tasks, or end here."
                f" {self._alike.told()}"
            )

    def refused(self, batch: Sequence[RolloutGroup], refusal: NothingToLearn, base: int) -> None:
        """Count a batch that the controller refuses to train; raises NothingToLearn after too many
        refusals in a row.

        Args:
            refusal: the controller's answer.
            base: the step at which the run stays.
        """
        self._refused += 1
        if self._refused >= (
            _REFUSED if any(group.informative for group in batch) else _UNINFORMATIVE
        ):
            problem = f"the controller trains nothing of the last {self._refused} batches"
            alike = Alike(group.trajectories for group in batch)
            raise NothingToLearn(
                f"{problem}, so the run stays at step {base}: {refusal}. {alike.told()}"
            ) from refusal

    def accepted(self) -> None:
        """Count a batch that the controller trains."""
        self._refused = 0
