"""Who fetches what from whom: each chunk leaves where the files lie once, whatever nodes come, go, fail or lie."""

from __future__ import annotations

import random

import pytest

from tllm.cluster.certificates import COORDINATOR
from tllm.node.coordinator.chunk_registry import PATIENCE_SECONDS, ChunkRegistry

A, B = b"a" * 32, b"b" * 32


def test_the_first_brings_it_and_the_others_wait_for_it() -> None:
    catalogue = ChunkRegistry()
    assert catalogue.source("east", A, 0.0) == COORDINATOR
    assert catalogue.source("west", A, 1.0) is None
    assert catalogue.source("west", B, 1.0) == COORDINATOR, "another chunk is another matter"
    catalogue.came("east", A, 10, COORDINATOR, True)
    assert catalogue.source("west", A, 2.0) == "east"
    assert catalogue.source("east", A, 2.0) == "east", "who has it is sent to itself"
    catalogue.came("west", A, 10, "east", True)
    assert {catalogue.source("north", A, 3.0) for _ in range(2)} == {"east", "west"}, "both give their part"
    assert catalogue.brought == {("east", COORDINATOR): 10, ("west", "east"): 10}


def test_one_that_cannot_keep_it_leaves_it_to_the_next() -> None:
    catalogue = ChunkRegistry()
    catalogue.source("east", A, 0.0)
    catalogue.came("east", A, 10, COORDINATOR, False)
    assert catalogue.source("west", A, 1.0) == COORDINATOR


def test_what_nodes_bring_along_is_not_fetched_again() -> None:
    catalogue = ChunkRegistry()
    catalogue.holds("east", [A])
    assert catalogue.source("west", A, 0.0) == "east"
    catalogue.forget("east")
    assert catalogue.source("west", A, 0.0) == COORDINATOR


def test_one_that_found_it_on_its_own_shelf_keeps_nobody_waiting() -> None:
    catalogue = ChunkRegistry()
    assert catalogue.source("east", A, 0.0) == COORDINATOR
    catalogue.holds("east", [A])
    assert catalogue.source("west", A, 0.0) == "east"
    catalogue.failed("west", A, "east", "lacks")
    assert catalogue.source("west", A, 0.0) == COORDINATOR


@pytest.mark.parametrize("end", ["lost", "failed", "over", "too slow"])
def test_nobody_waits_for_one_that_brings_it_no_more(end: str) -> None:
    catalogue = ChunkRegistry()
    catalogue.source("east", A, 0.0)
    assert catalogue.source("west", A, PATIENCE_SECONDS - 1) is None
    if end == "lost":
        catalogue.forget("east")
    if end == "failed":
        catalogue.failed("east", A, COORDINATOR, "broke")
    if end == "over":
        catalogue.begin()
    now = PATIENCE_SECONDS + 1 if end == "too slow" else 1.0
    assert catalogue.source("west", A, now) == COORDINATOR


def test_nodes_with_the_files_share_the_giving() -> None:
    catalogue = ChunkRegistry()
    catalogue.holds("disk", [], files=True)
    sources = [catalogue.source("east", bytes([i]) * 32, 0.0) for i in range(10)]
    assert sources.count(COORDINATOR) == sources.count("disk") == 5
    assert all(catalogue.source("west", bytes([i]) * 32, 0.0) is None for i in range(10)), "from either only once"


def test_a_liar_is_asked_by_nobody_again() -> None:
    catalogue = ChunkRegistry()
    catalogue.holds("liar", [A, B])
    assert catalogue.source("east", A, 0.0) == "liar"
    catalogue.failed("east", A, "liar", "lied")
    assert catalogue.source("east", A, 0.0) == COORDINATOR
    assert catalogue.source("west", B, 0.0) == COORDINATOR
    catalogue.begin()
    catalogue.forget("liar")
    catalogue.holds("liar", [A, B], files=True)
    catalogue.came("east", A, 1, COORDINATOR, False)
    assert catalogue.source("west", A, 0.0) == COORDINATOR, "nor when it comes back"
    assert catalogue.liars == {"liar"}


def test_who_cannot_be_reached_by_one_is_still_asked_by_others() -> None:
    catalogue = ChunkRegistry()
    catalogue.holds("far", [A])
    catalogue.failed("east", A, "far", "broke")
    catalogue.holds("far", [A, B])
    assert catalogue.source("east", B, 0.0) == COORDINATOR
    catalogue.failed("east", B, COORDINATOR, "broke")
    assert catalogue.source("east", B, 0.0) == "", "nobody is left"
    assert catalogue.source("west", A, 0.0) == "far"
    catalogue.begin()
    assert catalogue.source("east", B, 0.0) == "far", "a new epoch is a new try"


def test_what_has_gone_from_a_shelf_says_nothing_of_the_rest() -> None:
    catalogue = ChunkRegistry()
    catalogue.holds("west", [A, B])
    catalogue.failed("east", A, "west", "lacks")
    assert catalogue.source("east", A, 0.0) == COORDINATOR
    assert catalogue.source("east", B, 0.0) == "west"
    catalogue.holds("east", [A])
    assert catalogue.source("east", A, 0.0) == "east"
    catalogue.failed("east", A, "east", "lacks")
    assert catalogue.source("east", A, 0.0) == COORDINATOR, "its own shelf's too"
    catalogue.failed("east", A, COORDINATOR, "lacks")
    assert catalogue.source("east", A, 0.0) == "", "files that cannot be read are not asked for again and again"


@pytest.mark.parametrize("seed", range(20))
def test_random_nodes_get_all_and_the_coordinator_gives_each_once(seed: int) -> None:
    """Nodes with random wishes take random turns, each with several chunks under way; some chunks take long."""
    chance = random.Random(seed)
    catalogue, nodes = ChunkRegistry(), [f"n{i}" for i in range(chance.randint(1, 6))]
    chunks = [bytes([i]) * 32 for i in range(12)]
    wants = {node: chance.sample(chunks, chance.randint(1, 12)) for node in nodes}
    under_way: list[tuple[str, bytes, str]] = []
    given: list[bytes] = []
    for _ in range(5000):
        node = chance.choice(nodes)
        busy = {digest for other, digest, _ in under_way if other == node}
        free = [digest for digest in wants[node] if digest not in busy]
        if free and len(busy) < 4 and chance.random() < 0.7:
            digest = chance.choice(free)
            source = catalogue.source(node, digest, 0.0)
            assert source != ""
            if source is not None:
                given += [digest] if source == COORDINATOR else []
                under_way.append((node, digest, source))
        elif under_way:
            node, digest, source = under_way.pop(chance.randrange(len(under_way)))
            catalogue.came(node, digest, 1, source, True)
            wants[node].remove(digest)
    assert not any(wants.values()), "nobody waits for ever"
    assert len(given) == len(set(given))
