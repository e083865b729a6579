"""`PlaceNews`: tells each node where the ranks of an epoch live, and only what it does not know yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tllm.cluster.channel import Channel
from tllm.cluster.messages import Places, RankAddress
from tllm.node.roles.rank_places import pack_places

UNDER_WAY = 64
"""Tables that are being sent at the same time: those of all nodes at once would not fit in memory."""


class _Table(NamedTuple):
    epoch: int
    places: tuple[RankAddress, ...]


class PlaceNews:
    """A channel brings messages in order or breaks, so that what was written to it counts as known."""

    def __init__(self) -> None:
        self._now = _Table(0, ())
        self._told: WeakKeyDictionary[Channel, _Table] = WeakKeyDictionary()
        self._packed: dict[int, Places] = {}  # by the epoch of the table that is known
        self._under_way = asyncio.Semaphore(UNDER_WAY)

    def begin(self, epoch: int, places: Sequence[RankAddress]) -> None:
        """The ranks of an epoch live there."""
        self._now = _Table(epoch, tuple(places))
        self._packed.clear()

    async def tell(self, channel: Channel) -> None:
        """Let the node at the other end know."""
        async with self._under_way:
            before, now = self._told.get(channel, _Table(0, ())), self._now
            if before.epoch == now.epoch:
                return
            if before.epoch not in self._packed:
                packed = pack_places(before.places, now.places)
                self._packed[before.epoch] = Places(now.epoch, before.epoch, packed)
            self._told[channel] = now
            await channel.send(self._packed[before.epoch])
