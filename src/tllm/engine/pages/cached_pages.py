"""`CachedPages`: pages that no sequence holds and that are kept for later ones; which of them are evicted first.

Pages that were let go together are a group: a sequence's pages, its last ones first. What follows a lost page can no
longer be found, so whoever takes a page takes what follows it in its group as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple


class Piece(NamedTuple):
    """Neighbouring pages [start, stop) that are free (no group), or cached and in the order of their sequence.

    Taking the first one takes `following` pages of the group, itself included; the next one takes one less, and so on.
    """

    start: int
    stop: int
    group: int = 0
    following: int = 0


class Place(NamedTuple):
    """Pages [start, stop) to be made free, and what is lost by it: in pages, each by how recently it was used.

    A page of the oldest group counts next to nothing, one of the newest group counts 1.
    """

    start: int
    stop: int
    cost: float


class CachedPages:
    """The groups, those that were let go longest ago first."""

    def __init__(self) -> None:
        self._group_of: dict[int, int] = {}
        self._groups: dict[int, dict[int, None]] = {}
        self._last_group = 0
        self._pieces: dict[int, list[Piece]] = {}  # of the groups that have not changed since

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, page: int) -> bool:
        return page in self._group_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._group_of)

    def add(self, pages: Sequence[int]) -> None:
        """Pages that were let go together, the last of the sequence first."""
        self._last_group += 1
        if pages:
            self._groups[self._last_group] = dict.fromkeys(pages)
            self._group_of.update(dict.fromkeys(pages, self._last_group))

    def remove(self, page: int) -> None:
        """The page is used again, or lost."""
        group = self._group_of.pop(page)
        del self._groups[group][page]
        self._pieces.pop(group, None)
        if not self._groups[group]:
            del self._groups[group]

    def check(self) -> None:
        """Assert that each page is in its group, and that pieces that were worked out are those of today."""
        assert self._group_of == {page: group for group, pages in self._groups.items() for page in pages}
        for group, known in list(self._pieces.items()):
            del self._pieces[group]
            assert group in self._groups and known == self._pieces_of(group), f"pieces of group {group} are old"

    def with_following(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that are cached, and what follows them in their groups."""
        lost: dict[int, None] = {}
        for page in pages:
            if page in lost or page not in self._group_of:
                continue
            for one in self._groups[self._group_of[page]]:
                lost[one] = None
                if one == page:
                    break
        return list(lost)

    def cheapest_place(self, gaps: Iterable[Sequence[int]], width: int, after: int) -> Place:
        """Where `width` neighbouring pages cost least, or the widest place if none is as wide.

        That a sequence goes on in place, at the page `after` its last one, is worth as many pages as are wanted, were
        they used just now.
        """
        oldest = next(iter(self._groups), 0)
        heat = {group: (group - oldest + 1) / (self._last_group - oldest + 1) for group in self._groups}
        best: Place | None = None
        for pieces in self._stretches(gaps):
            start, stop = pieces[0].start, pieces[-1].stop
            wide = min(width, stop - start)
            if best is not None and wide < best.stop - best.start:
                continue
            firsts = {one.start for one in pieces} | {one.stop - wide for one in pieces} | {after}
            for first in firsts:
                if not start <= first <= stop - wide:
                    continue
                cost = _cost(pieces, first, first + wide, heat) - (width if first == after else 0)
                if best is None or (-wide, cost, first) < (best.start - best.stop, best.cost, best.start):
                    best = Place(first, first + wide, cost)
        assert best is not None, "no page is free or cached"
        return best

    def _stretches(self, gaps: Iterable[Sequence[int]]) -> Iterator[list[Piece]]:
        """Free and cached pages as pieces, those that follow one another without a held page together."""
        pieces = [Piece(start, stop) for start, stop in gaps]
        for group in self._groups:
            pieces += self._pieces_of(group)
        together: list[Piece] = []
        for piece in sorted(pieces):
            if together and together[-1].stop != piece.start:
                yield together
                together = []
            together.append(piece)
        if together:
            yield together

    def _pieces_of(self, group: int) -> list[Piece]:
        """The pieces of a group; they are worked out when the group has changed."""
        pieces = self._pieces.get(group)
        if pieces is None:
            pieces = self._pieces[group] = []
            pages = self._groups[group]
            for following, page in zip(range(len(pages), 0, -1), reversed(pages), strict=True):
                if pieces and pieces[-1].stop == page:
                    pieces[-1] = pieces[-1]._replace(stop=page + 1)
                else:
                    pieces.append(Piece(page, page + 1, group, following))
        return pieces


def _cost(pieces: list[Piece], start: int, stop: int, heat: dict[int, float]) -> float:
    """What is lost where pages [start, stop) are taken, of pieces that follow one another."""
    lost: dict[int, int] = {}
    for at in range(bisect_right(pieces, start, key=attrgetter("start")) - 1, len(pieces)):
        piece = pieces[at]
        if piece.start >= stop:
            break
        if piece.group:
            following = piece.following - max(0, start - piece.start)
            lost[piece.group] = max(following, lost.get(piece.group, 0))
    return sum(heat[group] * count for group, count in lost.items())
