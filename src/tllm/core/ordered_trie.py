"""`OrderedTrie`: an immutable mapping of names to values, of which a changed copy shares nearly all with the original.

It is a hash trie (Bagwell, Ideal Hash Trees, 2001): inner nodes are tuples of `BRANCHES` parts, leaves small dicts.
With n values a look-up or a change takes O(log n), where a copied dict or tuple would take O(n).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar
from zlib import crc32

T = TypeVar("T")

BITS = 4
BRANCHES = 1 << BITS
HASH_BITS = 32
LEAF = 16
"""A leaf with more values than this is divided, unless its hashes have no bits left."""

_Leaf = dict[str, tuple[int, T]]
_Part = _Leaf[T] | tuple["_Part[T]", ...]


class OrderedTrie(Generic[T]):
    """Values by name, and in the order in which they were added; one that replaces another keeps its place."""

    __slots__ = ("_ordered", "_root", "_size", "_turn")

    def __init__(self) -> None:
        self._root: _Part[T] = {}
        self._size = self._turn = 0
        self._ordered: tuple[T, ...] | None = ()

    @classmethod
    def of(cls, values: Iterable[tuple[str, T]]) -> OrderedTrie[T]:
        """Named values, in their order."""
        table: OrderedTrie[T] = cls()
        for name, value in values:
            table = table.added(name, value)
        return table

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        """All values in their order. O(n log n) for the first time, then O(n)."""
        if self._ordered is None:
            self._ordered = tuple(value for _, value in sorted(_entries(self._root), key=lambda entry: entry[0]))
        return iter(self._ordered)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderedTrie) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"OrderedTrie({list(self)!r})"

    def get(self, name: str) -> T | None:
        """The value of this name, None where there is none."""
        entry = _entry(self._root, name)
        return entry[1] if entry is not None else None

    def added(self, name: str, value: T) -> OrderedTrie[T]:
        """With a value behind all others. One of the same name that was here before is no more."""
        return self._copy(name, (self._turn, value), self._turn + 1)

    def replaced(self, name: str, value: T) -> OrderedTrie[T]:
        """With this value in the place of the one of its name. KeyError where there is none."""
        entry = _entry(self._root, name)
        if entry is None:
            raise KeyError(name)
        return self._copy(name, (entry[0], value), self._turn)

    def _copy(self, name: str, entry: tuple[int, T], turn: int) -> OrderedTrie[T]:
        table: OrderedTrie[T] = OrderedTrie()
        table._root, grown = _with(self._root, name, crc32(name.encode()), entry, 0)
        table._size, table._turn, table._ordered = self._size + grown, turn, None
        return table


def _entry(part: _Part[T], name: str) -> tuple[int, T] | None:
    key = crc32(name.encode())
    while isinstance(part, tuple):
        part, key = part[key % BRANCHES], key >> BITS
    return part.get(name)


def _with(part: _Part[T], name: str, key: int, entry: tuple[int, T], used: int) -> tuple[_Part[T], bool]:
    """A part with this entry in it, and whether it has one more. `used`: how many bits of the hash led here."""
    if isinstance(part, tuple):
        place = key % BRANCHES
        changed, grown = _with(part[place], name, key >> BITS, entry, used + BITS)
        return (*part[:place], changed, *part[place + 1 :]), grown
    leaf = {**part, name: entry}
    if len(leaf) <= LEAF or used >= HASH_BITS:
        return leaf, len(leaf) > len(part)
    parts = [_Leaf[T]() for _ in range(BRANCHES)]
    for other, kept in leaf.items():
        parts[crc32(other.encode()) >> used & BRANCHES - 1][other] = kept
    return tuple(parts), len(leaf) > len(part)


def _entries(part: _Part[T]) -> Iterator[tuple[int, T]]:
    if isinstance(part, tuple):
        for one in part:
            yield from _entries(one)
    else:
        yield from part.values()
