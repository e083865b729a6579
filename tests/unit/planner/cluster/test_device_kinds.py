"""Orders in which ranks may be of some kinds."""

from __future__ import annotations

from itertools import permutations

import pytest

from tllm.planner.cluster.device_kinds import devices_for, orders_of


@pytest.mark.parametrize("counts", [(1,), (1, 2), (0, 2, 2), (1, 1, 1, 1)])
def test_few_orders_are_all_looked_at(counts: tuple[int, ...]) -> None:
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    orders, everything = orders_of(counts, 24)
    assert everything and len(orders) == len(set(orders)) and set(orders) == set(permutations(kinds))


def test_of_many_each_kind_leads_once() -> None:
    assert orders_of((2, 0, 2), 5) == ([(0, 0, 2, 2), (2, 0, 0, 2)], False)


def test_no_device_is_taken_twice() -> None:
    assert devices_for([[3, 1], [0], [2, 4]], (2, 0, 2, 1, 0)) == (2, 3, 4, 0, 1)
