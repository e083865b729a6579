"""Tables of where ranks live: what comes out is what went in, whatever was known before."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.node.test_worker import TRAIN, assign
from tllm.cluster.messages import MEMBER_BYTES, RankAddress, RankAddresses
from tllm.core.errors import ClusterError
from tllm.node.roles.rank_addresses import KnownRankAddresses, pack_addresses, unpack_addresses


def table(*numbers: int) -> tuple[RankAddress, ...]:
    return tuple(
        RankAddress(f"node-{n:05d}", f"10.0.{n // 256}.{n % 256}", 40000 + n % 999, 30000 + n % 99) for n in numbers
    )


def of(packed: object) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(packed))


tables = st.lists(st.integers(0, 20), unique=True, max_size=12).map(lambda numbers: table(*numbers))


@given(tables, tables)
def test_any_table_follows_from_any_other(before: tuple[RankAddress, ...], now: tuple[RankAddress, ...]) -> None:
    assert unpack_addresses(before, pack_addresses(before, now)) == now


def test_a_lost_node_takes_some_bytes_and_not_a_table() -> None:
    everybody = table(*range(10_000))
    assert len(pack_addresses((), everybody)) < 15 * len(everybody)
    assert len(pack_addresses(everybody, everybody[:777] + everybody[778:])) < 40
    moved = everybody[:16] + table(20_000) + everybody[17:]
    assert len(pack_addresses(everybody, moved)) < 100
    assert unpack_addresses(everybody, pack_addresses(everybody, moved)) == moved


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"", "0 bytes are no table"),
        (b"\x01\x02", "2 bytes are no table"),
        (zlib.compress(b"\xc1"), "are no table"),
        (zlib.compress(msgspec.msgpack.encode(((1, 2),))), "are no table"),
        (
            zlib.compress(msgspec.msgpack.encode((((-1, 2),), (("a", "h", 1, 0),)))),
            "takes 2 addresses from rank -1 on, .* 1",
        ),
        (zlib.compress(msgspec.msgpack.encode((((1, 5),), ()))), "takes 5 addresses from rank 1 on, where 2 are"),
        (zlib.compress(msgspec.msgpack.encode((((1, -5),), ()))), "takes -5 addresses"),
        (zlib.compress(bytes(MEMBER_BYTES + 1)), "are no table"),
    ],
)
def test_what_is_no_table_is_refused(packed: bytes, why: str) -> None:
    with pytest.raises(ClusterError, match=why):
        unpack_addresses(table(1, 2, 3), packed)


def test_a_node_completes_only_what_it_was_told_of() -> None:
    known, one, two = KnownRankAddresses(), table(1, 2), table(2, 3, 4)
    bare = msgspec.structs.replace(assign(TRAIN), epoch=3)
    with pytest.raises(ClusterError, match=r"epoch 3 .* was not told, only of 0"):
        known.complete(bare)
    known.take(RankAddresses(2, 0, pack_addresses((), one)))
    with pytest.raises(ClusterError, match="since epoch 1 were sent, and known are those of 2"):
        known.take(RankAddresses(3, 1, pack_addresses(one, two)))
    known.take(RankAddresses(3, 2, pack_addresses(one, two)))
    assert known.complete(bare).places == two
    full = msgspec.structs.replace(bare, places=one)
    assert known.complete(full) is full
