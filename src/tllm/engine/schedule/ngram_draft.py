"""`NGramProposer`: what may come next in one sequence, looked up where its last tokens stood before (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

COMPARED = 8
"""Tokens back to which two places of a text are compared."""

PLACES = 16
"""Earlier places of the last two tokens that are compared, the nearest first."""

UNKNOWN = 0.5
"""The chance that a token of a draft is right, before any was seen to be."""

WEIGHT = 0.1
"""Of each new token in that chance."""


class DraftOutcome(NamedTuple):
    """Of what was drafted: tokens that came as they were told, and the one that did not (or was not told): 0 or 1."""

    right: int
    wrong: int


class NGramProposer:
    """Reads `token_ids`, which grow elsewhere. `chance`: that a token it tells is right if those before it were.

    Every pair of tokens is chained to the place where it last stood, so a token costs one entry of a list, however
    long what is compared may be. Of several places the one counts before which most tokens are alike.
    """

    def __init__(self, token_ids: Sequence[int], chance: float = UNKNOWN) -> None:
        self.chance = chance
        self._ids = token_ids
        self._told: list[int] | None = None
        self._newest: dict[tuple[int, int], int] = {}
        self._before = [-1]  # of each place: where its token and the one before it last stood

    def tell(self, count: int) -> list[int]:
        """Up to so many tokens that may come next; none where the last two are new."""
        self._read()
        place, ids = self._place(), self._ids
        told = self._told = list[int]()
        if place is not None:
            for at in range(place + 1, place + 1 + count):
                # What would lie past the end is what was just told: a text that repeats itself goes on doing so.
                told.append(ids[at] if at < len(ids) else told[at - len(ids)])
        return told

    def hear(self, came: Sequence[int]) -> DraftOutcome:
        """Take note of the tokens that came after it told, if it did."""
        told, self._told = self._told, None
        if told is None:
            return DraftOutcome(0, 0)
        right = num_accepted(told, came)
        is_wrong = right < min(len(told), len(came))
        for _ in range(right):
            self.chance += WEIGHT * (1 - self.chance)
        if is_wrong:
            self.chance -= WEIGHT * self.chance
        return DraftOutcome(right, int(is_wrong or not told))

    def _read(self) -> None:
        ids = self._ids
        for at in range(len(self._before), len(ids)):
            pair = (ids[at - 1], ids[at])
            self._before.append(self._newest.get(pair, -1))
            self._newest[pair] = at

    def _place(self) -> int | None:
        """The earlier place that is most like the end."""
        at, best, most = self._before[-1], None, 0
        for _ in range(PLACES):
            if at < 0 or most == COMPARED:
                break
            alike = self._alike(at)
            if alike > most:
                best, most = at, alike
            at = self._before[at]
        return best

    def _alike(self, at: int) -> int:
        """Tokens back from this place that are those back from the end."""
        ids, end = self._ids, len(self._ids) - 1
        for back in range(min(COMPARED, at + 1)):
            if ids[at - back] != ids[end - back]:
                return back
        return min(COMPARED, at + 1)


def num_accepted(told: Sequence[int], came: Sequence[int]) -> int:
    """How many tokens are alike, from the first on."""
    count = 0
    for one, other in zip(told, came, strict=False):
        if one != other:
            break
        count += 1
    return count
