"""`RankAddressUpdates`: sends each node the addresses of all ranks of an epoch, and only those it does not know yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tllm.cluster.channel import Channel
from tllm.cluster.messages import RankAddress, RankAddresses
from tllm.node.roles.rank_addresses import pack_addresses

UNDER_WAY = 64
"""Tables that are being sent at the same time: those of all nodes at once would not fit in memory."""


class _Table(NamedTuple):
    epoch: int
    places: tuple[RankAddress, ...]


class RankAddressUpdates:
    """What was written to a channel counts as known, as a channel brings messages in order or breaks."""

    def __init__(self) -> None:
        self._now = _Table(0, ())
        self._told: WeakKeyDictionary[Channel, _Table] = WeakKeyDictionary()
        self._packed: dict[int, RankAddresses] = {}  # by the epoch of the table that is known
        self._under_way = asyncio.Semaphore(UNDER_WAY)

    def begin(self, epoch: int, places: Sequence[RankAddress]) -> None:
        """A new epoch begins, whose ranks have these addresses."""
        self._now = _Table(epoch, tuple(places))
        self._packed.clear()

    async def tell(self, channel: Channel) -> None:
        """Send the node at the other end what it does not know of the present epoch."""
        async with self._under_way:
            before, now = self._told.get(channel, _Table(0, ())), self._now
            if before.epoch == now.epoch:
                return
            if before.epoch not in self._packed:
                packed = pack_addresses(before.places, now.places)
                self._packed[before.epoch] = RankAddresses(now.epoch, before.epoch, packed)
            self._told[channel] = now
            await channel.send(self._packed[before.epoch])
