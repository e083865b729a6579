"""Two ranks that meet again and again."""

from __future__ import annotations

import time

from tests.support.ranks import run_ranks
from tllm.comm.group import Group, local_groups
from tllm.node.meetings import FEW, MANY, Met, _long, measure_sums


def test_both_end_together_though_one_has_less_time() -> None:
    """Each must leave after the same sum, or the other would wait for ever."""

    def one(group: Group) -> Met:
        time.sleep(0.05 * group.rank)
        return measure_sums(group, 0.1 + 0.1 * group.rank)

    found = run_ranks(local_groups(2, deadline=20.0), one)
    assert all(met.brief > 0 for met in found)
    assert len(found) == 2 and all(
        min(met.turn, met.work, met.sum) > 0 and met.rate > 0 and met.effort >= 0 for met in found
    )


def test_a_long_sum_is_as_long_as_its_time_allows_and_alike_on_both() -> None:
    def numbers(group: Group) -> list[int]:
        return [len(_long(group, seconds)) for seconds in (0.0, 1e3)]

    assert run_ranks(local_groups(2, deadline=20.0), numbers) == [[FEW, MANY]] * 2
