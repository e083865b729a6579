"""The global order: permutations that are permutations, mixtures in proportion, numbers equal on every machine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tllm.core.errors import ConfigError
from tllm.training.data.row_order import PERIOD, Permutation, order_of
from tllm.training.data.seeds import key_for, seed_for


@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_a_permutation_is_one(size: int, key: int) -> None:
    shuffled = Permutation(size, key)
    assert sorted(shuffled[i] for i in range(size)) == list(range(size))


def test_a_permutation_of_very_many_needs_no_list() -> None:
    shuffled = Permutation(10**15 + 7, 3)
    found = [shuffled[i] for i in range(1000)]
    assert len(set(found)) == 1000
    assert max(found) < 10**15 + 7
    assert sum(found) / len(found) == pytest.approx(0.5e15, rel=0.1)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 10, 64])
def test_every_row_may_come_anywhere(size: int) -> None:
    """Over many keys, the place of a row is even: chi-squared within 5 standard deviations."""
    trials = 400 * size
    for index in (0, size - 1):
        counts = Counter(Permutation(size, key_for("trial", key))[index] for key in range(trials))
        chi = sum((counts[i] - 400) ** 2 / 400 for i in range(size))
        assert chi < size - 1 + 5 * (2 * (size - 1)) ** 0.5


def test_neighbours_are_parted() -> None:
    shuffled = Permutation(10_000, key_for("x"))
    together = sum(abs(shuffled[i] - shuffled[i + 1]) == 1 for i in range(9999))
    assert together < 12  # two are expected


def test_numbers_never_change() -> None:
    """A run is resumed by another version and on another machine: these may never come out otherwise."""
    assert key_for("a", 1) == 5981427342772527336
    assert seed_for(1, 2, 3) == 2702094781880281365
    assert [Permutation(10, 5)[i] for i in range(10)] == [5, 0, 2, 4, 1, 7, 6, 9, 8, 3]
    assert [order_of([3, 7], None, 1, True).row(i) for i in range(12)] == [2, 0, 7, 5, 6, 3, 8, 9, 4, 1, 6, 9]
    assert [order_of([3, 7], [2, 1], 1, True).row(i) for i in range(12)] == [0, 1, 3, 2, 1, 6, 0, 2, 9, 2, 7, 0]


def test_seeds_differ_by_each_part() -> None:
    seeds = {seed_for(seed, step, row) for seed in range(8) for step in range(8) for row in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert key_for("1") != key_for(1)
    assert key_for("a", "b") != key_for("ab")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99), st.booleans())
def test_each_row_once_an_epoch(counts: list[int], seed: int, shuffle: bool) -> None:
    order = order_of(counts, None, seed, shuffle)
    total = sum(counts)
    epochs = [[order.row(epoch * total + i) for i in range(total)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(total)) for epoch in epochs)
    if not shuffle:
        assert epochs[0] == list(range(total))
    elif total > 30:
        assert epochs[0] != epochs[1] != epochs[2]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4), st.booleans())
def test_a_mixture_goes_through_each_file_once_before_it_comes_again(
    files: list[tuple[int, int]], shuffle: bool
) -> None:
    counts, weights = [count for count, _ in files], [weight for _, weight in files]
    order = order_of(counts, weights, 7, shuffle)
    taken = [order.row(i) for i in range(sum(weights) * 30)]
    first = 0
    for count, weight in files:
        own = [row for row in taken if first <= row < first + count]
        assert len(own) == 30 * weight
        for at in range(0, len(own) - count + 1, count):
            assert sorted(own[at : at + count]) == list(range(first, first + count))
            assert shuffle or own[at : at + count] == list(range(first, first + count))
        first += count


def test_a_mixture_keeps_its_proportion_in_each_period() -> None:
    order = order_of([1000, 10], [0.7, 0.3], 0, True)
    for period in range(20):
        assert sum(order.row(period * 10 + i) < 1000 for i in range(10)) == 7


def test_a_mixture_of_odd_weights_is_near() -> None:
    order = order_of([5, 5, 5], [3.14159265, 1e-9, 2.71828182], 0, False)
    counts = Counter(order.row(i) // 5 for i in range(PERIOD))
    assert counts[0] / counts[2] == pytest.approx(3.14159265 / 2.71828182, rel=1e-3)
    assert counts[1] == 1


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_cannot_be_mixed(weights: list[float]) -> None:
    with pytest.raises(ConfigError):
        order_of([1, 1], weights, 0, True)
