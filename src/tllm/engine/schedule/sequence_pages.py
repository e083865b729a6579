"""`SequencePages`: the pages of the KV cache that sequences have, from the pool, or found in the prefix cache.

For models whose layers have states, a running sequence has a slot for them too.
"""

from __future__ import annotations

from tllm.engine.pages.page_table import PagePool, Run
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.prefix_cache import PrefixCache
from tllm.engine.schedule.sequence import Sequence
from tllm.engine.schedule.stored_prefixes import PageStore, StoredPrefixes


class SequencePages:
    """What a scheduler does with pages. `prefix_cache` is None where prefix caching is switched off, `stored` where no
    pages are kept on disk.
    """

    def __init__(self, limits: Limits) -> None:
        self.prefix_cache = PrefixCache(limits.page_size) if limits.enable_prefix_caching else None
        self.pool = PagePool(limits.num_pages, limits.page_size, self.prefix_cache)
        self.has_states = limits.num_state_slots > 0
        self.state_slots = list(range(limits.num_state_slots))
        self.stored: StoredPrefixes | None = None

    def keep_on_disk(self, store: PageStore, part_pages: int) -> None:
        """Save pages and read them again, at most `part_pages` at once. Nothing where prefix caching is off."""
        if self.prefix_cache is not None:
            self.stored = StoredPrefixes(store, self.prefix_cache, self.pool, part_pages)

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether pages of a waiting sequence are on their way from disk."""
        return self.stored is not None and self.stored.is_awaited(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A waiting sequence has gone."""
        self._forget_if_doubtful(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.drop(sequence)
        if self.stored is not None:
            self.stored.drop(sequence)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether there are pages for all that a waiting sequence has."""
        return self.pool.has_room(self._found(sequence), len(sequence.token_ids))

    def begin(self, sequence: Sequence) -> bool:
        """Let a sequence run, if there are pages for all that it has; those that are found full need no computing."""
        found = self._found(sequence)
        if not self.pool.begin(sequence.key, found, len(sequence.token_ids), sequence.max_cached_tokens):
            return False
        sequence.begin(len(found) * self.pool.page_size)
        if self.has_states:
            sequence.state_slot = self.state_slots.pop()
        if self.stored is not None:
            self.stored.began(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.began(sequence)
        return True

    def _found(self, sequence: Sequence) -> list[int]:
        return [] if self.prefix_cache is None else self.prefix_cache.find(sequence)

    def cover(self, sequence: Sequence, tokens: int) -> bool:
        """Give it the pages that it lacks for so many tokens. If too few are free, nothing changes: False."""
        return self.pool.cover(sequence.key, tokens, sequence.max_cached_tokens)

    def table(self, sequence: Sequence) -> tuple[Run, ...]:
        """Its pages in the order of its tokens."""
        return self.pool.page_table(sequence.key)

    def add_full(self, sequence: Sequence, coming: int = 0) -> None:
        """Let others find the pages that it has filled, or will have with `coming` tokens of the next batch."""
        if self.prefix_cache is not None and self.prefix_cache.lacks_page(sequence, coming):
            self.prefix_cache.add(sequence, self.table(sequence), coming)

    def release(self, sequence: Sequence) -> None:
        """It runs no longer. Full pages can be found as long as nobody else needs the room."""
        self.add_full(sequence)
        self._forget_if_doubtful(sequence)
        if self.stored is not None:
            self.stored.release(sequence, self.table(sequence))
        self.pool.release(sequence.key)
        if self.has_states:
            self.state_slots.append(sequence.state_slot)

    def _forget_if_doubtful(self, sequence: Sequence) -> None:
        """Let nobody find pages after which there was no token: a fault of this machine's may have passed."""
        if sequence.prefix.is_doubtful and self.prefix_cache is not None:
            for page in self.prefix_cache.known_pages(sequence):
                self.pool.forget(page)

    def stats(self) -> dict[str, float]:
        """Numbers of this moment, and totals since the start, under the names that metrics have."""
        used = {"kv_usage": 1 - self.pool.num_free / self.pool.num_pages}
        of_prefixes = {} if self.prefix_cache is None else self.prefix_cache.stats()
        return {**used, **of_prefixes, **({} if self.stored is None else self.stored.stats())}
