"""Two ranks that meet again and again."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from tests.support.comm.ranks import run_ranks
from tests.support.own_clock import OwnClock
from tllm.comm.collectives.group import Group, local_groups
from tllm.devices.choose import CPU
from tllm.node.roles import sum_latency
from tllm.node.roles.sum_latency import (
    FEW,
    LONGEST,
    MANY,
    RESTS,
    Met,
    _as_long_as,
    _long,
    _rate_after_rest,
    measure_sums,
)
from tllm.parallel.collectives import sum_in_memory


def test_both_end_together_though_one_has_less_time() -> None:
    """Each must leave after the same sum, or the other would wait for ever."""

    def one(group: Group) -> Met:
        time.sleep(0.05 * group.rank)
        return measure_sums(group, 0.1 + 0.1 * group.rank, rests=True)

    found = run_ranks(local_groups(2, deadline=20.0), one)
    assert all(met.brief > 0 for met in found)
    assert len(found) == 2 and all(
        min(met.turn, met.work, met.sum) > 0 and met.rate > 0 and met.effort >= 0 for met in found
    )


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_sums_of_one_machine_are_told_from_those_by_links(hosts: tuple[str, str]) -> None:
    """A survey must not take the memory's rate for that of what still goes by links."""

    def one(group: Group) -> Met:
        sum_in_memory(group, hosts, True, 20.0)
        return measure_sums(group, 0.1)

    assert [met.by_links for met in run_ranks(local_groups(2, deadline=20.0), one)] == [hosts == ("a", "b")] * 2


def test_a_long_sum_is_as_long_as_its_time_allows_and_alike_on_both() -> None:
    def numbers(group: Group) -> list[int]:
        return [len(_long(group, seconds, CPU)) for seconds in (0.0, 1e3)]

    assert run_ranks(local_groups(2, deadline=20.0), numbers) == [[FEW, MANY]] * 2


def test_a_sum_after_a_rest_is_as_long_as_the_slower_rank_allows() -> None:
    def numbers(group: Group) -> list[int]:
        taken = 0.1 + 0.1 * group.rank
        return [_as_long_as(group, seconds, 1000, taken) for seconds in (0.1, 2.0, 1e9)]

    assert run_ranks(local_groups(2, deadline=20.0), numbers) == [[1000, 10_000, LONGEST]] * 2


def test_neither_a_rest_nor_waiting_for_who_is_late_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a sum of 4 KiB would seem to take a quarter of a second. It takes a few looks at the clock."""
    rests, clock = list[float](), OwnClock()

    def sleep(seconds: float) -> None:
        rests.append(seconds)
        clock.sleep(seconds)

    monkeypatch.setattr(sum_latency, "time", SimpleNamespace(sleep=sleep, perf_counter=clock.now))
    found = run_ranks(local_groups(2, deadline=20.0), lambda group: _rate_after_rest(group, torch.ones(1000), 0.0))
    assert len(rests) == 2 * RESTS and found[0] == found[1] > 4000 / 0.05
