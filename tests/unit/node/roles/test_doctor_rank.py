"""Ways measured over real links with TLS, and over links of which the test knows everything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from tests.unit.node.visits import visit
from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.messages import Assign, RankAddress
from tllm.cluster.settings import DoctorSettings
from tllm.cluster.tls import data_server
from tllm.comm.links.connect import LinkHello, Listener, connect
from tllm.comm.links.link import Link, LocalLink
from tllm.core.errors import LinkError
from tllm.node.doctor.network_rules import of_paths
from tllm.node.machine.machine_facts import NetworkPath
from tllm.node.roles import doctor_rank
from tllm.node.roles.doctor_rank import (
    REQUEST,
    TILE_BYTES,
    TIME,
    DoctorRank,
    LargePacketsLost,
    _bandwidth,
    _pings,
    _Trip,
    all_wires,
    answer,
    connect_all,
    measure_path,
)
from tllm.spec.plan import Plan, Wire

SECONDS = SOON = 0.3


@pytest.mark.parametrize("rate", [1e5, 1.17e7, 1.2e8, 1e10])
def test_a_rate_is_found_from_modem_to_memory(rate: float) -> None:
    """A connection that carries `rate`, after a round trip; the first question is four times slower."""
    asked: list[int] = []

    def question(tiles: int) -> _Trip:
        asked.append(tiles)
        return _Trip(0.0, 0.0, 0.01 + tiles * TILE_BYTES / rate * (4 if len(asked) == 1 else 1))

    found = _bandwidth(question, 0.01, 1.0)  # type: ignore[arg-type]
    assert found >= rate / 4.001
    assert len(asked) == 1 or found == pytest.approx(rate)
    longer = asked if len(asked) < 3 else asked[:-2]
    assert longer == sorted(set(longer)) and set(asked[len(longer) :]) <= {longer[-1]}, "longer ones, the last thrice"
    assert sum(asked) * TILE_BYTES / rate < 1.5 or len(asked) == 1


def test_as_many_questions_as_there_is_time_for() -> None:
    assert _pings(1e-5, 1.0) == 200
    assert _pings(0.1, 1.0) == 10
    assert _pings(5.0, 1.0) == 5


def test_a_clock_that_is_ahead_and_a_count_of_everything_sent() -> None:
    ask, back = LocalLink(0, 1), LocalLink(1, 0)
    seen: list[int] = []

    def ahead() -> None:
        try:
            while True:
                seen.append(REQUEST.unpack(ask.recv_bytes(REQUEST.size))[0])
                for _ in range(seen[-1]):
                    ask._take("a tile")
                back.send_bytes(TIME.pack(time.time() + 1000))
        except LinkError:
            return

    thread = threading.Thread(target=ahead)
    thread.start()
    found = measure_path(ask, back, "127.0.0.1", SECONDS)
    ask.close()
    thread.join()
    assert found.offset == pytest.approx(1000, abs=50)
    assert found.bandwidth > 0
    assert ask.bytes_moved == sum(seen) * TILE_BYTES + len(seen) * REQUEST.size
    assert sum(1 for tiles in seen if tiles == 0) >= 7


def test_a_path_that_loses_all_large_packets_is_told_by_its_short_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tllm.node.roles.doctor_rank.path_mtu", lambda host: 1500)
    ask, back = LocalLink(0, 1), LocalLink(1, 0)

    def not_for_long(*measured: Any) -> float:
        back.set_deadline(0.1)
        return _bandwidth(*measured)

    monkeypatch.setattr("tllm.node.roles.doctor_rank._bandwidth", not_for_long)

    def answers_short_ones() -> None:
        while REQUEST.unpack(ask.recv_bytes(REQUEST.size))[0] == 0:
            back.send_bytes(TIME.pack(time.time()))

    thread = threading.Thread(target=answers_short_ones)
    thread.start()
    with pytest.raises(LargePacketsLost, match=r"of 256 KiB, in packets of 1500 bytes: large") as raised:
        measure_path(ask, back, "127.0.0.1", SECONDS)
    thread.join()
    path = NetworkPath(source="a", target="b", fault=raised.value.message, advice=raised.value.hint)
    (found,) = of_paths(msgspec.structs.replace(visit("ab"), ways=(path,)))
    assert "mtu 1280" in found.advice


@pytest.fixture
def nodes() -> Iterator[tuple[list[Identity], list[Listener]]]:
    """Three nodes of one cluster, as each would be in a process of its own."""
    authority = Authority.create()
    identities = [authority.identity(name) for name in "abc"]
    listeners = [Listener("127.0.0.1", 0, data_server(identity)) for identity in identities]
    yield identities, listeners
    for listener in listeners:
        listener.close()


def assign(rank: int, listeners: list[Listener]) -> Assign:
    return Assign(
        cluster="c",
        epoch=1,
        rank=rank,
        plan=Plan.parse("pp=3", 3),
        places=tuple(RankAddress(name, *listener.address) for name, listener in zip("abc", listeners, strict=True)),
        config="{}",
        settings=DoctorSettings(measure_seconds=SECONDS, way_seconds=SECONDS, threads=0, link_seconds=20.0),
        folder="",
        files=(),
    )


def test_three_nodes_measure_each_other(nodes: tuple[list[Identity], list[Listener]]) -> None:
    identities, listeners = nodes

    def make(rank: int) -> DoctorRank:
        return DoctorRank(assign(rank, listeners), identities[rank], listeners[rank], lambda *_: b"")

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(make, range(3)))
        # All at once, both directions of each pair too: questions and answers do not meet.
        ways = list(pool.map(lambda pair: ranks[pair[0]].path_to(pair[1]), [(0, 1), (1, 2), (2, 0), (1, 0), (0, 2)]))
    for rank in ranks:
        rank.close()
    assert [(way.source, way.target) for way in ways] == [("a", "b"), ("b", "c"), ("c", "a"), ("b", "a"), ("a", "c")]
    for way in ways:
        assert way.measured is not None, way.fault
        assert way.measured.round_trip > 0
        assert way.measured.bandwidth > 0
        assert abs(way.measured.offset) < 1
    lost = ranks[0].path_to(1)
    assert lost.measured is None, "its wires are closed"
    assert lost.fault


def wait_in_vain(monkeypatch: pytest.MonkeyPatch, dialled: Collection[int], dialling: Collection[int]) -> None:
    """Links to and from these ranks, which cannot open, are given up soon; others have the time that was given."""

    def dial(address: Any, context: Any, hello: LinkHello, seconds: float, check: Any) -> Link:
        return connect(address, context, hello, SOON if hello.target in dialled else seconds, check)

    def accept(listener: Listener, wire: Wire, seconds: float, take: Any = Listener.accept) -> Link:
        link: Link = take(listener, wire, SOON if wire.source in dialling else seconds)
        return link

    monkeypatch.setattr(doctor_rank, "connect", dial)
    monkeypatch.setattr(Listener, "accept", accept)


def test_a_node_that_nobody_reaches_is_found_and_the_others_are_measured(
    nodes: tuple[list[Identity], list[Listener]], monkeypatch: pytest.MonkeyPatch
) -> None:
    identities, listeners = nodes
    listeners[2].close()
    wait_in_vain(monkeypatch, {2}, {2})
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda r: connect_all(assign(r, listeners), identities[r], listeners[r]), range(2)))
    for rank, (links, faults) in enumerate(found):
        mine = {wire for wire in all_wires(3) if rank in (wire.source, wire.target)}
        assert set(links) | set(faults) == mine
        assert set(faults) == {wire for wire in mine if 2 in (wire.source, wire.target)}
        for link in links.values():
            link.close()


def test_one_who_is_not_who_the_plan_says(
    nodes: tuple[list[Identity], list[Listener]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another cluster's node at an address of ours: a fault in words, not an end."""
    identities, listeners = nodes
    wait_in_vain(monkeypatch, {2}, {1, 2})
    stranger = Authority.create().identity("b")
    with contextlib.closing(Listener("127.0.0.1", 0, data_server(stranger))) as other:
        listeners = [listeners[0], other, listeners[2]]
        _, faults = connect_all(assign(0, listeners), identities[0], listeners[0])
    assert "do not trust each other" in next(text for wire, text in faults.items() if wire.target == 1)


def test_answers_end_with_the_other_end() -> None:
    ask, back = LocalLink(0, 1), LocalLink(1, 0)
    thread = threading.Thread(target=answer, args=(ask, back))
    thread.start()
    ask.close()
    thread.join(20)
    assert not thread.is_alive()
