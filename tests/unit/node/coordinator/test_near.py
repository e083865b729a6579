"""How far nodes are from each other, and that bytes of weights come the near way."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from tllm.cluster.certificates import COORDINATOR
from tllm.node.coordinator.chunk_registry import PATIENCE_SECONDS, SOME_BYTES, ChunkRegistry, Far, far_by
from tllm.planner.measured.survey import Survey, SurveyedNode, SurveyedPath

MACHINES = {"a": "one", "b": "two", "c": "two", "d": "three", COORDINATOR: "one"}
FAST, SLOW = 1e9, 1e6
CHUNKS = [bytes([i]) * 32 for i in range(40)]


def survey_of(**bandwidths: float) -> Survey:
    """Of a, b and d; `bd`: bytes per second from b to d, FAST where it is not given."""
    names = "abd"
    nodes = tuple(
        SurveyedNode(node=n, host_name=MACHINES[n], cores=1, threads=1, busy=1.0, memory_bytes=1, layers=(), logits=())
        for n in names
    )
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    ways = tuple(SurveyedPath(i, j, 1e-3, bandwidths.get(names[i] + names[j], FAST)) for i, j in pairs)
    return Survey(model="m", goal="serve", dtype="float32", nodes=nodes, paths=ways)


def test_nothing_is_nearer_than_ones_own_machine_and_what_is_not_known_is_the_farthest() -> None:
    far = far_by(MACHINES, survey_of(ab=SLOW))
    assert far("b", "c") == 0 < far("a", "b") < far("b", "a") < far("b", "stranger") == math.inf
    assert far("b", "a") == pytest.approx(1e-3 + SOME_BYTES / SLOW), "the way of the bytes, from a to b"
    assert far("c", "a") == far("b", "a"), "which is not in the survey, and its machine is"
    assert far("d", COORDINATOR) == far("d", "a"), "as far as its machine"
    blind = far_by(MACHINES, None)
    assert blind("b", "c") == 0 and blind("b", "a") == blind("b", "d") == math.inf


def deal(far: Far, wanting: str, holders: list[str]) -> Counter[str]:
    """Bytes that one node takes from each of several that all have everything."""
    catalogue = ChunkRegistry(far=far)
    for holder in holders:
        catalogue.holds(holder, CHUNKS)
    for digest in CHUNKS:
        source = catalogue.source(wanting, digest, 0.0)
        assert source
        catalogue.came(wanting, digest, 10, source, True)
    return Counter({source: count for (_, source), count in catalogue.brought.items()})


def test_bytes_come_the_near_way_and_equals_share_the_giving() -> None:
    by = survey_of(ad=SLOW)
    assert deal(far_by(MACHINES, by), "d", ["a", "b"]) == {"b": 400}
    assert deal(far_by(MACHINES, by), "d", ["a"]) == {"a": 400}, "a far one is better than none"
    assert deal(far_by(MACHINES, survey_of(ad=FAST / 1.2)), "d", ["a", "b"]) == {"a": 200, "b": 200}
    assert deal(far_by(MACHINES, None), "d", ["a", "b"]) == {"a": 200, "b": 200}
    assert deal(far_by(MACHINES, by), "c", ["a", "b", "d"]) == {"b": 400}, "the same machine"


def test_of_those_with_the_files_the_near_one_is_read() -> None:
    for slow, source in (("bd", COORDINATOR), ("ad", "b")):
        catalogue = ChunkRegistry(far=far_by(MACHINES, survey_of(**{slow: SLOW})))
        catalogue.holds("b", [], files=True)
        assert {catalogue.source("d", digest, 0.0) for digest in CHUNKS} == {source}


def test_who_lies_or_cannot_be_reached_is_near_to_nobody() -> None:
    catalogue = ChunkRegistry(far=far_by(MACHINES, survey_of(ad=SLOW)))
    for holder in "ab":
        catalogue.holds(holder, CHUNKS)
    assert catalogue.source("d", CHUNKS[0], 0.0) == "b"
    catalogue.failed("d", CHUNKS[0], "b", "broke")
    assert catalogue.source("d", CHUNKS[0], 0.0) == "a"


@pytest.mark.parametrize("seed", range(10))
def test_a_wide_link_is_crossed_once_by_each_chunk(seed: int) -> None:
    """Two machines of three nodes that all want all at once: what came over is waited for, and passed on within."""
    chance = random.Random(seed)
    machines = {f"{m}{i}": m for m in "xyz" for i in range(3)} | {COORDINATOR: "x"}
    catalogue, crossed = ChunkRegistry(far=far_by(machines, None)), Counter[tuple[bytes, str]]()
    given = Counter[bytes]()
    lacking = [(node, digest) for digest in CHUNKS for node in machines if node != COORDINATOR]
    under_way: list[tuple[str, bytes, str]] = []
    while lacking or under_way:
        if lacking and chance.random() < 0.6:
            node, digest = lacking.pop(chance.randrange(len(lacking)))
            if (source := catalogue.source(node, digest, 0.0)) is None:
                lacking.append((node, digest))
                continue
            assert source
            under_way.append((node, digest, source))
        elif under_way:
            node, digest, source = under_way.pop(chance.randrange(len(under_way)))
            catalogue.came(node, digest, 1, source, True)
            crossed[digest, machines[node]] += machines[node] != machines[source]
            given[digest] += source == COORDINATOR
    assert set(given.values()) == {1}
    assert {crossed[digest, machine] for digest in CHUNKS for machine in "yz"} == {1}
    assert {crossed[digest, "x"] for digest in CHUNKS} <= {0, 1}, "where the coordinator is, which gives each once"


def test_one_of_a_machine_waits_for_another_and_not_when_it_is_gone() -> None:
    catalogue = ChunkRegistry(far=far_by({"a": "one", "b": "two", "c": "two", "d": "three"}, None))
    catalogue.holds("a", CHUNKS)
    assert catalogue.source("b", CHUNKS[0], 0.0) == "a"
    assert catalogue.source("c", CHUNKS[0], 1.0) is None
    assert catalogue.source("d", CHUNKS[0], 1.0) == "a", "b is no nearer to it"
    assert catalogue.source("c", CHUNKS[0], PATIENCE_SECONDS + 1) == "a"
    assert catalogue.source("c", CHUNKS[1], 0.0) == "a"
    assert catalogue.source("b", CHUNKS[1], 0.0) is None
    catalogue.forget("c")
    assert catalogue.source("b", CHUNKS[1], 0.0) == "a"
