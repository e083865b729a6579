"""The messages of the ring about pages on disk: pages to be saved, to be read, and to be taken into the cache.

Every rank does its own part of each, for its layers and kv heads and with its own folder. Stages do it in the order in
which messages come, so a page is saved before a later batch writes over it, and is there before a later batch reads it.

`SavePages` and `FetchPages` end at the last stage. `TakePages` comes back round to the driver, since it must know of
how many pages every rank had its part.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

import msgspec

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
NAME_BYTES = 32
Name = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


def salt_digest(salt: str) -> bytes:
    """What stands for the salt of a request in messages and files, which may come from a secret."""
    return blake2b(salt.encode(), digest_size=NAME_BYTES, person=b"tllm page salt").digest()


class PageChain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Full pages that follow one another in a sequence, by their names and by all that the names are made of.

    The first one is page number `first` of its sequence, and follows the page named `parent`. `token_ids` are those of
    all pages, 4 bytes each.
    """

    names: tuple[Name, ...]
    first: Number
    parent: Name
    token_ids: bytes
    salt: Name

    def tokens_of(self, place: int) -> bytes:
        """The token ids of one of the pages."""
        size = len(self.token_ids) // len(self.names)
        return self.token_ids[place * size : (place + 1) * size]

    def parent_of(self, place: int) -> bytes:
        """The name of the page before one of the pages."""
        return self.names[place - 1] if place else self.parent


class SavePages(msgspec.Struct, frozen=True, tag="save", forbid_unknown_fields=True):
    """Copy these pages out of the cache, and write them to disk at leisure."""

    chain: PageChain
    page_table: tuple[tuple[Number, Number], ...]


class FetchPages(msgspec.Struct, frozen=True, tag="fetch", forbid_unknown_fields=True):
    """Begin to read these pages from disk into memory beside the cache. `number` is how `TakePages` names them."""

    number: Number
    chain: PageChain


class TakePages(msgspec.Struct, frozen=True, tag="take", forbid_unknown_fields=True):
    """Copy what was fetched into these pages of the cache; with no pages, drop it.

    `num_taken`: the first so many of them could be taken by every rank that the message has passed.
    """

    number: Number
    page_table: tuple[tuple[Number, Number], ...]
    num_taken: Number


PageMessage = SavePages | FetchPages | TakePages


def num_pages(page_table: tuple[tuple[int, int], ...]) -> int:
    """How many pages the runs of a page table have."""
    return sum(count for _, count in page_table)
