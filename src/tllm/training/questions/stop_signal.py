"""`StopSignal`: whether a run was told to save and end, as those hear of it who wait for programs elsewhere."""

from __future__ import annotations

from collections.abc import Callable

STOPPED = ("the run was stopped while nobody could be reached who answers it", "")
"""In the place of a fault: the step is not taken, and the run ends as any that is stopped."""


class StopSignal:
    """Of one rank, from any thread. Not set until whoever can tell is followed."""

    def __init__(self) -> None:
        self._is_set: Callable[[], bool] = lambda: False

    def follow(self, is_set: Callable[[], bool]) -> None:
        """From here on, what this says."""
        self._is_set = is_set

    def is_set(self) -> bool:
        """Whether the run is to save and end."""
        return self._is_set()
