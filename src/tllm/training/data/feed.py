"""`Feed`: where a rank's trainer gets the microbatches of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tllm.training.data.batch_feed import ReplicaBatch
from tllm.training.data.batch_tensors import Tokens


class Feed(Protocol):
    """Gives this rank its replica's batch of one step after another. Every rank makes the same calls."""

    @property
    def is_between(self) -> bool:
        """Whether the run can be broken off here: nothing at hand is for later steps alone."""

    @property
    def role_seconds(self) -> Mapping[str, float]:
        """What roles beside the policy took of this rank's time for the step at hand, by their names."""

    def begin(self, step: int, stop: int) -> None:
        """Start with `step`, 0 being the run's first; steps from `stop` on do not come."""

    def next(self, on_wait: Callable[[str], object]) -> ReplicaBatch:
        """This replica's batch of the next step; waits until it is here, and says on rank 0 now and then for whom."""

    def microbatches(self, batch: ReplicaBatch) -> Sequence[Tokens]:
        """The same as tensors."""

    def position(self, batch: ReplicaBatch) -> bytes:
        """Where in the data the step after `batch`, the last that came, begins, as snapshots keep it."""

    def close(self) -> None:
        """End what runs beside; links are closed before, should it wait on one."""


class DataPosition(Protocol):
    """A place in the data that a save keeps: `data.batches.Batches`, or `data.prompt_batches.PromptBatches`."""

    def state(self, step: int) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> int: ...
