"""`Retention`: which saves of a run are kept when a new one is complete, and which of them is the best. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Worth = Callable[[int, Mapping[str, Any]], float | None]
"""worth(step, facts): how good a save is by the facts in it, the greater the better; None where they do not say."""


def unknown(step: int, facts: Mapping[str, Any]) -> float | None:
    """The `Worth` of saves that are not compared."""
    return None


class Retention:
    """Keeps the last `limit` saves; with a `worth` the best is one of as many, as `save_total_limit` of transformers.

    Every rank is told of the same saves by `found`, in any order, before it asks.
    """

    def __init__(self, limit: int, worth: Worth = unknown) -> None:
        self.limit, self._worth = limit, worth
        self._found: dict[int, float] = {}

    def found(self, step: int, facts: Mapping[str, Any]) -> None:
        """A save is whole, with these facts in it. One that is worth no number counts as not compared."""
        value = self._worth(step, facts)
        self._found.pop(step, None)
        if value is not None and not math.isnan(value):
            self._found[step] = value

    def best(self, complete: Sequence[int]) -> int | None:
        """The step of the best of these saves, of equal ones the first; None where none was compared."""
        compared = [step for step in sorted(complete) if step in self._found]
        return max(compared, key=self._found.__getitem__, default=None)

    def kept(self, complete: Sequence[int]) -> list[int]:
        """Those of the complete saves, oldest first, that stay: the last ones, and the best in the oldest's place."""
        newest, best = list(complete[-self.limit :]), self.best(complete)
        return newest if best is None or best in newest else [best, *newest[1:]]
