"""`PrefixCache`: which pages hold the keys and values of which tokens, so that what prompts share is computed once.

Only full pages are known here. A page is named by a chain hash over the name of the page before it, its own token ids
and the salt of the request, which tells adapters apart too, so one name stands for a whole prefix. The hash finds a
page and is never believed alone: what it was made of is kept beside the page and compared.

A page is added as soon as a batch that writes it was made. Stages compute batches in order, so it is written before
any later batch reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

from tllm.engine.pages.page_table import Run, pages_of
from tllm.engine.schedule.sequence import Sequence

FIRST = bytes(32)
"""In place of a name, before the first page of a sequence."""


class PageContent(NamedTuple):
    """What a full page holds: these tokens (4 bytes each), after the pages that `parent` names, under a salt."""

    salt: str
    parent: bytes
    token_ids: bytes


def page_name(content: PageContent) -> bytes:
    """The chain hash. Only the last part has a length of its own, so no two contents are the same bytes."""
    return blake2b(content.parent + content.token_ids + content.salt.encode(), digest_size=len(FIRST)).digest()


class PrefixCache:
    """The full pages that are held or were left in the cache, by their names.

    `queries` counts the tokens of sequences when these began, `hits` those of them that were found, but for those that
    were read from disk for this sequence. Sequences that begin again after they were preempted are not counted.
    `on_forget` is told of each page that is to hold something else, before anything writes to it.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.queries = self.hits = 0
        self.on_forget: Callable[[int], None] | None = None
        self._pages: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, PageContent]] = {}
        self._found: dict[int, dict[int, None]] = {}  # by the key of a sequence that waits: its known pages, in order

    def __contains__(self, page: int) -> bool:
        """Whether this page can be found."""
        return page in self._contents

    def find(self, sequence: Sequence) -> list[int]:
        """The pages of the longest known prefix of a sequence that waits, in order.

        Its last token is always left to compute, as the next one follows from that. Nothing is found for a prompt of
        which the log-probability or the hidden state of every token is wanted: they must be computed.
        What was found is kept until it begins, and `forget` takes from it; so to ask again, step after step, looks at
        no more than what comes after it.
        """
        if sequence.prompt.needs_every_token:
            return []
        pages = self._found.setdefault(sequence.key, {})
        for name, content in self.chain(sequence, len(pages), (len(sequence.token_ids) - 1) // self.page_size):
            page = self._pages.get(name)
            if page is None or self._contents[page][1] != content:
                break
            pages[page] = None
        return list(pages)

    def drop(self, sequence: Sequence) -> None:
        """It waits no longer."""
        self._found.pop(sequence.key, None)

    def began(self, sequence: Sequence) -> None:
        """Note what was found for a sequence that has begun, and count it if it did for the first time."""
        self.drop(sequence)
        record = sequence.prefix
        record.num_added = sequence.computed // self.page_size
        if record.found is None:
            record.found = sequence.computed
            if not sequence.prompt.needs_every_token:
                self.queries += len(sequence.token_ids)
                self.hits += max(0, record.found - record.from_disk)

    def lacks_page(self, sequence: Sequence, coming: int = 0) -> bool:
        """Whether `add` would let a page of the sequence be found that it has filled since."""
        return (sequence.num_sound_tokens + coming) // self.page_size > sequence.prefix.num_added

    def add(self, sequence: Sequence, page_table: tuple[Run, ...], coming: int = 0) -> None:
        """Let the full pages of a sequence be found. None of their tokens may be a draft token (`num_sound_tokens`).

        Those that it will have filled with `coming` tokens of its prompt count as well.
        Of two pages with the same content the first remains; the other is free once it is let go.
        """
        if not self.lacks_page(sequence, coming):
            return
        start, stop = sequence.prefix.num_added, (sequence.num_sound_tokens + coming) // self.page_size
        self.add_pages(sequence, start, pages_of(page_table)[start:stop])
        sequence.prefix.num_added = stop

    def add_pages(self, sequence: Sequence, start: int, pages: list[int]) -> None:
        """Let pages be found that hold the full pages of a sequence from number `start` on."""
        for page, (name, content) in zip(pages, self.chain(sequence, start, start + len(pages)), strict=True):
            if name not in self._pages:
                self._pages[name] = page
                self._contents[page] = (name, content)

    def known_pages(self, sequence: Sequence) -> list[int]:
        """Those of its full pages that can be found, whoever has computed them."""
        return [page for name in sequence.prefix.names if (page := self._pages.get(name)) is not None]

    def content(self, page: int) -> tuple[bytes, PageContent]:
        """The name of a page that can be found, and what it holds."""
        return self._contents[page]

    def forget(self, page: int) -> None:
        """The page is to hold something else."""
        if self.on_forget is not None:
            self.on_forget(page)
        name, _ = self._contents.pop(page)
        del self._pages[name]
        for pages in self._found.values():
            while page in pages:
                pages.popitem()  # the last one, until this one is gone

    def check(self) -> None:
        """Assert that names and pages belong to each other, and that every name is that of the content."""
        assert {name: page for page, (name, _) in self._contents.items()} == self._pages
        assert all(page_name(content) == name for name, content in self._contents.values())
        assert all(page in self._contents for pages in self._found.values() for page in pages)

    def stats(self) -> dict[str, float]:
        """The counts, under the names that metrics have."""
        return {"prefix_queries": self.queries, "prefix_hits": self.hits}

    def chain(self, sequence: Sequence, start: int, stop: int) -> Iterator[tuple[bytes, PageContent]]:
        """Names and contents of a sequence's full pages [start, stop); names are worked out once, and in order."""
        names, salt, size = sequence.prefix.names, sequence.request.prefix_salt, self.page_size
        for place in range(start, stop):
            token_ids = array("I", sequence.token_ids[place * size : (place + 1) * size]).tobytes()
            content = PageContent(salt, names[place - 1] if place else FIRST, token_ids)
            if place == len(names):
                names.append(page_name(content))
            yield names[place], content
