"""Where all ranks live, told to every node of an epoch: whole once, and from then on only what has changed.

The table has n places and goes to n nodes, so what it takes of each place counts n times n: it is packed, once for all
nodes, and a node that knows the table before is sent the runs of ranks which moved and the places that are new.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice

import msgspec

from tllm.cluster.messages import MEMBER_BYTES, Assign, Places, RankAddress
from tllm.core.errors import UNREADABLE, ClusterError

NEW = -1


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A table as runs of (first rank before, count), or (NEW, count) of the next `new` places."""

    runs: tuple[tuple[int, int], ...]
    new: tuple[tuple[str, str, int, int], ...]


_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_places(before: Sequence[RankAddress], now: Sequence[RankAddress]) -> bytes:
    """A table, for those who know the one before."""
    known = {place: rank for rank, place in enumerate(before)}
    runs: list[tuple[int, int]] = []
    for place in now:
        rank = known.get(place, NEW)
        first, count = runs[-1] if runs else (0, 0)
        if count and (rank == first == NEW or (first != NEW and rank == first + count)):
            runs[-1] = first, count + 1
        else:
            runs.append((rank, 1))
    new = tuple((place.node, place.host, place.port, place.lends) for place in now if place not in known)
    return zlib.compress(msgspec.msgpack.encode(_Packed(tuple(runs), new)))


def unpack_places(before: Sequence[RankAddress], packed: bytes) -> tuple[RankAddress, ...]:
    """The table that `pack_places` packed. ClusterError for what it did not pack for those who know this one."""
    unpacking = zlib.decompressobj()
    try:
        found = _decoder.decode(unpacking.decompress(packed, MEMBER_BYTES))
    except (zlib.error, *UNREADABLE) as error:
        raise ClusterError(f"{len(packed)} bytes are no table of ranks: {error}") from error
    new, places = iter(found.new), list[RankAddress]()
    for first, count in found.runs:
        if first == NEW:
            added = [RankAddress(*place) for place in islice(new, max(count, 0))]
        else:
            added = list(before[max(first, 0) : max(first, 0) + max(count, 0)])
        if len(added) != count:
            raise ClusterError(f"a table of ranks takes {count} places from rank {first} on, where {len(added)} are")
        places += added
    return tuple(places)


class KnownPlaces:
    """What a node was told of ranks by one coordinator, over one channel."""

    def __init__(self) -> None:
        self._epoch = 0
        self._places: tuple[RankAddress, ...] = ()

    def take(self, message: Places) -> None:
        """ClusterError where it does not follow from what was told before."""
        if message.since != self._epoch:
            raise ClusterError(f"places since epoch {message.since} were sent, and known are those of {self._epoch}")
        self._places, self._epoch = unpack_places(self._places, message.packed), message.epoch

    def complete(self, assign: Assign) -> Assign:
        """An assignment with its places. ClusterError where they were not told."""
        if assign.places:
            return assign
        if assign.epoch != self._epoch:
            raise ClusterError(f"where the ranks of epoch {assign.epoch} are was not told, only of {self._epoch}")
        return msgspec.structs.replace(assign, places=self._places)
