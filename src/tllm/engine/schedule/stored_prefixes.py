"""`StoredPrefixes`: which pages are saved to disk, and which part of a waiting sequence is read from there first.

It lives beside the scheduler. The driver sends the messages that it gives round the ring (`page_moves.py`).

A page is saved when a sequence lets go of it to which the model gave a token after it: what comes to no numbers would
be found on disk for ever, though a fault of memory that had passed were the reason. It stays in the cache meanwhile;
should it be given to another sequence first, its message goes before the batch that writes over it.

A sequence whose prefix goes on on disk after what is in the cache waits until that was read, in parts, into pages of
its own; sequences behind it begin meanwhile. Then these pages can be found as if they had been computed here. What
some rank could not read is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from tllm.engine.pages.page_messages import FetchPages, PageChain, SavePages, TakePages, salt_digest
from tllm.engine.pages.page_table import PagePool, Run, pages_of, runs_of
from tllm.engine.schedule.prefix_cache import PageContent, PrefixCache
from tllm.engine.schedule.sequence import Sequence

MAX_LOADS = 4
"""Sequences whose pages are read at the same time, at most: each holds its pages meanwhile."""


class PageStore(Protocol):
    """What the driver's own rank knows of pages on disk."""

    def keeps(self, name: bytes) -> bool:
        """Whether this rank's part of a page is on disk, or on its way."""

    def may_have(self, name: bytes) -> bool:
        """Whether something of a page is on disk."""


@dataclass
class PrefixLoad:
    """Pages of a waiting sequence that come from disk: numbers [start, stop) of its pages, with these `names`, into
    `pages`.

    `owner` holds these pages in the pool. The first `taken` of them are in the cache. `parts` were fetched and not
    taken yet: the number of each message, and its count of pages. `is_taking`: a message to take the first of them
    is on its way. What is left of a load that `is_dropped` is not taken.
    """

    sequence: Sequence
    owner: int
    start: int
    names: frozenset[bytes]
    pages: list[int]
    fetched: int = 0
    taken: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)
    is_taking: bool = False
    is_dropped: bool = False


class StoredPrefixes:
    """What goes to disk and comes from it; a message is about at most `part_pages` pages.

    `queries` counts the tokens of sequences that began which were not in the cache, `hits` those of them that came from
    disk.
    """

    def __init__(self, store: PageStore, prefix_cache: PrefixCache, pool: PagePool, part_pages: int) -> None:
        self.part_pages = part_pages
        self.queries = self.hits = 0
        self.loads: dict[int, PrefixLoad] = {}
        self._store, self._prefix_cache, self._pool = store, prefix_cache, pool
        self._to_save: dict[int, int] = {}  # page of the cache -> which page of its sequence it is
        self._urgent: dict[int, tuple[int, bytes, PageContent]] = {}  # pages that are to be written over
        self._lacking: set[bytes] = set()  # on the driver's disk, and some rank could not read its part
        self._next_number = 0
        prefix_cache.on_forget = self._forget

    # --- saving
    @property
    def has_saves(self) -> bool:
        """Whether pages are to be saved."""
        return bool(self._to_save or self._urgent)

    def release(self, sequence: Sequence, page_table: tuple[Run, ...]) -> None:
        """A sequence lets go of its pages: those that are proven, can be found and are not on disk are to be saved."""
        record = sequence.prefix
        record.is_sought = False
        proven = min(record.num_added, record.num_proven // self._pool.page_size)
        for place, page in enumerate(pages_of(page_table)[:proven]):
            if page not in self._prefix_cache:
                continue
            name, _ = self._prefix_cache.content(page)
            if name in self._lacking or not self._store.keeps(name):
                self._to_save.setdefault(page, place)

    def urgent_saves(self) -> list[SavePages]:
        """Messages for all pages that the next batch may write over."""
        wanted = [(page, place, name, content) for page, (place, name, content) in self._urgent.items()]
        self._urgent.clear()
        return list(self._messages(wanted))

    def next_save(self) -> SavePages | None:
        """A message for some of the other pages, those first that were let go first."""
        pages = list(islice(self._to_save.items(), self.part_pages))
        wanted = [(page, place, *self._prefix_cache.content(page)) for page, place in pages]
        message = next(self._messages(wanted), None)
        if message is not None:
            for page, _ in pages[: len(message.chain.names)]:
                del self._to_save[page]
        return message

    def _forget(self, page: int) -> None:
        place = self._to_save.pop(page, None)
        if place is not None:
            self._urgent[page] = (place, *self._prefix_cache.content(page))

    def _messages(self, wanted: Iterable[tuple[int, int, bytes, PageContent]]) -> Iterator[SavePages]:
        """Pages in messages: those together that follow one another in a sequence."""
        part: list[tuple[int, int, bytes, PageContent]] = []
        for one in wanted:
            if part and (one[3].parent != part[-1][2] or len(part) == self.part_pages):
                yield self._save(part)
                part = []
            part.append(one)
        if part:
            yield self._save(part)

    def _save(self, part: list[tuple[int, int, bytes, PageContent]]) -> SavePages:
        names = tuple(name for _, _, name, _ in part)
        self._lacking.difference_update(names)
        contents = [content for *_, content in part]
        chain = _chain(names, part[0][1], contents)
        return SavePages(chain, runs_of(page for page, *_ in part))

    # --- loading
    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence should not begin yet, since more of its prefix comes from disk."""
        if sequence.key in self.loads:
            return True
        if sequence.prefix.is_sought or sequence.in_flight or sequence.prompt.needs_every_token:
            return False
        found = self._prefix_cache.find(sequence)
        # Of many that wait, most are looked at in each step, so no more of their pages than need be.
        first = next(self._names_on_disk(sequence, len(found)), None)
        if first is None:
            sequence.prefix.is_sought = True
            return False
        if len(self.loads) == MAX_LOADS or any(first in load.names for load in self.loads.values()):
            return True  # until it is its turn, or another sequence with this prefix has had it read
        if not self._pool.has_room(found, len(sequence.token_ids)):
            return False  # nor is there room to begin
        names = list(self._names_on_disk(sequence, len(found)))
        owner = -1 - sequence.key
        has_begun = self._pool.begin(owner, found, (len(found) + len(names)) * self._pool.page_size)
        assert has_begun, "there is room for more than that"
        sequence.prefix.is_sought = True
        pages = pages_of(self._pool.page_table(owner))[len(found) :]
        self.loads[sequence.key] = PrefixLoad(sequence, owner, len(found), frozenset(names), pages)
        return True

    def next_fetch(self, load: PrefixLoad) -> FetchPages | None:
        """The message that begins to read the next part, unless all of it is under way."""
        count = min(self.part_pages, len(load.pages) - load.fetched)
        if load.is_dropped or count <= 0:
            return None
        start = load.start + load.fetched
        named = list(self._prefix_cache.chain(load.sequence, start, start + count))
        chain = _chain(tuple(name for name, _ in named), start, [content for _, content in named])
        self._next_number = (self._next_number + 1) % 2**31
        load.parts.append((self._next_number, count))
        load.fetched += count
        return FetchPages(self._next_number, chain)

    def next_take(self, load: PrefixLoad) -> TakePages:
        """The message that takes the next part that was fetched into the cache, or drops it."""
        number, count = load.parts[0]
        load.is_taking = True
        pages = [] if load.is_dropped else load.pages[load.taken : load.taken + count]
        return TakePages(number, runs_of(pages), len(pages))

    def took(self, load: PrefixLoad, message: TakePages) -> None:
        """A part has come back: what every rank took can be found from now on."""
        number, count = load.parts.pop(0)
        assert number == message.number, "parts come back in order"
        load.is_taking = False
        if not load.is_dropped:
            load.taken += message.num_taken
            if message.num_taken < count:
                names = load.sequence.prefix.names
                self._lacking.update(names[load.start + load.taken :])
                load.is_dropped = True
        if not load.parts and (load.is_dropped or load.taken == len(load.pages)):
            self._end(load)

    def drop(self, sequence: Sequence) -> None:
        """A waiting sequence has gone."""
        load = self.loads.get(sequence.key)
        if load is not None:
            load.is_dropped = True
            if not load.parts:
                self._end(load)

    def began(self, sequence: Sequence) -> None:
        """Count a sequence that begins for the first time."""
        record = sequence.prefix
        if record.found is not None or sequence.prompt.needs_every_token:
            return
        self.queries += len(sequence.token_ids) - max(0, sequence.computed - record.from_disk)
        self.hits += min(record.from_disk, sequence.computed)

    def stats(self) -> dict[str, float]:
        """The counts, under the names that metrics have."""
        return {"external_prefix_queries": self.queries, "external_prefix_hits": self.hits}

    def _names_on_disk(self, sequence: Sequence, start: int) -> Iterator[bytes]:
        """The names of its pages from number `start` on that the driver's disk has, up to the first that it lacks."""
        for name, _ in self._prefix_cache.chain(sequence, start, (len(sequence.token_ids) - 1) // self._pool.page_size):
            if name in self._lacking or not self._store.may_have(name):
                return
            yield name

    def _end(self, load: PrefixLoad) -> None:
        self._prefix_cache.add_pages(load.sequence, load.start, load.pages[: load.taken])
        load.sequence.prefix.from_disk = load.taken * self._pool.page_size
        self._pool.release(load.owner)
        del self.loads[load.sequence.key]


def _chain(names: tuple[bytes, ...], first: int, contents: list[PageContent]) -> PageChain:
    token_ids = b"".join(content.token_ids for content in contents)
    return PageChain(names, first, contents[0].parent, token_ids, salt_digest(contents[0].salt))
