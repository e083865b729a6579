"""Each node is told of the ranks once in an epoch, and only what it does not know."""

from __future__ import annotations

import asyncio

from tests.unit.node.roles.test_rank_addresses import table
from tllm.cluster.messages import RankAddress, RankAddresses
from tllm.node.coordinator.rank_address_updates import UNDER_WAY, RankAddressUpdates
from tllm.node.roles.rank_addresses import unpack_addresses


class Wire:
    """A channel that only sends, and unpacks what was sent as a node does."""

    under_way = most = 0

    def __init__(self) -> None:
        self.sent: list[RankAddresses] = []
        self.known: tuple[RankAddress, ...] = ()

    async def send(self, message: RankAddresses) -> None:
        Wire.under_way += 1
        Wire.most = max(Wire.most, Wire.under_way)
        await asyncio.sleep(0)
        self.sent.append(message)
        self.known = unpack_addresses(self.known, message.packed)
        Wire.under_way -= 1


def test_those_who_know_the_last_epoch_are_told_what_is_new_in_this_one() -> None:
    async def scene() -> None:
        news, old, late = RankAddressUpdates(), Wire(), Wire()
        everybody = table(*range(300))
        news.begin(1, everybody)
        await news.tell(old)  # type: ignore[arg-type]
        await news.tell(old)  # type: ignore[arg-type]
        news.begin(2, everybody[1:])
        for wire in (old, late):
            await news.tell(wire)  # type: ignore[arg-type]
        assert [(told.epoch, told.since) for told in old.sent] == [(1, 0), (2, 1)]
        assert [(told.epoch, told.since) for told in late.sent] == [(2, 0)]
        assert old.known == late.known == everybody[1:]
        assert len(old.sent[1].packed) < len(late.sent[0].packed) / 20

    asyncio.run(scene())


def test_one_table_serves_all_nodes_and_only_some_are_sent_at_once() -> None:
    async def scene() -> None:
        news, wires = RankAddressUpdates(), [Wire() for _ in range(3 * UNDER_WAY)]
        news.begin(1, table(1, 2))
        await asyncio.gather(*(news.tell(wire) for wire in wires))  # type: ignore[arg-type]
        assert len({id(wire.sent[0]) for wire in wires}) == 1
        assert Wire.most == UNDER_WAY

    asyncio.run(scene())
