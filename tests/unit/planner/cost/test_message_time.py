"""Ranks that work and sum in turn, against clocks that are played one turn after another."""

from __future__ import annotations

import pytest

from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cost.message_time import (
    TimeBreakdown,
    all_reduce_time,
    compute_and_all_reduce_time,
    measured_sync_overhead,
)

WAYS = (0.0, 1e-3, 5e-3, 20e-3)
WORKS = ((3e-3, 3e-3), (1e-3, 4e-3), (9e-3, 1e-3), (2e-3, 8e-3, 5e-3), (4e-3, 1e-3, 1e-3, 4e-3))


def played(works: tuple[float, ...], way: float, turns: int = 4000) -> float:
    """Seconds of a turn: each rank goes on when it has every other's message, sent when that one's work was done."""
    clocks = [0.0] * len(works)
    for _ in range(turns):
        done = [clock + work for clock, work in zip(clocks, works, strict=True)]
        clocks = [
            max(at + (way if other != rank else 0.0) for other, at in enumerate(done)) for rank in range(len(done))
        ]
    return max(clocks) / turns


@pytest.mark.parametrize("works", WORKS)
@pytest.mark.parametrize("way", WAYS)
def test_a_turn_takes_what_clocks_show(works: tuple[float, ...], way: float) -> None:
    """Exactly, but for the first turns, in which nobody has waited yet."""
    found = compute_and_all_reduce_time([TimeBreakdown(memory=work) for work in works], TimeBreakdown(latency=way), 0.0)
    assert found.seconds == pytest.approx(played(works, way), rel=2e-3)


@pytest.mark.parametrize("works", [one for one in WORKS if len(one) == 2])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_lost_is_found_again(works: tuple[float, float], way: float) -> None:
    """What a survey takes out of a turn is what a prediction puts in, for ranks that are alike and for unlike ones."""
    lost, link = 7e-4, LinkSpeed(latency=way, sync_overhead=7e-4)
    turn = compute_and_all_reduce_time(
        [TimeBreakdown(memory=work) for work in works], all_reduce_time(2, 4096, link), lost
    ).seconds
    assert turn == pytest.approx(max(*works, sum(works) / 2 + way) + lost)
    assert measured_sync_overhead(turn, works, way, way) == pytest.approx(lost)
    assert measured_sync_overhead(turn, works, way, way + 2 * lost) == pytest.approx(2 * lost), (
        "work makes no sum shorter"
    )
    assert measured_sync_overhead(0.9 * max(works), works, way, 0.9 * way) == 0.0, "noise is no time"


def test_one_rank_waits_for_nobody() -> None:
    assert compute_and_all_reduce_time([TimeBreakdown(compute=1.0)], TimeBreakdown(), 3.0) == TimeBreakdown(compute=1.0)
