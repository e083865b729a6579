"""Page tables: `PagePool` gives the pages of the KV cache to sequences, in runs of neighbouring pages if it can.

Attention reads a sequence whose pages are one run as one slice of the cache, without gathering.
"""

from __future__ import annotations

from bisect import bisect_left

from tllm.core.errors import CapacityError

Run = tuple[int, int]
"""(first page, number of pages): pages that follow one another."""


class PagePool:
    """`num_pages` pages of `page_size` tokens. Each page is free or belongs to exactly one owner, a sequence's key.

    A new owner is placed in the middle of the widest gap, so that it and the owner before it can both grow in place.
    """

    def __init__(self, num_pages: int, page_size: int = 16) -> None:
        if num_pages < 1 or page_size < 1:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens holds nothing", "give the cache more memory"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self._gaps: list[list[int]] = [[0, num_pages]]  # free [start, stop), in order, never touching
        self._held: dict[int, list[list[int]]] = {}  # owner -> [first page, how many], in the sequence's order

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def num_held(self, owner: int) -> int:
        """How many pages an owner has."""
        return sum(count for _, count in self._held.get(owner, ()))

    def page_table(self, owner: int) -> tuple[Run, ...]:
        """An owner's pages in the order of its tokens."""
        return tuple((first, count) for first, count in self._held[owner])

    def cover(self, owner: int, tokens: int, max_tokens: int = 0) -> bool:
        """Give `owner` the pages it lacks for `tokens` tokens. If too few are free, nothing changes: False.

        `max_tokens` is how many tokens the owner may come to have; it only guides the choice of place.
        """
        missing = self.pages_for(tokens) - self.num_held(owner)
        if missing > self.num_free:
            return False
        runs = self._held.setdefault(owner, [])
        if runs and missing > 0:
            missing -= self._extend(runs[-1], missing)
        while missing > 0:
            wanted = max(missing, self.pages_for(max_tokens) - sum(count for _, count in runs))
            run = self._place(missing, wanted)
            runs.append(run)
            missing -= run[1]
        return True

    def release(self, owner: int) -> None:
        """Free all pages of an owner."""
        for first, count in self._held.pop(owner, ()):
            self._free(first, first + count)

    def check(self) -> None:
        """Assert that every page is free or held exactly once, and that the gaps are in order and apart."""
        seen = [0] * self.num_pages
        for start, stop in self._gaps:
            assert 0 <= start < stop <= self.num_pages, f"gap [{start}, {stop}) of {self.num_pages} pages"
            for page in range(start, stop):
                seen[page] += 1
        for (_, stop), (start, _) in zip(self._gaps, self._gaps[1:], strict=False):
            assert stop < start, f"gaps meet or overlap at {stop} and {start}"
        assert sum(seen) == self.num_free, f"{sum(seen)} pages in gaps, {self.num_free} counted as free"
        for runs in self._held.values():
            for first, count in runs:
                for page in range(first, first + count):
                    seen[page] += 1
        assert all(times == 1 for times in seen), f"pages held or free other than once: {seen}"

    def _extend(self, run: list[int], missing: int) -> int:
        """Lengthen a run in place as far as the pages after it are free."""
        end = run[0] + run[1]
        at = bisect_left(self._gaps, [end, 0])
        if at == len(self._gaps) or self._gaps[at][0] != end:
            return 0
        count = min(missing, self._gaps[at][1] - end)
        self._take(at, end, count)
        run[1] += count
        return count

    def _place(self, missing: int, wanted: int) -> list[int]:
        """A new run of up to `missing` pages from the widest gap, with room around it for `wanted`."""
        at = max(range(len(self._gaps)), key=lambda i: self._gaps[i][1] - self._gaps[i][0])
        start, stop = self._gaps[at]
        count = min(missing, stop - start)
        first = start if start == 0 else start + max(0, stop - start - wanted) // 2
        self._take(at, first, count)
        return [first, count]

    def _take(self, at: int, first: int, count: int) -> None:
        start, stop = self._gaps[at]
        left = [[start, first]] if first > start else []
        right = [[first + count, stop]] if stop > first + count else []
        self._gaps[at : at + 1] = left + right
        self.num_free -= count

    def _free(self, start: int, stop: int) -> None:
        self.num_free += stop - start
        at = bisect_left(self._gaps, [start, 0])
        if at < len(self._gaps) and self._gaps[at][0] == stop:
            stop = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == start:
            self._gaps[at - 1][1] = stop
        else:
            self._gaps.insert(at, [start, stop])
