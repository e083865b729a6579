"""The addresses of all ranks of an epoch, as every node is sent them: whole once, and later only what has changed.

The table has n addresses and goes to n nodes, so each byte of an address counts n times n. The table is therefore
packed, once for all nodes, and a node that has an earlier table is sent the runs of ranks whose addresses are in that
one, and the addresses that are new.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice

import msgspec

from tllm.cluster.messages import MEMBER_BYTES, Assign, RankAddress, RankAddresses
from tllm.core.errors import UNREADABLE, ClusterError

NEW = -1


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A table as runs of (first rank before, count), or (NEW, count) of the next `new` addresses."""

    runs: tuple[tuple[int, int], ...]
    new: tuple[tuple[str, str, int, int], ...]


_decoder = msgspec.msgpack.Decoder(_Packed)


def pack_addresses(before: Sequence[RankAddress], now: Sequence[RankAddress]) -> bytes:
    """A table, for those who know the one before."""
    known = {address: rank for rank, address in enumerate(before)}
    runs: list[tuple[int, int]] = []
    for address in now:
        rank = known.get(address, NEW)
        first, count = runs[-1] if runs else (0, 0)
        if count and (rank == first == NEW or (first != NEW and rank == first + count)):
            runs[-1] = first, count + 1
        else:
            runs.append((rank, 1))
    new = tuple((added.node, added.host, added.port, added.lends) for added in now if added not in known)
    return zlib.compress(msgspec.msgpack.encode(_Packed(tuple(runs), new)))


def unpack_addresses(before: Sequence[RankAddress], packed: bytes) -> tuple[RankAddress, ...]:
    """The table that `pack_addresses` packed. ClusterError for what it did not pack for those who know this one."""
    unpacking = zlib.decompressobj()
    try:
        found = _decoder.decode(unpacking.decompress(packed, MEMBER_BYTES))
    except (zlib.error, *UNREADABLE) as error:
        raise ClusterError(f"{len(packed)} bytes are no table of ranks: {error}") from error
    new, addresses = iter(found.new), list[RankAddress]()
    for first, count in found.runs:
        if first == NEW:
            added = [RankAddress(*address) for address in islice(new, max(count, 0))]
        else:
            added = list(before[max(first, 0) : max(first, 0) + max(count, 0)])
        if len(added) != count:
            raise ClusterError(f"a table of ranks takes {count} addresses from rank {first} on, where {len(added)} are")
        addresses += added
    return tuple(addresses)


class KnownRankAddresses:
    """The addresses that one coordinator has sent a node, over one channel."""

    def __init__(self) -> None:
        self._epoch = 0
        self._addresses: tuple[RankAddress, ...] = ()

    def take(self, message: RankAddresses) -> None:
        """ClusterError where it does not follow from what was told before."""
        if message.since != self._epoch:
            raise ClusterError(f"addresses since epoch {message.since} were sent, and known are those of {self._epoch}")
        self._addresses, self._epoch = unpack_addresses(self._addresses, message.packed), message.epoch

    def complete(self, assign: Assign) -> Assign:
        """An assignment with its addresses. ClusterError where they were not sent."""
        if assign.places:
            return assign
        if assign.epoch != self._epoch:
            raise ClusterError(f"where the ranks of epoch {assign.epoch} are was not told, only of {self._epoch}")
        return msgspec.structs.replace(assign, places=self._addresses)
