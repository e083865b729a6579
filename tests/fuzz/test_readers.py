"""Any bytes whatever: what reads frames, hellos, messages and tokens takes what it should and refuses the rest."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster import fuzz_readers as fuzz
from tests.support.cluster.fuzz_readers import Target, corpora, twisted
from tests.support.properties import examples

KIB = 1024
MOST_BYTES = 256 * KIB
"""That reading may take at once: a few times the largest message from a guest, far below what a lie may declare."""

TARGETS = pytest.mark.parametrize("target", corpora, ids=lambda target: target.__name__)


@pytest.fixture(autouse=True, scope="module")
def loops() -> Iterator[None]:
    yield
    fuzz.close_loops()


@TARGETS
def test_good_ones_are_taken(target: Target) -> None:
    for data in corpora[target]:
        target(data)


@TARGETS
@settings(max_examples=examples(200))
@given(data=st.data())
def test_any_bytes(target: Target, data: st.DataObject) -> None:
    good = st.sampled_from(corpora[target])
    cut = good.flatmap(lambda whole: st.integers(0, len(whole)).map(lambda at: whole[:at]))
    target(data.draw(st.one_of(st.binary(max_size=300), cut, st.builds(bytes.__add__, cut, st.binary(max_size=100)))))


@TARGETS
def test_twisted_ones(target: Target) -> None:
    dice = random.Random(f"twisted {target.__name__}")
    tracemalloc.start()
    try:
        for number in range(1000):
            data = twisted(dice, corpora[target])
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target(data)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert taken < MOST_BYTES, f"{taken} bytes were taken for {data.hex()}, number {number}"
    finally:
        tracemalloc.stop()
