"""Page tables: `PagePool` gives the pages of the KV cache to sequences, in runs of neighbouring pages if it can.

Attention reads a sequence whose pages are one run as one slice of the cache, without gathering.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from tllm.core.errors import CapacityError
from tllm.engine.pages.cached_pages import CachedPages

Run = tuple[int, int]
"""(first page, number of pages): pages that follow one another."""

GROWTH_PAGES = 16
"""Pages that a place should have free beside what is needed at once, and that are left to the owner before it."""


class PageIndex(Protocol):
    """Knows which pages hold something that may be wanted again (`PrefixCache`)."""

    def __contains__(self, page: int) -> bool: ...

    def forget(self, page: int) -> None: ...


class PagePool:
    """`num_pages` pages of `page_size` tokens. Each page is free, held or cached.

    A held page belongs to an owner (a sequence's key), or to several that share it. When the last one lets go, it is
    cached if `index` knows it, else free. Cached pages count as free: whoever needs room is given them, and `index`
    forgets them then.

    A new owner is placed in the middle of the widest gap, so that it and the owner before it can both grow in place.
    Where no gap is wide enough for it and some growth, the cached pages go that lie together and are the least loss:
    mostly those that were let go longest ago (`CachedPages`). So a full pool still gives long runs.
    """

    def __init__(self, num_pages: int, page_size: int = 16, index: PageIndex | None = None) -> None:
        if num_pages < 1 or page_size < 1:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens holds nothing", "give the cache more memory"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self._index = index
        self._gaps: list[list[int]] = [[0, num_pages]]  # free [start, stop), in order, never touching
        self._num_in_gaps = num_pages
        self._held: dict[int, list[list[int]]] = {}  # owner -> [first page, how many], in the sequence's order
        self._num_owners: dict[int, int] = {}  # of each held page
        self._cached = CachedPages()

    @property
    def num_free(self) -> int:
        """Pages that can be had: free and cached ones."""
        return self._num_in_gaps + len(self._cached)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def num_held(self, owner: int) -> int:
        """How many pages an owner has."""
        held = 0
        for _, count in self._held.get(owner, ()):
            held += count
        return held

    def page_table(self, owner: int) -> tuple[Run, ...]:
        """An owner's pages in the order of its tokens."""
        return tuple([(first, count) for first, count in self._held[owner]])

    def has_room(self, shared: list[int], tokens: int) -> bool:
        """Whether a new owner of so many tokens could have the pages `shared` and others after them."""
        missing = self.pages_for(tokens) - len(shared)
        if missing > self.num_free:  # most that wait lack so many: then nothing need be counted
            return False
        return missing <= self.num_free - sum(page in self._cached for page in shared)

    def begin(self, owner: int, shared: list[int], tokens: int, max_tokens: int = 0) -> bool:
        """Give a new owner the pages `shared`, held or cached ones, and others after them, as `cover` does."""
        assert owner not in self._held, f"{owner} has begun"
        if not self.has_room(shared, tokens):
            return False
        for page in shared:
            assert page in self._cached or page in self._num_owners, f"page {page} is free and holds nothing"
            if page in self._cached:
                self._cached.remove(page)
            self._num_owners[page] = self._num_owners.get(page, 0) + 1
        self._held[owner] = [list(run) for run in runs_of(shared)]
        return self.cover(owner, tokens, max_tokens)

    def cover(self, owner: int, tokens: int, max_tokens: int = 0) -> bool:
        """Give `owner` the pages it lacks for `tokens` tokens. If too few are free, nothing changes: False.

        `max_tokens` is how many tokens the owner may come to have; it only guides the choice of place.
        """
        missing = self.pages_for(tokens) - self.num_held(owner)
        if missing <= 0 and owner in self._held:
            return True
        if missing > self.num_free:
            return False
        runs = self._held.setdefault(owner, [])
        if runs and missing > 0:
            missing -= self._extend(runs[-1], missing)
        while missing > 0:
            wanted = max(missing, self.pages_for(max_tokens) - sum(count for _, count in runs))
            end = sum(runs[-1]) if runs else -1
            run = self._place(missing, wanted, end)
            if run[0] == end:
                runs[-1][1] += run[1]
            else:
                runs.append(run)
            missing -= run[1]
        return True

    def release(self, owner: int) -> None:
        """Let go of all pages of an owner."""
        cached = []
        for first, count in reversed(self._held.pop(owner, [])):
            for page in reversed(range(first, first + count)):
                self._num_owners[page] -= 1
                if self._num_owners[page]:
                    continue
                del self._num_owners[page]
                if self._index is not None and page in self._index:
                    cached.append(page)
                else:
                    self._free(page, page + 1)
        self._cached.add(cached)

    def forget(self, page: int) -> None:
        """Let nobody find what a page holds that `index` knows."""
        assert self._index is not None
        if page in self._cached:
            self._evict([page])
        else:
            self._index.forget(page)

    def check(self) -> None:
        """Assert that every page is free, cached or held, that owners are counted, and that gaps are in order."""
        seen = [0] * self.num_pages
        for start, stop in self._gaps:
            assert 0 <= start < stop <= self.num_pages, f"gap [{start}, {stop}) of {self.num_pages} pages"
            for page in range(start, stop):
                seen[page] += 1
        for (_, stop), (start, _) in zip(self._gaps, self._gaps[1:], strict=False):
            assert stop < start, f"gaps meet or overlap at {stop} and {start}"
        assert sum(seen) == self._num_in_gaps, f"{sum(seen)} pages in gaps, {self._num_in_gaps} counted as free"
        for page in (*self._cached, *self._num_owners):
            seen[page] += 1
        assert all(times == 1 for times in seen), f"pages held, cached or free other than once: {seen}"
        self._cached.check()
        held = [page for runs in self._held.values() for first, n in runs for page in range(first, first + n)]
        assert {page: held.count(page) for page in held} == self._num_owners, "owners are counted wrongly"
        for page in range(self.num_pages):
            known = self._index is not None and page in self._index
            assert page not in self._cached or known, f"page {page} is cached and cannot be found"
            assert not known or page in self._cached or page in self._num_owners, f"page {page} is free and is found"

    def _extend(self, run: list[int], missing: int) -> int:
        """Lengthen a run in place as far as the pages after it are free."""
        end = run[0] + run[1]
        at = bisect_left(self._gaps, [end, 0])
        if at == len(self._gaps) or self._gaps[at][0] != end:
            return 0
        count = min(missing, self._gaps[at][1] - end)
        self._take(end, count)
        run[1] += count
        return count

    def _place(self, missing: int, wanted: int, after: int) -> list[int]:
        """A new run of up to `missing` pages, with room to grow to `wanted`.

        It lies in the widest gap, or where room can be made at the least loss. `after` is the page after the owner's
        last one.
        """
        room = min(wanted, missing + GROWTH_PAGES)
        start, stop = max(self._gaps, key=lambda gap: gap[1] - gap[0], default=[0, 0])
        if self._cached and stop - start < room:
            start, stop, _ = self._cached.cheapest_place(self._gaps, room, after)
            self._evict(self._cached.with_following(range(start, stop)))
            first = start
        else:
            spare = stop - start - wanted
            before = spare // 2 if spare >= 0 else min(GROWTH_PAGES, max(0, stop - start - room) // 2)
            first = start if start == 0 else start + before
        count = min(missing, stop - first)
        self._take(first, count)
        return [first, count]

    def _evict(self, pages: list[int]) -> None:
        """Give up what cached pages hold."""
        assert self._index is not None
        for page in pages:
            self._cached.remove(page)
            self._index.forget(page)
            self._free(page, page + 1)

    def _take(self, first: int, count: int) -> None:
        """Hand out free pages that follow one another."""
        at = bisect_right(self._gaps, [first, math.inf]) - 1
        start, stop = self._gaps[at]
        left = [[start, first]] if first > start else []
        right = [[first + count, stop]] if stop > first + count else []
        self._gaps[at : at + 1] = left + right
        self._num_in_gaps -= count
        for page in range(first, first + count):
            self._num_owners[page] = 1

    def _free(self, start: int, stop: int) -> None:
        self._num_in_gaps += stop - start
        at = bisect_left(self._gaps, [start, 0])
        if at < len(self._gaps) and self._gaps[at][0] == stop:
            stop = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == start:
            self._gaps[at - 1][1] = stop
        else:
            self._gaps.insert(at, [start, stop])


def pages_of(page_table: Sequence[Run]) -> list[int]:
    """The pages of a page table, in order."""
    return [page for first, count in page_table for page in range(first, first + count)]


def runs_of(pages: Iterable[int]) -> tuple[Run, ...]:
    """Pages in their order as a page table: runs of neighbouring ones."""
    runs: list[Run] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)
