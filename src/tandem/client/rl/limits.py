"""What ends the loop before its last step: in a row, groups that fail, groups without a difference, batches that the
controller refuses."""

from collections.abc import Sequence

from tandem.client.rl.config import RLSection
from tandem.client.rl.environment import Group
from tandem.errors import NothingToLearn, TandemError

# After so many times `groups_per_step` groups without a difference in their rewards there is nothing left to learn.
_UNINFORMATIVE = 16
# After so many batches with a difference none of which the controller trains, because their trajectories are too long.
_REFUSED = 3


class Limits:
    """`teaches`: whether also groups without a difference in their rewards do."""

    def __init__(self, rl: RLSection) -> None:
        self._size = rl.groups_per_step
        self.teaches = rl.advantage.baseline == "none" or rl.advantage.keep_zero_variance
        self._failing = self._equal = self._refused = 0

    def failed(self, use: str, last_error: str) -> None:
        """Count a group of the environment `use`; TandemError after too many."""
        self._failing += 1
        if self._failing >= max(3, self._size):
            problem = f"{self._failing} groups in a row failed; repair the environment or the stack. The last error"
            raise TandemError(f"{problem}: {last_error}", field=use)

    def sampled(self, group: Group, base: int) -> None:
        """Count a group that was rolled out; NothingToLearn after too many without a difference."""
        self._failing = 0
        self._equal = 0 if group.informative else self._equal + 1
        if self._equal >= _UNINFORMATIVE * self._size and not self.teaches:
            last = group.trajectories[0].reward
            problem = f"in the last {self._equal} groups all rewards were equal (the last: {last:g})"
            raise NothingToLearn(f"{problem}; the run stays at step {base}: use other tasks, or end here")

    def refused(self, batch: Sequence[Group], refusal: NothingToLearn, base: int) -> None:
        """Count a batch of which the controller trains no group; `refusal` after too many."""
        self._refused += 1
        if self._refused >= (_REFUSED if any(group.informative for group in batch) else _UNINFORMATIVE):
            problem = f"the controller trains nothing of the last {self._refused} batches"
            raise NothingToLearn(f"{problem}, so the run stays at step {base}: {refusal}") from refusal

    def accepted(self) -> None:
        """The controller trains a batch."""
        self._refused = 0
